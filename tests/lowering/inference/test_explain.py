# SPDX-License-Identifier: Apache-2.0
"""Where no layouts satisfy a kernel the error names who conflicts, and a way out."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.layouts import Layout
from tests.support.inferred import SQUARE, X, array, infer
from tests.support.refusal import refused_by

F16, F8 = jnp.float16, jnp.float8_e4m3fn
STRIDED = Layout.WG_STRIDED(SQUARE, 4)
TILE, ACC = plgpu.SMEM(SQUARE, F16), plgpu.ACC(SQUARE)
HALVES = array(dtype=F16)


def load(ref, layout):
    return plgpu.load(ref, layout=layout, optimized=False)


# --- arrays in SMEM -------------------------------------------------------------------


def transformed(*transforms):
    return plgpu.SMEM(SQUARE, F16, transforms=transforms)


@refused_by(infer, [X], X, TILE, plgpu.SMEM((64, 72), F16), plgpu.ACC((64, 72)))
def test_an_operand_that_no_tile_divides(x, o, a, b, acc):
    plgpu.wgmma(acc, a, b)  # HERE


@refused_by(infer, [X], X, TILE, transformed(), ACC)
def test_an_array_that_an_operation_reads_by_its_address(x, o, a, b, acc):
    o[0, 0] = plgpu.load(b.bitcast(jnp.int16).reshape(4096).at[5]).astype(o.dtype)
    plgpu.wgmma(acc, a, b)  # HERE


@refused_by(infer, [X], X, TILE, transformed(plgpu.TilingTransform((8, 8))), ACC)
def test_transforms_that_wgmma_does_not_read(x, o, a, b, acc):
    plgpu.wgmma(acc, a, b)  # HERE


@refused_by(
    infer, [HALVES], X, transformed(plgpu.TilingTransform((4, 4))), plgpu.Barrier()
)
def test_transforms_that_tma_cannot_write(x, o, a, loaded):
    plgpu.copy_gmem_to_smem(x, a, loaded)  # HERE


@refused_by(infer, [X], X, *[plgpu.SMEM(SQUARE, F8)] * 2, ACC)
def test_a_product_of_bytes_that_lie_along_the_wrong_axis(x, o, a, b, acc):
    plgpu.wgmma(acc, a, b)  # HERE


@refused_by(infer, [X], X, plgpu.SMEM((64, 2, 64), F16), TILE, ACC)
def test_an_operand_that_is_not_the_last_two_axes(x, o, ring, b, acc):
    plgpu.wgmma(acc, ring.at[:, 0], b)  # HERE


@refused_by(infer, [HALVES], X, TILE, plgpu.Barrier())
def test_a_copy_that_would_transpose(x, o, a, loaded):
    plgpu.copy_gmem_to_smem(x, a.T, loaded)  # HERE


@refused_by(infer, [array(64, 8, dtype=F16)], X, TILE, plgpu.Barrier())
def test_a_copy_into_part_of_the_rows_that_tiles_would_carry_but_the_slice_cuts(
    x, o, a, loaded
):
    plgpu.copy_gmem_to_smem(x, a.at[:, 0:8], loaded)  # HERE


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
    y = jnp.exp(load(x, STRIDED))
    o[...] = plgpu.layout_cast(y, Layout.WGMMA)  # HERE


@refused_by(infer, [HALVES], X, TILE, ACC, scratch_bytes=0)
def test_a_cast_and_the_tensor_core_and_no_scratch_between_them(x, o, b, acc):
    left = -load(x, STRIDED)
    plgpu.wgmma(acc, left, b)  # HERE


@refused_by(infer, [X], array(32, 64), scratch_bytes=0)
def test_a_slice_that_cuts_the_tiles_of_a_cast(x, o):
    y = load(x, Layout.WGMMA)
    o[...] = lax.slice(y, (0, 0), (32, 64))  # HERE


@refused_by(infer, [array(64, 24)], array(48, 32), scratch_bytes=0)
def test_a_reshape_that_the_layout_of_a_cast_does_not_survive(x, o):
    y = load(x, Layout.WGMMA)
    o[...] = y.reshape(48, 32)  # HERE


@refused_by(infer, [array(128), array(128, 64)], array(128, 64), scratch_bytes=0)
def test_a_broadcast_whose_operand_is_cast_to_other_threads(x, y, o):
    row = load(x, Layout.WG_STRIDED((128,), 1))
    total = load(y, Layout.WGMMA)
    o[...] = total + lax.broadcast_in_dim(row, (128, 64), (0,))  # HERE


@refused_by(infer, [array(4096)], X, scratch_bytes=8)
def test_a_reduction_across_warps_without_scratch(x, o):
    o[0, 0] = jnp.sum(x[...])  # HERE


# --- shapes ---------------------------------------------------------------------------


@refused_by(infer, [array(64, 8, dtype=F8)], X, plgpu.SMEM((64, 8), F8), ACC)
def test_a_left_operand_that_the_tensor_core_has_no_fragment_for(x, o, b, acc):
    plgpu.wgmma(acc, x[...], b.T)  # HERE


# --- TMEM -----------------------------------------------------------------------------
