# SPDX-License-Identifier: Apache-2.0
"""A persistent kernel: two CTAs share a grid of tiles, each keeps a store in flight."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.mutations.mutant import Launch, Subject, Switches, rows

GRID, CTAS, SLOTS = (3, 2), 2, 2
TILE = (8, 32)


def make(m: Switches) -> Launch:
    def body(x, o, tile, staged, full):
        grid = (GRID[0], GRID[1] + 1) if m("a tile too many in each row") else GRID
        grid = (GRID[0] - 1, GRID[1]) if m("a row of tiles too few") else grid

        def each(loop_info):
            i, j = loop_info.index
            if m("rows and columns exchanged"):
                i, j = j, i
            rows, columns = (
                plgpu.ds(i * TILE[0], TILE[0]),
                plgpu.ds(j * TILE[1], TILE[1]),
            )
            plgpu.copy_gmem_to_smem(x.at[rows, columns], tile, full)  # at: copy
            if not m("no wait for the tile"):
                plgpu.barrier_wait(full)  # at: wait
            value = tile[...] + 1  # at: read
            slot = lax.rem(loop_info.local_index, SLOTS)
            slot = 0 * slot if m("one slot of two") else slot
            if not m("no wait for the store"):
                plgpu.wait_smem_to_gmem(2 if m("two stores in flight") else 1)
            staged[slot] = value  # at: stage
            if not m("no commit"):
                plgpu.commit_smem()
            sent = 1 - slot if m("the other slot is stored") else slot
            at = plgpu.ds(0, TILE[1]) if m("stores to the first column") else columns
            out, commit = o.at[rows, at], not m("no group")
            plgpu.copy_smem_to_gmem(  # at: store
                staged.at[sent], out, commit_group=commit
            )

        axes = "i"
        if m("every CTA does all tiles"):
            for i in range(GRID[0]):
                for j in range(GRID[1]):
                    index = jnp.int32(i), jnp.int32(j)
                    each(plgpu.NDLoopInfo(index, jnp.int32(i * GRID[1] + j), None))
        else:
            plgpu.nd_loop(grid, collective_axes=axes)(each)
        plgpu.wait_smem_to_gmem(0)

    shape = (GRID[0] * TILE[0], GRID[1] * TILE[1])
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    ctas = CTAS - 1 if m("one CTA") else CTAS
    return Launch.of(
        body,
        [x],
        x + 1,
        plgpu.SMEM(TILE, jnp.float32),
        plgpu.SMEM((SLOTS, *TILE), jnp.float32),
        plgpu.Barrier(num_arrivals=2 if m("two arrivals expected") else 1),
        grid={"i": ctas},
    )


SUBJECT = Subject(
    make,
    (
        *rows(
            "bounds", ("a tile too many in each row", errors.OutOfBoundsError, "copy")
        ),
        *rows(
            "counts",
            ("a row of tiles too few", errors.UnwrittenResultError, "store"),
            ("two stores in flight", errors.RaceError, "stage", "store"),
            ("two arrivals expected", errors.DeadlockError, "wait"),
        ),
        *rows("axes", ("rows and columns exchanged", errors.OutOfBoundsError, "copy")),
        *rows(
            "waits",
            ("no wait for the tile", errors.RaceError, "copy", "read"),
            ("no wait for the store", errors.RaceError, "stage", "store"),
        ),
        *rows(
            "slots",
            ("one slot of two", errors.RaceError, "stage", "store"),
            ("the other slot is stored", errors.UninitializedReadError, "store"),
        ),
        *rows(
            "commits",
            ("no commit", errors.RaceError, "stage", "store"),
            ("no group", errors.RaceError, "stage", "store"),
        ),
        *rows("two writers", ("stores to the first column", errors.RaceError, "store")),
    ),
    # CTAs that copy equal values are no race.
    variants=("one CTA", "every CTA does all tiles"),
)
