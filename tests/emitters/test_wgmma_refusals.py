# SPDX-License-Identifier: Apache-2.0
"""What wgmma refuses, and what it says."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_gpu.emitters import registers, smem
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.tensor_cores import wgmma
from pallas_gpu.layouts import Layout
from tests.support.finished import emitted, smem_view
from tests.support.refusal import refused, refused_by


def attempt(change=None, *, acc=(64, 64), a=(64, 64), b=(64, 64), types=None):
    """Emits a product, of operands that may be changed before."""
    kinds = types or ("float16", "float16", "float32")

    def body(kb):
        left, right = (
            smem_view(kb, i << 15, shape, kind, (8, 128 // np.dtype(kind).itemsize))
            for i, (shape, kind) in enumerate([(a, kinds[0]), (b, kinds[1])])
        )
        given = (wgmma.zeros(acc, np.dtype(kinds[2])), left, right)
        wgmma.mma(*(change(*given) if change else given))

    emitted(body, smem_bytes=1 << 17)


@refused
def test_shapes_must_multiply():
    attempt(b=(128, 64))


@refused_by(attempt)
def test_rows_come_by_64(acc, a, b):
    part = registers.static_slice(acc, (0, 0), (32, 64))
    return part, a.slice((0, 0), (32, 64)), b


@pytest.mark.parametrize(
    "types",
    [
        ("float16", "bfloat16", "float32"),
        ("bfloat16", "bfloat16", "float16"),
        ("int16", "int16", "int32"),
        ("float8_e4m3fn", "int8", "float32"),
    ],
    ids="-".join,
)
@refused
def test_types_must_have_an_instruction(types):
    columns = 128 if "8" in types[0] else 64
    attempt(types=types, a=(64, columns), b=(columns, 128), acc=(64, 128))


@refused
def test_an_8_bit_right_operand_lies_along_k():
    kinds = ("int8", "int8", "int32")
    attempt(types=kinds, a=(64, 128), b=(128, 128), acc=(64, 128))


@refused_by(attempt)
def test_the_accumulator_has_the_layout_of_wgmma(acc, a, b):
    zero = registers.splat(dtypes.constant(0, dtypes.F32), dtypes.F32, (64, 64))
    return zero.materialize(Layout.WG_STRIDED((64, 64), vec_size=2)), a, b


@refused_by(attempt)
def test_a_register_operand_has_the_layout_of_its_width(acc, a, b):
    return acc, smem.load(a, Layout.WGMMA_UPCAST_2X, optimized=False), b


@refused_by(attempt, types=("float32",) * 3)
def test_a_float32_left_operand_has_its_own_fragment(acc, a, b):
    return acc, smem.load(a, Layout.WGMMA, optimized=False), b.transpose((1, 0))


@refused_by(emitted)
def test_slices_of_accumulators_are_whole_tiles(kb):
    wgmma.accumulator_slice(wgmma.zeros((64, 64)), (0, 4), (64, 8))


@pytest.mark.parametrize("n", [16, 30, 264])
@refused_by(emitted)
def test_only_legal_register_counts(kb, *, n):
    wgmma.set_max_registers(n, "increase")
