# SPDX-License-Identifier: Apache-2.0
"""`TileStore`: parts of tiles, of an odd number too, through a few buffers."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.public_calls import top

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


GOOD = {"TileStore": top(buffers=plgpu.SMEM((2, 8, 64), jnp.float32), parts=2)}
