# SPDX-License-Identifier: Apache-2.0
"""Each warp of a warpgroup fetches a quarter of a tile; the warpgroup adds them up."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.mutations.mutant import Launch, Subject, Switches, Wrong, rows

WARPS, STEPS = 4, 3
PART = (8, 128)


def make(m: Switches) -> Launch:
    def body(x, o, parts, totals, full):
        def turn(k, sums):
            @plgpu.warp_map
            def _(warp_id):
                source = 0 if m("one part for all") else warp_id
                place = 0 if m("one place for all") else warp_id

                def copy():
                    step = k + 1 if m("the next step's parts") else k
                    part = x.at[step, source]
                    plgpu.copy_gmem_to_smem(part, parts.at[place], full)  # at: copy

                if m("three warps copy"):
                    plgpu.when(warp_id < WARPS - 1)(copy)
                elif m("the first warp copies twice"):
                    copy()
                    plgpu.when(warp_id == 0)(copy)
                else:
                    copy()
                totals[0 if m("counted in one place") else warp_id] = k  # at: count

            if not m("no wait"):
                plgpu.barrier_wait(full)  # at: wait
            if m("waited for twice"):
                plgpu.barrier_wait(full)  # at: second wait
            added = range(3) if m("three parts added") else range(WARPS)
            for i in added:
                sums = sums + parts[0 if m("one part added") else i]  # at: read
            return sums + totals[3].astype(jnp.float32)  # at: read count

        start = 1 if m("the first step is left out") else 0
        zeros = jnp.zeros(PART, jnp.float32)
        o[...] = lax.fori_loop(start, STEPS, turn, zeros)  # at: result

    x = np.arange(STEPS * WARPS * 1024, dtype=np.float32).reshape(STEPS, WARPS, *PART)
    count = WARPS + 1 if m("five copies expected") else WARPS
    count = 1 if m("one copy expected") else count
    return Launch.of(
        body,
        [x],
        x.sum((0, 1)) + np.float32(3),
        plgpu.SMEM((WARPS, *PART), jnp.float32),
        plgpu.SMEM((WARPS,), jnp.int32),
        plgpu.Barrier(num_arrivals=count),
    )


SUBJECT = Subject(
    make,
    (
        *rows(
            "offsets",
            ("one part for all", Wrong),
            ("one part added", Wrong),
            ("three parts added", Wrong),
            ("the first step is left out", Wrong),
        ),
        *rows(
            "two writers",
            ("one place for all", errors.RaceError, "copy"),
            ("the first warp copies twice", errors.RaceError, "copy"),
        ),
        *rows("bounds", ("the next step's parts", errors.OutOfBoundsError, "copy")),
        *rows("divergence", ("three warps copy", errors.DeadlockError, "wait")),
        *rows(
            "initialisation",
            (
                "counted in one place",
                errors.UninitializedReadError,
                "read count",
                "result",
            ),
        ),
        *rows("waits", ("no wait", errors.RaceError, "copy", "read")),
        *rows("phases", ("waited for twice", errors.DeadlockError, "second wait")),
        *rows(
            "counts",
            ("five copies expected", errors.DeadlockError, "wait"),
            ("one copy expected", errors.BarrierError, "wait"),
            ("one copy expected", errors.BarrierError, "copy"),
        ),
    ),
)
