# SPDX-License-Identifier: Apache-2.0
"""Sums over the bits of a thread's index, in few operations."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_gpu.emitters import addressing, gmem, registers
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.layouts.registers.placement import place

COLUMNS = [
    (1, 2, 4, 8, 16, 32, 64),
    (8, 16, 128, 256, 512, 2048, 4096),
    (0, 0, 0, 0, 0, 3, 6),
    (12, 24, 100, 200, 400, 0, 0),
    (144, 288, 64, 1, 2, 4, 512),
    (16, 32, 128 + 16, 256 + 32, 512 + 64, 1024, 2048),
]


def test_sums_and_exclusive_ors_of_every_thread(run_kernel, typed):
    def body(kb, out):
        layout = place(registers.WGStridedLayout((128,), 1), (128,))
        for i, columns in enumerate(COLUMNS):
            for j, of in enumerate((addressing.thread_sum, addressing.thread_xor)):
                array = registers.splat(of(columns), dtypes.I32, (128,))
                part = out.slice((i, j, 0), (None, None, 128))
                gmem.store(part, array.materialize(layout))

    (out,) = run_kernel(body, [], [typed((len(COLUMNS), 2, 128), np.int32)])
    bits = (np.arange(128)[:, None] >> np.arange(7)) & 1
    for i, columns in enumerate(COLUMNS):
        terms = bits * np.array(columns)
        assert (out[i, 0] == terms.sum(1)).all()
        assert (out[i, 1] == np.bitwise_xor.reduce(terms, axis=1)).all()


@pytest.mark.parametrize(
    ("function", "columns", "count"),
    [
        # A row, of a stride that is a power of two and of another one.
        (addressing.thread_sum, tuple(16 << b for b in range(7)), 1),
        (addressing.thread_sum, tuple(12 << b for b in range(7)), 1),
        # Rows at bits 7 to 9, swizzled into bits 4 to 6: the same bits, shifted twice.
        (addressing.thread_xor, (0, 0, 128 + 16, 256 + 32, 512 + 64, 0, 0), 3),
        # The lanes' 16-byte chunks lie where the rows are swizzled to.
        (addressing.thread_xor, (16, 32, 128 + 16, 256 + 32, 512 + 64, 0, 0), 7),
        (addressing.thread_sum, (0,) * 7, 0),
    ],
    ids=["row", "other stride", "swizzled", "overlapping", "no bits"],
)
def test_sums_take_few_operations(build, typed, function, columns, count):
    def body(kb, out):
        gmem.store_scalar(out.slice((0,), (None,)), function(columns))

    text = str(build(body, [typed((1,), np.int32)]))
    names = ("andi", "ori", "xori", "addi", "muli", "shli", "shrui")
    found = sum(text.count(f"arith.{name}") for name in names)
    # The prologue has two: elected, and the warp's number.
    assert found == count + 2
