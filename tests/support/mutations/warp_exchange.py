# SPDX-License-Identifier: Apache-2.0
"""The warps of a warpgroup turn a matrix: each writes rows for all others, in SMEM."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.mutations.mutant import Launch, Subject, Switches, Wrong, rows

WARPS, ROWS, ROUNDS = 4, 8, 2
SIZE = WARPS * ROWS


def make(m: Switches) -> Launch:
    def body(x, o, tile, written, read):
        @plgpu.warp_map
        def _(warp):
            part = plgpu.ds(ROWS * warp, ROWS)
            place = plgpu.ds(0, ROWS) if m("one place for all") else part

            @plgpu.loop(0, ROUNDS)
            def _(i):
                def copied(own, full):
                    plgpu.copy_gmem_to_smem(x.at[i, part], own, full)  # at: copy
                    if not m("no wait for the copy"):
                        plgpu.barrier_wait(full)
                    tile[place] = own[...] + 1  # at: write

                own = plgpu.SMEM((ROWS, SIZE), jnp.float32)
                plgpu.run_scoped(copied, own, plgpu.Barrier())
                arriving = WARPS - 1 if m("three warps arrive") else WARPS
                plgpu.when(warp < arriving)(lambda: plgpu.barrier_arrive(written))
                if not m("no wait for the others"):
                    plgpu.barrier_wait(written)  # at: wait
                columns = plgpu.load(tile.at[:, part], optimized=False)  # at: read
                turned = columns.T
                if m("not turned"):
                    turned = columns.reshape(ROWS, SIZE)
                if not m("no arrival after reading"):
                    plgpu.barrier_arrive(read)
                o[i, part] = turned
                if not m("no wait for the readers"):
                    plgpu.barrier_wait(read)  # at: wait read

    x = np.arange(ROUNDS * SIZE * SIZE, dtype=np.float32)
    x = x.reshape(ROUNDS, SIZE, SIZE)
    arrivals = 3 if m("three arrivals expected") else WARPS
    arrivals = 5 if m("five arrivals expected") else arrivals
    return Launch.of(
        body,
        [x],
        (x + 1).transpose(0, 2, 1),
        plgpu.SMEM((SIZE, SIZE), jnp.float32),
        plgpu.Barrier(num_arrivals=arrivals),
        plgpu.Barrier(num_arrivals=WARPS),
    )


SUBJECT = Subject(
    make,
    (
        *rows("two writers", ("one place for all", errors.RaceError, "write")),
        *rows(
            "arrivals",
            ("three warps arrive", errors.DeadlockError, "wait"),
            ("no arrival after reading", errors.DeadlockError, "wait read"),
        ),
        *rows(
            "waits",
            ("no wait for the copy", errors.RaceError, "copy", "write"),
            ("no wait for the others", errors.RaceError, "read", "write"),
            ("no wait for the others", errors.UninitializedReadError, "read"),
            ("no wait for the readers", errors.RaceError, "read", "write"),
        ),
        *rows("axes", ("not turned", Wrong)),
        *rows(
            "counts",
            ("three arrivals expected", errors.RaceError, "read", "write"),
            ("three arrivals expected", errors.UninitializedReadError, "read"),
            ("three arrivals expected", errors.BarrierError, "wait"),
            ("five arrivals expected", errors.DeadlockError, "wait"),
        ),
    ),
)
