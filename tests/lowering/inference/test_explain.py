# SPDX-License-Identifier: Apache-2.0
"""Where no layouts satisfy a kernel the error names who conflicts, and a way out."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.layouts import Layout, TmemLayout
from tests.support.inferred import SQUARE, X, array, infer
from tests.support.refusal import refused_by

F16 = jnp.float16
STRIDED = Layout.WG_STRIDED(SQUARE, 4)
TILE, ACC = plgpu.SMEM(SQUARE, F16), plgpu.ACC(SQUARE)
HALVES, INDEX = array(dtype=F16), array(1, dtype=jnp.int32)


# --- arrays in SMEM -------------------------------------------------------------------


@refused_by(infer, [X], X, TILE, TILE, ACC)
def test_wgmma_and_an_operation_that_takes_the_address(x, o, a, b, acc):
    o[0, 0] = plgpu.load(b.bitcast(jnp.int16).reshape(4096).at[5]).astype(o.dtype)
    plgpu.wgmma(acc, a, b)  # HERE


@refused_by(infer, [INDEX], X, plgpu.SMEM((128, 64), F16), TILE, ACC)
def test_a_part_that_may_start_inside_of_a_tile(i, o, a, b, acc):
    plgpu.wgmma(acc, a.at[plgpu.ds(i[0] * 4, 64)], b)  # HERE


WITHOUT_SWIZZLE = plgpu.SMEM(SQUARE, F16, transforms=(plgpu.TilingTransform((8, 8)),))
PRODUCT = TILE, plgpu.TMEM(SQUARE, jnp.float32), plgpu.Barrier(orders_tensor_core=True)


@refused_by(infer, [X], X, WITHOUT_SWIZZLE, *PRODUCT, target="sm_100a")
def test_transforms_that_the_tensor_core_does_not_read(x, o, a, b, acc, done):
    plgpu.tcgen05_mma(acc, a, b, done, accumulate=False)  # HERE


@refused_by(
    infer,
    [INDEX],
    array(128, 32, dtype=F16),
    plgpu.TMEM((128, 64), F16, packed=True),
    target="sm_100a",
)
def test_a_load_that_may_start_inside_of_a_column(i, o, tmem):
    o[...] = plgpu.async_load_tmem(tmem.at[:, plgpu.ds(i[0], 32)])  # HERE


IN_HALVES = plgpu.TMEM((64, 128), jnp.float32, layout=TmemLayout.half_lane(64))


@pytest.mark.parametrize("step", [32, 1])
@refused_by(infer, [INDEX], X, TILE, TILE, IN_HALVES, PRODUCT[-1], target="sm_100a")
def test_an_accumulator_that_may_start_inside_of_a_tile(i, o, a, b, acc, done, *, step):
    part = acc.at[:, plgpu.ds(i[0] * step, 64)]
    plgpu.tcgen05_mma(part, a, b, done, accumulate=False)  # HERE


# --- layout_cast ----------------------------------------------------------------------


@refused_by(infer, [array(48, 64)], X)
def test_a_cast_whose_tiles_do_not_divide_the_shape(x, o):
    plgpu.layout_cast(x[...], Layout.WGMMA)  # HERE


@refused_by(infer)
def test_a_cast_to_a_layout_of_another_shape(x, o):
    plgpu.layout_cast(x[...], Layout.WG_STRIDED((64, 32), 4))  # HERE


@refused_by(infer)
def test_a_cast_of_an_array_to_a_splat(x, o):
    o[...] = plgpu.layout_cast(x[...], Layout.WG_SPLAT(SQUARE))  # HERE


# --- too little scratch ---------------------------------------------------------------


@refused_by(infer, scratch_bytes=0)
def test_two_casts_and_no_scratch_between_them(x, o):
    y = jnp.exp(plgpu.load(x, layout=STRIDED))
    o[...] = plgpu.layout_cast(y, Layout.WGMMA)  # HERE


@refused_by(infer, [HALVES], X, TILE, ACC, scratch_bytes=0)
def test_a_cast_and_the_tensor_core_and_no_scratch_between_them(x, o, b, acc):
    left = -plgpu.load(x, layout=STRIDED)
    plgpu.wgmma(acc, left, b)  # HERE


@refused_by(infer, [X], array(32, 64), scratch_bytes=0)
def test_a_slice_that_cuts_the_tiles_of_a_cast(x, o):
    y = plgpu.load(x, layout=Layout.WGMMA)
    o[...] = lax.slice(y, (0, 0), (32, 64))  # HERE


@refused_by(infer, [array(64, 24)], array(48, 32), scratch_bytes=0)
def test_a_reshape_that_the_layout_of_a_cast_does_not_survive(x, o):
    y = plgpu.load(x, layout=Layout.WGMMA)
    o[...] = y.reshape(48, 32)  # HERE


@refused_by(infer, [array(128), array(128, 64)], array(128, 64), scratch_bytes=0)
def test_a_broadcast_whose_operand_is_cast_to_other_threads(x, y, o):
    row = plgpu.load(x, layout=Layout.WG_STRIDED((128,), 1))
    total = plgpu.load(y, layout=Layout.WGMMA)
    o[...] = total + lax.broadcast_in_dim(row, (128, 64), (0,))  # HERE


@refused_by(infer, [array(4096)], X, scratch_bytes=0)
def test_a_reduction_across_warps_without_scratch(x, o):
    o[0, 0] = jnp.sum(x[...])  # HERE


@refused_by(infer, scratch_bytes=0)
def test_an_operation_that_moves_data_without_scratch(x, o):
    o[...] = lax.rev(x[...], (0,))  # HERE
