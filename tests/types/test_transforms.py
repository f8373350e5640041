# SPDX-License-Identifier: Apache-2.0
"""Tilings and swizzles as part of an SMEM array's type."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pallas_gpu as plgpu
from pallas_gpu import types
from tests.support.refusal import refused

F16, F32 = jnp.float16, jnp.float32


def tiled(*tiling: int, swizzle: int | None = None) -> tuple:
    steps = [plgpu.TilingTransform(tiling)]
    return (*steps, plgpu.SwizzleTransform(swizzle)) if swizzle else tuple(steps)


# --- find_swizzle ---------------------------------------------------------------------


@given(st.integers(1, 4096))
def test_find_swizzle_takes_the_widest_that_divides(chunks):
    found = plgpu.find_swizzle(chunks * 128)
    fitting = [s for s in (16, 32, 64, 128) if chunks * 128 % (s * 8) == 0]
    assert found == max(fitting)


@pytest.mark.parametrize("bits", [8, 64, 129])
@refused
def test_find_swizzle_refuses_what_is_no_multiple_of_16_bytes(bits):
    plgpu.find_swizzle(bits, "lhs")  # HERE


# --- declarations ---------------------------------------------------------------------


@pytest.mark.parametrize("tiling", [(), (0, 64), (-8, 64)])
@refused
def test_a_tiling_has_positive_sizes(tiling):
    plgpu.TilingTransform(tiling)  # HERE


@pytest.mark.parametrize("swizzle", [0, 8, 48, 256])
@refused
def test_a_swizzle_is_one_of_the_hardware(swizzle):
    plgpu.SwizzleTransform(swizzle)  # HERE


@refused
def test_a_tiling_divides_its_array():
    plgpu.SMEM((60, 128), F16, transforms=tiled(8, 64))  # HERE


@refused
def test_a_tiling_has_no_more_dimensions_than_its_array():
    plgpu.SMEM((128,), F16, transforms=tiled(8, 64))  # HERE


@refused
def test_a_swizzle_is_as_wide_as_the_tile():
    plgpu.SMEM((64, 128), F32, transforms=tiled(8, 64, swizzle=128))  # HERE


@refused
def test_a_swizzled_tile_has_eight_rows():
    plgpu.SMEM((64, 128), F16, transforms=tiled(4, 64, swizzle=128))  # HERE


@refused
def test_an_array_has_one_tiling():
    plgpu.SMEM((64, 128), F16, transforms=tiled(8, 64) * 2)  # HERE


@refused
def test_a_transform_is_known():
    plgpu.SMEM((64, 128), F16, transforms=["tile"])  # HERE


@pytest.mark.parametrize("shape", [(0, 4), (-1,), (1.5,), ("n",)])
@refused
def test_a_shape_has_positive_static_sizes(shape):
    plgpu.SMEM(shape, F16)  # HERE


@pytest.mark.parametrize("space", [plgpu.GMEM, plgpu.TMEM, plgpu.REGS])
@refused
def test_transforms_belong_to_smem(space):
    space((64, 128), F16, transforms=tiled(8, 64))  # HERE


# --- storage --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [(F32, 32), (jnp.bfloat16, 16), (jnp.int8, 8), (jnp.bool_, 8), (jnp.int4, 4)],
)
def test_itemsize_bits(dtype, bits):
    assert types.itemsize_bits(dtype) == bits


@given(st.sampled_from([16, 32, 64, 128]), st.integers(1, 3), st.integers(1, 3))
def test_every_fitting_swizzle_is_a_placement_of_all_bytes(swizzle, m, n):
    minor = swizzle // 2
    layout = types.smem_layout(
        (8 * m, minor * n), F16, tiled(8, minor, swizzle=swizzle)
    )
    rows, columns = np.indices((8 * m, minor * n)).reshape(2, -1)
    offsets = layout.byte_offsets(np.stack([rows, columns], axis=-1))
    assert sorted(offsets) == list(range(0, layout.size_bytes, 2))
