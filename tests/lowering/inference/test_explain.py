# SPDX-License-Identifier: Apache-2.0
"""Where no layouts satisfy a kernel the error names who conflicts, and a way out."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pallas_gpu import errors
from pallas_gpu.layouts import Layout
from tests.support.inference_bodies import Body

SQUARE = (64, 64)
STRIDED = Layout.WG_STRIDED(SQUARE, 4)


def refused(
    make: Callable[[Body], None], *, scratch_bytes: int = 8192, verify: bool = True
) -> str:
    body = Body()
    with body.building(verify=verify) as b:
        make(b)
    with pytest.raises(errors.LayoutError) as info:
        body.infer(scratch_bytes)
    return str(info.value)


def expect(text: str, *parts: str) -> None:
    for part in parts:
        assert part in text, text


# --- arrays in SMEM -------------------------------------------------------------------


def test_transforms_that_wgmma_does_not_read():
    def make(b):
        left = b.smem(SQUARE, "f16")
        right = b.smem(SQUARE, "f16", (None, 16))
        b.wgmma(b.splat(SQUARE), left, right)

    expect(
        refused(make),
        "operand b of wgmma (kernel.py:4) cannot use an SMEM array with its transforms",
        "no transforms of the array of 16-bit elements at kernel.py:2",
        "TilingTransform((8, 64)) and SwizzleTransform(128)",
        "at:        kernel.py:4",
    )


def test_transforms_that_do_not_fit_their_array():
    def make(b):
        array = b.smem((12, 64), "f32", ((8, 32), 128))
        b.store(b.splat((12, 64)), array)

    expect(
        refused(make),
        "the tiling does not divide the array",
        "at:        kernel.py:1",
    )


def test_transforms_that_tma_cannot_write():
    def make(b):
        b.copy_in(b.gmem(SQUARE, "f16"), b.smem(SQUARE, "f16", ((4, 4), 16)))

    expect(
        refused(make),
        "copy_gmem_to_smem (kernel.py:2)",
        "TMA copies multiples of 16 bytes",
        "tiling (4, 4)",
    )


def test_a_product_of_bytes_that_lie_along_the_wrong_axis():
    def make(b):
        left, right = b.smem(SQUARE, "f8E4M3FN"), b.smem(SQUARE, "f8E4M3FN")
        b.wgmma(b.splat(SQUARE), left, right)

    expect(
        refused(make),
        "operand b of wgmma (kernel.py:4) cannot use its SMEM array in any layout",
        "wgmma reads 8-bit operands only along K",
        "pass a transposed view of it",
    )


def test_an_operand_that_no_tile_divides():
    def make(b):
        b.wgmma(b.splat((64, 24)), b.smem(SQUARE, "f16"), b.smem((64, 24), "f16"))

    expect(
        refused(make),
        "operand b of wgmma",
        "wgmma reads tiled and swizzled arrays",
        "of shape (64, 24) admits no transforms",
        "pad the array's last two dimensions to multiples of 8 and 16",
    )


def test_an_operand_that_is_not_the_last_two_axes():
    def make(b):
        ring = b.smem((64, 2, 64), "f16")
        part = b.part(ring, [0, 0, 0], [64, None, 64])
        b.wgmma(b.splat(SQUARE), part, b.smem(SQUARE, "f16"))

    expect(refused(make), "operand a of wgmma", "its array's last two axes")


def test_wgmma_and_an_operation_that_takes_the_address():
    def make(b):
        array = b.smem(SQUARE, "f16")
        b.pointer(array)
        b.wgmma(b.splat(SQUARE), array, b.smem(SQUARE, "f16"))

    expect(
        refused(make),
        "address of an array (kernel.py:2) and operand a of wgmma (kernel.py:5)",
    )


def test_a_copy_that_would_transpose():
    def make(b):
        b.copy_in(b.gmem(SQUARE, "f16"), b.transposed(b.smem(SQUARE, "f16"), [1, 0]))

    expect(refused(make), "copy_gmem_to_smem (kernel.py:2)", "cannot transpose")


def test_a_copy_into_part_of_the_rows_that_tiles_would_carry_but_the_slice_cuts():
    def make(b):
        array = b.smem(SQUARE, "f16")
        b.copy_in(b.gmem((64, 8), "f16"), b.part(array, [0, 0], [64, 8]))

    expect(refused(make), "copy_gmem_to_smem", "not contiguous")


# --- layout_cast ----------------------------------------------------------------------


def test_a_cast_whose_tiles_do_not_divide_the_shape():
    def make(b):
        b.cast(b.load(b.gmem((48, 64))), Layout.WGMMA)

    expect(
        refused(make),
        "layout_cast: an array of shape (48, 64) does not fit the layout",
        "trailing dimensions that are multiples of (64, 8)",
        "at:        kernel.py:2",
    )


def test_a_cast_to_a_layout_of_another_shape():
    def make(b):
        b.cast(b.load(b.gmem(SQUARE)), Layout.WG_STRIDED((64, 32), 4))

    expect(refused(make), "the layout is for a different shape")


def test_a_cast_of_an_array_to_a_splat():
    def make(b):
        b.cast(b.load(b.gmem(SQUARE)), Layout.WG_SPLAT(SQUARE))

    expect(
        refused(make, verify=False),
        "layout_cast to WG_SPLAT: the elements of the array may differ",
        "an array of shape (64, 64) from load (kernel.py:1)",
        "remove the layout_cast",
    )


# --- too little scratch ---------------------------------------------------------------


def test_two_casts_and_no_scratch_between_them():
    def make(b):
        x = b.cast(b.load(b.gmem(SQUARE)), STRIDED)
        y = b.op("log", b.op("exp", x))
        b.store(b.cast(y, Layout.WGMMA), b.gmem(SQUARE))

    expect(
        refused(make, scratch_bytes=0),
        "No layouts satisfy both layout_cast (kernel.py:2) and layout_cast "
        "(kernel.py:5), whose layouts conflict at",
        "layout_cast (kernel.py:2) admits Layout.WG_STRIDED((64, 64), vec_size=4)",
        "layout_cast (kernel.py:5) admits Layout.WGMMA for shape (64, 64)",
        "CompilerParams(reduction_scratch_bytes=512)",
        "use Layout.WGMMA in the layout_cast (kernel.py:2)",
        "use Layout.WG_STRIDED",
    )


def test_a_cast_and_the_tensor_core_and_no_scratch_between_them():
    def make(b):
        x = b.cast(b.load(b.gmem(SQUARE, "f16")), STRIDED)
        b.wgmma(b.splat(SQUARE), b.op("neg", x), b.smem(SQUARE, "f16"))

    expect(
        refused(make, scratch_bytes=0),
        "layout_cast (kernel.py:2)",
        "left operand of wgmma",
        "use Layout.WGMMA in the layout_cast (kernel.py:2)",
    )


def test_a_slice_that_cuts_the_tiles_of_a_cast():
    def make(b):
        x = b.cast(b.load(b.gmem(SQUARE)), Layout.WGMMA)
        b.store(b.slice(x, [0, 0], [32, 64]), b.gmem((32, 64)))

    expect(
        refused(make, scratch_bytes=0),
        "No layouts satisfy both layout_cast (kernel.py:2) and slice (kernel.py:3)",
        "layout_cast (kernel.py:2) admits Layout.WGMMA",
    )


def test_a_reshape_that_the_layout_of_a_cast_does_not_survive():
    def make(b):
        x = b.cast(b.load(b.gmem((64, 24))), Layout.WGMMA)
        b.store(b.reshape(x, (48, 32)), b.gmem((48, 32)))

    expect(
        refused(make, scratch_bytes=0),
        "No layouts satisfy both layout_cast (kernel.py:2) and reshape (kernel.py:3)",
        "use WG_STRIDED(shape=(64, 24), vec_size=4) in the layout_cast (kernel.py:2)",
    )


def test_a_broadcast_whose_operand_is_cast_to_other_threads():
    def make(b):
        row = b.cast(b.load(b.gmem((128,))), Layout.WG_STRIDED((128,), 1))
        x = b.cast(b.load(b.gmem((128, 64))), Layout.WGMMA)
        total = b.op("add", x, b.broadcast(row, (128, 64), [0]))
        b.store(total, b.gmem((128, 64)))

    expect(
        refused(make, scratch_bytes=0),
        "layout_cast (kernel.py:2) and broadcast (kernel.py:5)",
        "use Layout.WGMMA_ROW in the layout_cast (kernel.py:2)",
    )


def test_a_reduction_across_warps_without_scratch():
    def make(b):
        b.reduce(b.load(b.gmem((4096,))), [0])

    expect(
        refused(make, scratch_bytes=8),
        "reduction (kernel.py:2): the scratch is too small to combine the partial",
        "16 bytes of SMEM",
        "8 bytes",
        "CompilerParams(reduction_scratch_bytes=512)",
    )


# --- shapes ---------------------------------------------------------------------------


def test_a_left_operand_that_the_tensor_core_has_no_fragment_for():
    def make(b):
        left = b.load(b.gmem((64, 8), "f8E4M3FN"))
        right = b.transposed(b.smem((64, 8), "f8E4M3FN"), [1, 0])
        b.wgmma(b.splat(SQUARE), left, right)

    expect(
        refused(make, verify=False),
        "wgmma: the left operand does not fit Layout.WGMMA_8BIT",
        "pad the array to whole tiles",
    )
