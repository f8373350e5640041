# SPDX-License-Identifier: Apache-2.0
"""What wgmma refuses, and what it says."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_gpu import errors
from pallas_gpu.layouts import Layout, SmemLayout
from pallas_gpu.mosaic import registers, smem
from pallas_gpu.mosaic.elements import dtypes
from pallas_gpu.mosaic.smem import SmemView
from pallas_gpu.mosaic.tensor_cores import wgmma
from tests.support.refusal import refused


def operand(kb, offset, shape, dtype, swizzle) -> SmemView:
    dtype = np.dtype(dtype)
    tiling = (8, swizzle // dtype.itemsize)
    layout = SmemLayout(shape, 8 * dtype.itemsize, tiling, swizzle)
    return SmemView.whole(kb.smem_pointer(offset), layout, dtype)


def attempt(build, *, acc=(64, 64), a=(64, 64), b=(64, 64), types=None, change=None):
    kinds = types or ("float16", "float16", "float32")

    def body(kb):
        left = operand(kb, 0, a, kinds[0], 128)
        right = operand(kb, 1 << 15, b, kinds[1], 128)
        accumulator = wgmma.zeros(acc, np.dtype(kinds[2]))
        given = (accumulator, left, right)
        wgmma.mma(*(change(*given) if change else given))

    return build(body, smem_bytes=1 << 17)


def test_shapes_must_multiply(build):
    with pytest.raises(errors.ShapeError, match="accumulator do not match"):
        attempt(build, b=(128, 64))


def test_rows_come_by_64(build):
    def halved(acc, a, b):
        part = registers.static_slice(acc, (0, 0), (32, 64))
        return part, a.slice((0, 0), (32, 64)), b

    with pytest.raises(errors.KernelError):
        attempt(build, change=halved)


@pytest.mark.parametrize(
    ("types", "message"),
    [
        (("float16", "bfloat16", "float32"), "different element types"),
        (("bfloat16", "bfloat16", "float16"), "does not support this accumulator"),
        (("int16", "int16", "int32"), "does not support these"),
        (("float8_e4m3fn", "int8", "float32"), "different element types"),
    ],
)
def test_types_must_have_an_instruction(types, message, build):
    with pytest.raises(errors.DTypeError, match=message):
        columns = 128 if "8" in types[0] else 64
        attempt(build, types=types, a=(64, columns), b=(columns, 128), acc=(64, 128))


def test_an_8_bit_right_operand_lies_along_k(build):
    with pytest.raises(errors.LayoutError, match="only along K"):
        kinds = ("int8", "int8", "int32")
        attempt(build, types=kinds, a=(64, 128), b=(128, 128), acc=(64, 128))


def test_the_accumulator_has_the_layout_of_wgmma(build):
    def strided(acc, a, b):
        zero = registers.splat(dtypes.constant(0, dtypes.F32), dtypes.F32, (64, 64))
        return zero.materialize(Layout.WG_STRIDED((64, 64), vec_size=2)), a, b

    with pytest.raises(errors.LayoutError, match=r"Layout\.WGMMA or"):
        attempt(build, change=strided)


def test_a_register_operand_has_the_layout_of_its_width(build):
    def wrong(acc, a, b):
        return acc, smem.load(a, Layout.WGMMA_UPCAST_2X, optimized=False), b

    with pytest.raises(errors.LayoutError, match="left operand of wgmma"):
        attempt(build, change=wrong)


@refused
def test_a_float32_left_operand_has_its_own_fragment(build):
    def loaded(acc, a, b):
        return acc, smem.load(a, Layout.WGMMA, optimized=False), b.transpose((1, 0))

    attempt(build, types=("float32",) * 3, change=loaded)


def test_slices_of_accumulators_are_whole_tiles(build):
    def body(kb):
        wgmma.accumulator_slice(wgmma.zeros((64, 64)), (0, 4), (64, 8))

    with pytest.raises(errors.LayoutError, match="whole instruction tiles"):
        build(body)


@pytest.mark.parametrize("n", [16, 30, 264])
def test_only_legal_register_counts(n, build):
    with pytest.raises(errors.ArgumentError, match="24 to 256"):
        build(lambda kb: wgmma.set_max_registers(n, "increase"))
