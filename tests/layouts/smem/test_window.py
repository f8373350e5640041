# SPDX-License-Identifier: Apache-2.0
"""Slices of SMEM arrays, against the offsets of all their elements."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_gpu import errors
from pallas_gpu.layouts import SmemLayout
from pallas_gpu.layouts.smem.window import alignment_bytes, contiguous_layout
from pallas_gpu.layouts.window import Sum, Window
from tests.support.refusal import refused

TILED = SmemLayout((64, 128), 16, (8, 64), 128)


@st.composite
def slices(draw):
    """A layout and a window of whole tiles in it."""
    bits = draw(st.sampled_from([8, 16, 32]))
    tile = draw(st.sampled_from([(), (2,), (1, 4), (2, 4), (4, 2)]))
    units = (1,) * draw(st.integers(0 if tile else 1, 2)) + tile
    counts = [draw(st.integers(1, 3)) for _ in units]
    shape = tuple(c * t for c, t in zip(counts, units, strict=True))
    starts, sizes = [], []
    for count, unit in zip(counts, units, strict=True):
        first = draw(st.integers(0, count - 1))
        size = draw(st.integers(1, count - first)) * unit
        starts.append(first * unit)
        sizes.append(None if size == 1 and draw(st.booleans()) else size)
    layout = SmemLayout(shape, bits, tile or None)
    return layout, Window.whole(shape).slice(starts, sizes)


def offsets(layout: SmemLayout, window: Window) -> np.ndarray:
    """Byte offsets of a window's elements, row-major over the window's sizes."""
    coordinates = (
        np.indices(window.sizes).reshape(len(window.sizes), math.prod(window.sizes)).T
    )
    return layout.byte_offsets(coordinates + np.array(window.starts, dtype=np.int64))


@given(slices())
def test_a_contiguous_slice_lies_in_memory_as_its_own_layout_says(case):
    layout, window = case
    found = offsets(layout, window)
    try:
        own = contiguous_layout(layout, window)
    except errors.LayoutError:
        # It has gaps: the bytes from its first to its last element are more than its.
        assert np.ptp(found) // (layout.itemsize_bits // 8) >= math.prod(window.sizes)
        return
    assert math.prod(own.shape) == math.prod(window.sizes)
    assert [n for n in own.shape if n > 1] == [n for n in window.shape if n > 1]
    np.testing.assert_array_equal(
        found - found[0], offsets(own, Window.whole(own.shape))
    )


@given(slices())
def test_the_known_alignment_divides_the_address_of_a_slice(case):
    layout, window = case
    assert offsets(layout, window)[0] % alignment_bytes(layout, window) == 0


@given(
    st.sampled_from([(), (2,), (4,), (8, 4)]),
    st.integers(1, 24),
    st.sampled_from([8, 16, 32]),
)
def test_of_a_dynamic_start_the_known_multiple_tells_the_alignment(
    tile, multiple, bits
):
    layout = SmemLayout((48, 8), bits, tile or None)
    rows = tile[0] if len(tile) == 2 else 1
    window = Window.whole(layout.shape).slice((0, 0), (rows, 8))
    dynamic = window.at((Sum(0, ("i",)), 0), (multiple, 0))
    known = alignment_bytes(layout, dynamic)
    for start in range(0, 48, math.lcm(multiple, rows)):
        assert offsets(layout, window.at((start, 0)))[0] % known == 0


def test_a_slice_of_whole_leading_tiles_keeps_its_tiling():
    part = contiguous_layout(TILED, Window.whole((64, 128)).slice((16, 0), (32, 128)))
    assert (part.shape, part.tiling, part.swizzle) == ((32, 128), (8, 64), 128)


@pytest.mark.parametrize(("rows", "columns"), [(4, 128), (64, 64)])
@refused
def test_a_slice_that_is_copied_is_one_piece_of_whole_tiles(rows, columns):
    window = Window.whole((64, 128)).slice((0, 0), (rows, columns))
    contiguous_layout(TILED, window)


def test_an_allocation_is_aligned_to_128_bytes():
    assert alignment_bytes(TILED, Window.whole((64, 128))) == 128
