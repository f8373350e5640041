# SPDX-License-Identifier: Apache-2.0
"""SMEM of a scope that has ended may be read until something may replace it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.refusal import refused_by

F32 = jnp.float32
TILE = plgpu.SMEM((128,), F32)


def run(body, **options):
    x = np.arange(256, dtype=np.float32).reshape(2, 128)
    return everywhere.emulate(body, [x], x, schedules=5, **options)


def store(x, o, row):
    def scope(tile):
        tile[...] = x[row] + 1
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, o.at[row])

    return scope


def test_a_wait_may_follow_the_scope():
    def body(x, o):
        plgpu.run_scoped(store(x, o, 0), TILE)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.run_scoped(store(x, o, 1), TILE)
        plgpu.wait_smem_to_gmem(0)

    np.testing.assert_array_equal(run(body), np.arange(256).reshape(2, 128) + 1)


def test_all_warpgroups_wait_before_the_next_scope():
    def body(x, o):
        wg = lax.axis_index("wg")

        def scope(row):
            def inside(tiles):
                @plgpu.when(wg == row)
                def _():
                    store(x, o, row)(tiles.at[row])

            return inside

        tiles = plgpu.SMEM((2, 128), F32)
        for row in range(2):
            plgpu.run_scoped(scope(row), tiles, collective_axes="wg")
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    got = run(body, num_threads=2, thread_name="wg")
    np.testing.assert_array_equal(got, np.arange(256).reshape(2, 128) + 1)


@refused_by(run)
def test_the_next_scope_may_have_the_same_memory(x, o):
    plgpu.run_scoped(store(x, o, 0), TILE)
    plgpu.run_scoped(store(x, o, 1), TILE)
    plgpu.wait_smem_to_gmem(0)
