# SPDX-License-Identifier: Apache-2.0
"""Shared memory descriptors of tcgen05, against the layouts that the ISA describes."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_gpu import errors
from pallas_gpu.layouts import SmemLayout
from pallas_gpu.layouts.smem import tcgen05_descriptor as descriptors
from pallas_gpu.layouts.window import Window
from pallas_gpu.lockstep import accesses
from pallas_gpu.lockstep.tensor_cores.descriptors import smem_places


def plan(shape, bits, swizzle, side, transposed):
    layout = SmemLayout(shape, bits, (8, swizzle * 8 // bits), swizzle)
    window = Window.whole(shape)
    if transposed:
        window = window.transpose((1, 0))
    return descriptors.plan(layout, window, side)


def address(row, column, columns, bits, swizzle):
    """The byte of an element of an array tiled (8, swizzle), row-major tiles."""
    per_row = swizzle * 8 // bits
    tile = row // 8 * (columns // per_row) + column // per_row
    byte = tile * 8 * swizzle + row % 8 * swizzle + column % per_row * bits // 8
    return byte ^ (byte >> 7 & swizzle // 16 - 1) << 4


@pytest.mark.parametrize("swizzle", [32, 64, 128])
@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("side", ["a", "b"])
def test_elements_are_where_the_descriptor_says(side, transposed, bits, swizzle):
    per_row = swizzle * 8 // bits
    shape = (128, 2 * per_row)
    along_k = transposed == (side == "b")
    if bits == 32 and not along_k:
        with pytest.raises(errors.LayoutError, match="only along K"):
            plan(shape, bits, swizzle, side, transposed)
        return
    operand = plan(shape, bits, swizzle, side, transposed)
    assert operand.transposed is not along_k
    row, column = np.indices(shape)
    stored = address(row, column, shape[1], bits, swizzle)
    # M or N first, then K.
    stored = stored if along_k else stored.T
    step = 256 // bits
    for k in range(0, stored.shape[1], step):
        word = descriptors.fields(operand) + operand.offset_units(0, k)
        word += accesses.SMEM_BASE >> 4
        mn, size = stored.shape[0], bits // 8
        places = smem_places(word, mn, step, size, operand.transposed)
        np.testing.assert_array_equal(places[..., 0], stored[:, k : k + step])


@pytest.mark.parametrize(("swizzle", "code"), [(128, 2), (64, 4), (32, 6)])
def test_fields_are_in_their_bits(swizzle, code):
    operand = plan((64, 64), 16, swizzle, "a", False)
    word = descriptors.fields(operand)
    assert word >> 61 == code
    assert word >> 46 & 0b111 == 0b001
    # Base offset, mode of the leading offset, and bits that are 0.
    assert word >> 49 & 0xFFF == word >> 14 & 3 == word >> 30 & 3 == 0
    # From 8 rows to the next 8: all tiles between them, in units of 16 bytes.
    assert word >> 32 & 0x3FFF == 64 * 2 * 8 // 16
