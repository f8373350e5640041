# SPDX-License-Identifier: Apache-2.0
"""CTAs of a grid hand rows to each other, by threads and by TMA, with semaphores."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.mutations.mutant import Launch, Subject, Switches, Wrong, rows

CTAS = 3
ROW = (128,)
F32 = jnp.float32


def make(m: Switches) -> Launch:
    regular = plgpu.SemaphoreType.REGULAR

    def body(x, o, by_threads, by_copies, tile, copied):
        i = lax.axis_index("i")
        arrived, go = plgpu.get_global(regular), plgpu.get_global(regular((CTAS,)))
        next_one = (i + 1) % CTAS
        row = next_one if m("rows of the next CTA") else i
        place = 0 if m("one row for all") else row
        tile[...] = x[row]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, by_copies.at[row])  # at: store
        if not m("no wait for the store"):
            plgpu.wait_smem_to_gmem(0, wait_read_only=m("a wait for the reads"))
        by_threads[place] = 2 * x[row]  # at: threads
        if not m("no fence"):
            plgpu.commit_gmem()
        if m("a CTA does not arrive"):
            plgpu.when(i > 0)(lambda: plgpu.semaphore_signal(arrived))
        elif m("CTAs arrive twice"):
            plgpu.semaphore_signal(arrived, 2)  # at: twice
        elif not m("nobody arrives"):
            plgpu.semaphore_signal(arrived)  # at: once

        @plgpu.when(i == 0)
        def _():
            if not m("the first CTA does not wait"):
                count = CTAS - 1 if m("one CTA is not waited for") else CTAS
                keep = m("the count is kept")
                plgpu.semaphore_wait(arrived, count, decrement=not keep)  # at: arrived
            for cta in range(1 if m("the first CTA is forgotten") else 0, CTAS):
                plgpu.semaphore_signal(go.at[cta])  # at: go

        if not m("no wait"):
            plgpu.semaphore_wait(go.at[0 if m("one semaphore") else i])  # at: wait
        other = row if m("own rows again") else next_one
        plgpu.copy_gmem_to_smem(by_threads.at[other], tile, copied)  # at: load
        plgpu.barrier_wait(copied)
        o[i] = tile[...] + by_copies[other]  # at: result

    x = np.arange(CTAS * 128, dtype=np.float32).reshape(CTAS, *ROW)
    return Launch.of(
        body,
        [x],
        3 * np.roll(x, -1, 0),
        plgpu.GMEM((CTAS, *ROW), F32, init=0),
        plgpu.GMEM((CTAS, *ROW), F32, init=0),
        plgpu.SMEM(ROW, F32),
        plgpu.Barrier(),
        grid={"i": CTAS},
    )


SUBJECT = Subject(
    make,
    (
        *rows("offsets", ("own rows again", Wrong)),
        *rows("two writers", ("one row for all", errors.RaceError, "threads")),
        *rows("fences", ("no fence", errors.RaceError, "load", "threads")),
        *rows(
            "commits",
            ("no wait for the store", errors.RaceError, "store"),
            ("a wait for the reads", errors.RaceError, "store"),
        ),
        *rows(
            "arrivals",
            ("a CTA does not arrive", errors.DeadlockError, "arrived"),
            ("nobody arrives", errors.DeadlockError, "arrived"),
            ("the first CTA is forgotten", errors.DeadlockError, "wait"),
        ),
        *rows(
            "waits",
            ("no wait", errors.RaceError, "load", "threads"),
            ("no wait", errors.RaceError, "result", "store"),
            ("one semaphore", errors.DeadlockError, "wait"),
            ("the first CTA does not wait", errors.RaceError, "threads"),
        ),
        *rows(
            "counts",
            ("CTAs arrive twice", errors.SemaphoreError, "twice"),
            ("CTAs arrive twice", errors.RaceError, "load", "threads"),
            ("CTAs arrive twice", errors.RaceError, "result", "store"),
            ("one CTA is not waited for", errors.SemaphoreError, "once"),
            ("one CTA is not waited for", errors.RaceError, "load", "threads"),
            ("one CTA is not waited for", errors.RaceError, "result", "store"),
            ("the count is kept", errors.SemaphoreError, "once"),
        ),
    ),
    variants=("rows of the next CTA",),
)
