# SPDX-License-Identifier: Apache-2.0
"""CTAs of a cluster reduce by way of GMEM: partial sums, a barrier, TMA reads them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.mutations.mutant import Launch, Subject, Switches, Wrong, rows

CTAS = 2
PART = (8, 128)


def make(m: Switches) -> Launch:
    def body(x, o, partial, parts, ready, copied):
        cta = lax.axis_index("x")
        own = x[0 if m("all CTAs sum the first") else cta]
        value = own.sum(axis=0, keepdims=True) if m("sum of the rows") else own
        place = 0 if m("partial sums in one place") else cta
        if m("half of a partial sum"):
            partial[place, :4] = own[:4]
        elif m("sum of the rows"):
            partial[place] = jnp.broadcast_to(value, PART)
        elif not m("no partial sum"):
            partial[place] = 2 * own  # at: partial
        if not m("no fence"):
            plgpu.commit_gmem()
        if m("one CTA arrives"):
            plgpu.when(cta == 0)(lambda: plgpu.barrier_arrive(ready))
        elif not m("no arrival"):
            plgpu.barrier_arrive(ready)  # at: arrive
        if not m("no wait for the others"):
            plgpu.barrier_wait(ready)  # at: wait ready
        source = x if m("sum of the inputs") else partial
        plgpu.copy_gmem_to_smem(source, parts, copied)  # at: copy
        if not m("no wait for the copy"):
            plgpu.barrier_wait(copied)  # at: wait copied
        total = parts[0] + parts[0 if m("one part twice") else 1]  # at: read
        row = 0 if m("both results in one place") else cta
        if m("one CTA stores"):

            @plgpu.when(cta == 0)
            def _():
                o[row] = total  # at: one result

        else:
            o[row] = total + cta  # at: result
        if m("partial sums cleared"):
            partial[place] = jnp.zeros(PART, jnp.float32)  # at: clear

    x = np.arange(CTAS * 8 * 128, dtype=np.float32).reshape(CTAS, *PART)
    ready = plgpu.ClusterBarrier(
        collective_axes="x", num_arrivals=2 if m("two arrivals of each CTA") else 1
    )
    if m("a barrier of each CTA"):
        ready = plgpu.Barrier()
    total = 2 * x.sum(0)
    return Launch.of(
        body,
        [x],
        [np.stack([total, total + 1]), 2 * x],
        plgpu.SMEM((CTAS, *PART), jnp.float32),
        ready,
        plgpu.Barrier(num_arrivals=2 if m("two copies expected") else 1),
        cluster={"x": CTAS},
    )


SUBJECT = Subject(
    make,
    (
        *rows(
            "offsets",
            ("all CTAs sum the first", Wrong),
            ("sum of the inputs", Wrong),
            ("one part twice", Wrong),
        ),
        *rows("axes", ("sum of the rows", Wrong)),
        *rows(
            "two writers",
            ("partial sums in one place", errors.RaceError, "partial"),
            ("both results in one place", errors.RaceError, "result"),
            ("partial sums cleared", errors.RaceError, "clear", "copy"),
        ),
        *rows(
            "initialisation",
            ("half of a partial sum", errors.UninitializedReadError, "copy", "result"),
            ("no partial sum", errors.UninitializedReadError, "copy", "result"),
        ),
        *rows("fences", ("no fence", errors.RaceError, "copy", "partial")),
        *rows(
            "arrivals",
            ("one CTA arrives", errors.DeadlockError, "wait ready"),
            ("no arrival", errors.DeadlockError, "wait ready"),
            ("a barrier of each CTA", errors.RaceError, "copy", "partial"),
        ),
        *rows(
            "waits",
            ("no wait for the others", errors.RaceError, "copy", "partial"),
            ("no wait for the copy", errors.RaceError, "copy", "read"),
        ),
        *rows(
            "divergence", ("one CTA stores", errors.UnwrittenResultError, "one result")
        ),
        *rows(
            "counts",
            ("two arrivals of each CTA", errors.DeadlockError, "wait ready"),
            ("two copies expected", errors.DeadlockError, "wait copied"),
        ),
    ),
)
