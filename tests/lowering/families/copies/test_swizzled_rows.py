# SPDX-License-Identifier: Apache-2.0
"""Swizzled tiles of fewer than eight rows: the pattern is one of addresses."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.refusal import refused_by

X = (np.arange(64 * 128).reshape(64, 128) % 1000).astype(np.float16)


def declared(tiling, swizzle=128, dtype=np.float16):
    transforms = plgpu.TilingTransform(tiling), plgpu.SwizzleTransform(swizzle)
    return plgpu.SMEM(X.shape, dtype, transforms=transforms)


def check(body, expected, tile):
    x = X.astype(tile.dtype)
    out = jax.ShapeDtypeStruct(expected.shape, x.dtype)
    make = everywhere.kernel(body, out, tile, plgpu.Barrier())
    everywhere.check(make, [x], expected.astype(x.dtype))


@pytest.mark.parametrize(
    "tile",
    [
        declared((1, 64)),
        declared((64,)),
        declared((4, 64)),
        declared((1, 16), 64, np.float32),
    ],
    ids=str,
)
def test_copies_in_and_out_and_rows_that_threads_read(tile):
    def body(x, o, tile, barrier):
        plgpu.copy_gmem_to_smem(x, tile, barrier)
        plgpu.barrier_wait(barrier)

        @plgpu.loop(0, 32)
        def _(i):
            o[i] = tile[i]

        plgpu.copy_smem_to_gmem(tile.at[32:], o.at[32:])
        plgpu.wait_smem_to_gmem(0)

    check(body, X, tile)


def test_a_part_starts_at_any_row():
    def body(x, o, tile, barrier):
        plgpu.copy_gmem_to_smem(x.at[3:6, 64:], tile.at[5:8, 64:], barrier)
        plgpu.barrier_wait(barrier)
        o[...] = tile[5:8, 64:]

    check(body, X[3:6, 64:], declared((1, 64)))


def run(body):
    out = jax.ShapeDtypeStruct((64, 64), np.float32)
    everywhere.kernel(body, out, declared((1, 64)))(True)(X)


@refused_by(run)
def test_the_tensor_core_reads_tiles_of_eight_rows(x, o, tile):
    def scope(acc):
        plgpu.wgmma(acc, tile, plgpu.transpose_ref(tile, (1, 0)))  # HERE
        return acc[...]

    o[...] = plgpu.run_scoped(scope, plgpu.ACC((64, 64)))
