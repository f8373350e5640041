# SPDX-License-Identifier: Apache-2.0
"""Scratch in GMEM: threads store rows, TMA exchanges them, and adds them up."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.mutations.mutant import Launch, Subject, Switches, Wrong, rows

CTAS, N = 2, 64
F32 = jnp.float32


def make(m: Switches) -> Launch:
    def body(x, o, work, total, tile, full, met):
        i = lax.axis_index("c")
        place = 0 if m("one row for all") else i
        if not m("nothing stored"):
            work[place] = x[i]  # at: store
        if not m("no fence"):
            plgpu.commit_gmem()
        if not m("no arrival"):
            plgpu.barrier_arrive(met)
        if not m("no wait for the others"):
            plgpu.barrier_wait(met)  # at: meet
        other = i if m("own row") else 1 - i
        plgpu.copy_gmem_to_smem(work.at[other], tile, full)  # at: load
        if not m("no wait for the copy"):
            plgpu.barrier_wait(full)  # at: wait
        o[i] = tile[...]  # at: read
        kind = None if m("not added") else "add"
        plgpu.copy_smem_to_gmem(tile, total, reduction_op=kind)  # at: add
        if not m("no wait for the sum"):
            plgpu.wait_smem_to_gmem(0)
        plgpu.barrier_arrive(met)
        if not m("no wait before the sum is read"):
            plgpu.barrier_wait(met)
        o[2 + i] = total[...]  # at: sum

    x = np.arange(CTAS * N, dtype=np.float32).reshape(CTAS, N)
    twice = m("two arrivals of each CTA")

    total = np.broadcast_to(x.sum(0), x.shape)
    return Launch.of(
        body,
        [x],
        np.concatenate([x[::-1], total]),
        plgpu.GMEM((CTAS, N), F32),
        plgpu.GMEM((N,), F32, init=None if m("no initial sum") else 0),
        plgpu.SMEM((N,), F32),
        plgpu.Barrier(),
        plgpu.ClusterBarrier(collective_axes="c", num_arrivals=2 if twice else 1),
        cluster={"c": CTAS},
    )


RACE, UNDEFINED = errors.RaceError, errors.UninitializedReadError
SUBJECT = Subject(
    make,
    (
        *rows("fences", ("no fence", RACE, "load")),
        *rows(
            "waits",
            ("no wait for the others", RACE, "load"),
            ("no wait for the others", UNDEFINED, "load"),
            ("no wait for the copy", RACE, "load", "read"),
            ("no wait for the sum", RACE, "sum"),
            ("no wait before the sum is read", RACE, "sum"),
        ),
        *rows("arrivals", ("no arrival", errors.DeadlockError, "meet")),
        *rows("counts", ("two arrivals of each CTA", errors.DeadlockError, "meet")),
        *rows(
            "initialisation",
            ("nothing stored", UNDEFINED),
            ("no initial sum", UNDEFINED, "add"),
        ),
        *rows(
            "two writers",
            ("one row for all", RACE, "store"),
            ("not added", RACE, "add"),
        ),
        *rows("offsets", ("own row", Wrong)),
    ),
)
