# SPDX-License-Identifier: Apache-2.0
"""Where no layouts satisfy a kernel the error names who conflicts, and a way out."""

from __future__ import annotations

from collections.abc import Callable

from pallas_gpu.layouts import Layout
from tests.support.inference_bodies import Body
from tests.support.refusal import refused_by

SQUARE = (64, 64)
STRIDED = Layout.WG_STRIDED(SQUARE, 4)


def infer(
    make: Callable[[Body], None], *, scratch_bytes: int = 8192, verify: bool = True
) -> None:
    body = Body()
    with body.building(verify=verify) as b:
        make(b)
    body.infer(scratch_bytes)


# --- arrays in SMEM -------------------------------------------------------------------


@refused_by(infer)
def test_transforms_that_wgmma_does_not_read(b):
    left = b.smem(SQUARE, "f16")
    right = b.smem(SQUARE, "f16", (None, 16))
    b.wgmma(b.splat(SQUARE), left, right)


@refused_by(infer)
def test_transforms_that_do_not_fit_their_array(b):
    array = b.smem((12, 64), "f32", ((8, 32), 128))
    b.store(b.splat((12, 64)), array)


@refused_by(infer)
def test_transforms_that_tma_cannot_write(b):
    b.copy_in(b.gmem(SQUARE, "f16"), b.smem(SQUARE, "f16", ((4, 4), 16)))


@refused_by(infer)
def test_a_product_of_bytes_that_lie_along_the_wrong_axis(b):
    left, right = b.smem(SQUARE, "f8E4M3FN"), b.smem(SQUARE, "f8E4M3FN")
    b.wgmma(b.splat(SQUARE), left, right)


@refused_by(infer)
def test_an_operand_that_no_tile_divides(b):
    b.wgmma(b.splat((64, 24)), b.smem(SQUARE, "f16"), b.smem((64, 24), "f16"))


@refused_by(infer)
def test_an_operand_that_is_not_the_last_two_axes(b):
    ring = b.smem((64, 2, 64), "f16")
    part = b.part(ring, [0, 0, 0], [64, None, 64])
    b.wgmma(b.splat(SQUARE), part, b.smem(SQUARE, "f16"))


@refused_by(infer)
def test_wgmma_and_an_operation_that_takes_the_address(b):
    array = b.smem(SQUARE, "f16")
    b.pointer(array)
    b.wgmma(b.splat(SQUARE), array, b.smem(SQUARE, "f16"))


@refused_by(infer)
def test_a_copy_that_would_transpose(b):
    b.copy_in(b.gmem(SQUARE, "f16"), b.transposed(b.smem(SQUARE, "f16"), [1, 0]))


@refused_by(infer)
def test_a_copy_into_part_of_the_rows_that_tiles_would_carry_but_the_slice_cuts(b):
    array = b.smem(SQUARE, "f16")
    b.copy_in(b.gmem((64, 8), "f16"), b.part(array, [0, 0], [64, 8]))


# --- layout_cast ----------------------------------------------------------------------


@refused_by(infer)
def test_a_cast_whose_tiles_do_not_divide_the_shape(b):
    b.cast(b.load(b.gmem((48, 64))), Layout.WGMMA)


@refused_by(infer)
def test_a_cast_to_a_layout_of_another_shape(b):
    b.cast(b.load(b.gmem(SQUARE)), Layout.WG_STRIDED((64, 32), 4))


@refused_by(infer, verify=False)
def test_a_cast_of_an_array_to_a_splat(b):
    b.cast(b.load(b.gmem(SQUARE)), Layout.WG_SPLAT(SQUARE))


# --- too little scratch ---------------------------------------------------------------


@refused_by(infer, scratch_bytes=0)
def test_two_casts_and_no_scratch_between_them(b):
    x = b.cast(b.load(b.gmem(SQUARE)), STRIDED)
    y = b.op("exp", x)
    b.store(b.cast(y, Layout.WGMMA), b.gmem(SQUARE))


@refused_by(infer, scratch_bytes=0)
def test_a_cast_and_the_tensor_core_and_no_scratch_between_them(b):
    x = b.cast(b.load(b.gmem(SQUARE, "f16")), STRIDED)
    b.wgmma(b.splat(SQUARE), b.op("neg", x), b.smem(SQUARE, "f16"))


@refused_by(infer, scratch_bytes=0)
def test_a_slice_that_cuts_the_tiles_of_a_cast(b):
    x = b.cast(b.load(b.gmem(SQUARE)), Layout.WGMMA)
    b.store(b.slice(x, [0, 0], [32, 64]), b.gmem((32, 64)))


@refused_by(infer, scratch_bytes=0)
def test_a_reshape_that_the_layout_of_a_cast_does_not_survive(b):
    x = b.cast(b.load(b.gmem((64, 24))), Layout.WGMMA)
    b.store(b.reshape(x, (48, 32)), b.gmem((48, 32)))


@refused_by(infer, scratch_bytes=0)
def test_a_broadcast_whose_operand_is_cast_to_other_threads(b):
    row = b.cast(b.load(b.gmem((128,))), Layout.WG_STRIDED((128,), 1))
    x = b.cast(b.load(b.gmem((128, 64))), Layout.WGMMA)
    total = b.op("add", x, b.broadcast(row, (128, 64), [0]))
    b.store(total, b.gmem((128, 64)))


@refused_by(infer, scratch_bytes=8)
def test_a_reduction_across_warps_without_scratch(b):
    b.reduce(b.load(b.gmem((4096,))), [0])


# --- shapes ---------------------------------------------------------------------------


@refused_by(infer, verify=False)
def test_a_left_operand_that_the_tensor_core_has_no_fragment_for(b):
    left = b.load(b.gmem((64, 8), "f8E4M3FN"))
    right = b.transposed(b.smem((64, 8), "f8E4M3FN"), [1, 0])
    b.wgmma(b.splat(SQUARE), left, right)
