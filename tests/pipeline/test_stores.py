# SPDX-License-Identifier: Apache-2.0
"""`TileStore`: parts of tiles, of an odd number too, through a few buffers."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.public_calls import top
from tests.support.refusal import refused

TILES = 3


@pytest.mark.parametrize("buffers", [1, 2, 3])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5])
def test_a_part_waits_for_the_copy_from_its_buffer(parts, buffers):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((TILES, parts, 8, 64)).astype(np.float32)

    def body(x, o, smem):
        store = plgpu.TileStore(smem, parts)

        @plgpu.loop(0, TILES)
        def _(i):
            for part in range(parts):
                value = x[i, part] * 2
                store.store(part, lambda value=value: value, o.at[i, part])

        plgpu.wait_smem_to_gmem(0)

    smem = plgpu.SMEM((buffers, 8, 64), jnp.float32)
    everywhere.check(everywhere.kernel(body, x, smem), (x,), x * 2)


def test_a_part_is_converted_and_turned_and_need_not_be_copied():
    x = np.arange(64 * 16, dtype=np.float32).reshape(64, 16)
    expected = np.zeros((2, 16, 64), np.float16)
    expected[0] = x.T

    def body(x, o, smem):
        store = plgpu.TileStore(smem, 2)
        o[1] = jnp.zeros((16, 64), jnp.float16)
        value = plgpu.load(x, layout=plgpu.Layout.WGMMA, optimized=False)
        for part in range(2):
            place = o.at[part]
            store.store(part, value, place, predicate=part == 0, transposed=True)
        plgpu.wait_smem_to_gmem(0)

    tiling = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
    smem = plgpu.SMEM((2, 16, 64), jnp.float16, transforms=tiling)
    everywhere.check(everywhere.kernel(body, expected, smem), (x,), expected)


@pytest.mark.parametrize("shape", [(16, 128), (8, 192), (24, 64)])
def test_a_tile_is_stored_part_by_part(shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)

    def body(x, o, smem):
        parts = shape[0] // 8 * (shape[1] // 64)
        plgpu.TileStore(smem, parts).store_all(x[...] * 2, o)
        plgpu.wait_smem_to_gmem(0)

    smem = plgpu.SMEM((2, 8, 64), jnp.float32)
    everywhere.check(everywhere.kernel(body, x, smem), (x,), x * 2)


@pytest.mark.parametrize(("shape", "parts"), [((16, 96), 3), ((16, 128), 2)])
@refused
def test_a_tile_that_is_not_divided_into_the_parts(shape, parts):
    def body(o, smem):
        plgpu.TileStore(smem, parts).store_all(jnp.zeros(shape, jnp.float32), o)

    smem = plgpu.SMEM((2, 8, 64), jnp.float32)
    everywhere.kernel(body, np.zeros(shape, np.float32), smem)(None)()


GOOD = {"TileStore": top(buffers=plgpu.SMEM((2, 8, 64), jnp.float32), parts=2)}
