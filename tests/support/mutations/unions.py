# SPDX-License-Identifier: Apache-2.0
"""Tiles in two types share memory: copies fill the one, threads the other."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.mutations.mutant import Launch, Subject, Switches, Wrong, rows

STEPS, ROWS, COLUMNS = 3, 16, 64


def make(m: Switches) -> Launch:
    def body(x, o, union, filled, emptied):
        wg = lax.axis_index("wg")
        (tile, *_), result = union
        mine = plgpu.ds((0 if m("one half") else wg) * (ROWS // 2), ROWS // 2)

        def step(i, carry):
            @plgpu.when(wg == 0)
            def _():
                if not m("no wait for the stores"):
                    plgpu.wait_smem_to_gmem(0)
                plgpu.copy_gmem_to_smem(x.at[i], tile, filled)  # at: load

            if not m("no wait for the copy"):
                plgpu.barrier_wait(filled)
            value = tile[mine]  # at: read
            if not m("no order between the members"):
                plgpu.barrier_arrive(emptied)
                plgpu.barrier_wait(emptied)
            half = value.astype(jnp.int16)
            if m("added to the old member"):
                tile[mine] = value  # at: write old
            result[mine] = half  # at: write
            if not m("no commit between the members"):
                plgpu.commit_smem()
            if not m("no order before the store"):
                plgpu.barrier_arrive(emptied)
                plgpu.barrier_wait(emptied)

            @plgpu.when(wg == 0)
            def _():
                plgpu.copy_smem_to_gmem(result, o.at[i])  # at: store

            return carry

        lax.fori_loop(0, STEPS, step, None)
        plgpu.wait_smem_to_gmem(0)

    x = np.arange(STEPS * ROWS * COLUMNS, dtype=np.float32)
    x = x.reshape(STEPS, ROWS, COLUMNS)
    tile = plgpu.SMEM((ROWS, COLUMNS), jnp.float32)
    return Launch.of(
        body,
        [x],
        x.astype(np.int16),
        plgpu.RefUnion((tile, tile), plgpu.SMEM((ROWS, COLUMNS), jnp.int16)),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=2),
        threads={"wg": 2},
    )


SUBJECT = Subject(
    make,
    (
        *rows(
            "waits",
            ("no wait for the stores", errors.RaceError, "load", "store"),
            ("no wait for the copy", errors.RaceError, "read", "load"),
            ("no order between the members", errors.RaceError, "read", "write"),
            ("no order before the store", errors.RaceError, "store", "write"),
        ),
        *rows(
            "commits",
            ("no commit between the members", errors.RaceError, "store", "write"),
        ),
        *rows(
            "two writers",
            ("added to the old member", errors.RaceError, "write", "write old"),
        ),
        *rows("axes", ("one half", Wrong)),
    ),
)
