# SPDX-License-Identifier: Apache-2.0
"""Windows in other shapes and types, against numpy's views of the same elements."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts import SmemLayout
from pallas_gpu.layouts.reshaped import Arithmetic, reinterpret, reshape
from pallas_gpu.layouts.window import Window


def _over(start, n):
    assert start % n == 0
    return start // n


BY = Arithmetic(lambda start, n: start * n, _over)


class Start:
    """A dynamic start of a known value."""

    def __init__(self, value):
        self.value = value


def elements(window: Window, values=None) -> np.ndarray:
    """The positions in memory of a window's elements."""
    flat = np.arange(math.prod(window.array_shape)) if values is None else values
    array = flat.reshape(window.array_shape)
    ranges = zip(window.starts, window.sizes, strict=True)
    part = array[tuple(slice(start, start + n) for start, n in ranges)]
    kept = [n for a, n in enumerate(window.sizes) if a in window.axes]
    return part.reshape(kept).transpose(window.order)


@st.composite
def windows(draw) -> Window:
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=4))
    starts, sizes = [], []
    for n in shape:
        whole = draw(st.booleans())
        start = 0 if whole else draw(st.integers(0, n - 1))
        starts.append(start)
        rest = st.integers(1, n - start) | st.none()
        sizes.append(n if whole else draw(rest))
    window = Window.whole(shape).slice(starts, sizes)
    return window.transpose(draw(st.permutations(range(len(window.axes)))))


@st.composite
def shapes(draw, size: int) -> tuple[int, ...]:
    shape = []
    while size > 1 and len(shape) < 4:
        n = draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
        shape.append(n)
        size //= n
    return (*shape, size)


@given(windows(), st.data())
def test_a_reshaped_window_has_the_same_elements_in_the_same_order(window, data):
    shape = data.draw(shapes(math.prod(window.shape)))
    try:
        found = reshape(window, shape, BY)
    except LayoutError:
        assume(False)
    assert found.shape == shape
    assert math.prod(found.array_shape) == math.prod(window.array_shape)
    np.testing.assert_array_equal(
        elements(found).reshape(-1), elements(window).reshape(-1)
    )


@given(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4), st.data())
def test_all_of_an_array_has_every_shape(shape, data):
    new = data.draw(shapes(math.prod(shape)))
    found = reshape(Window.whole(shape), new, BY)
    assert found == Window.whole(new)


@given(windows())
def test_the_shape_that_it_has_changes_nothing(window):
    np.testing.assert_array_equal(
        elements(reshape(window, window.shape, BY)), elements(window)
    )


def test_a_range_over_the_edge_stays_over_the_edge():
    rows = Window.whole((14, 32)).slice((8, 0), (8, 32))
    assert reshape(rows, (4, 2, 32), BY).over_the_edge() == [0]


def test_a_row_that_may_be_outside_is_merged_as_a_range():
    row = Window.whole((4, 8)).slice((3, 0), (1, 8))
    assert reshape(row, (8,), BY).array_shape == (4, 8)
    over = Window.whole((4, 8)).slice((4, 0), (1, 8))
    assert reshape(over, (8,), BY).over_the_edge() == [0]


@pytest.mark.parametrize("known", [2, 4])
def test_a_start_is_divided_if_it_is_known_to_be_a_multiple(known):
    rows = Window.whole((64, 8)).slice((Start(8), 0), (16, 8), (known, 0))
    by = Arithmetic(None, lambda start, n: Start(start.value // n))
    if known == 2:
        with pytest.raises(LayoutError, match="splits a dimension at other places"):
            reshape(rows, (4, 4, 8), by)
        return
    found = reshape(rows, (4, 4, 8), by)
    assert found.starts[0].value == 2
    assert found.multiples == (1, 0, 0)


@pytest.mark.parametrize(("before", "after"), [(16, 32), (32, 16), (8, 64), (32, 32)])
def test_a_window_of_another_type_has_the_same_bytes(before, after):
    kinds = {n: np.dtype(f"uint{n}") for n in (8, 16, 32, 64)}
    window = Window.whole((4, 64)).slice((1, 16), (2, 32))
    found = reinterpret(window, before, after, BY)
    memory = np.arange(math.prod(window.array_shape)).astype(kinds[before])
    np.testing.assert_array_equal(
        elements(found, memory.view(kinds[after])),
        elements(window, memory).view(kinds[after]),
    )


T, UNIT, BETWEEN = (8, 64), (1, 8, 64), (8, 1, 64)
TILED = [
    ((4, 64, 128), T, (256, 128), True),
    ((256, 128), T, (4, 64, 128), True),
    ((2, 2, 16, 64), T, (4, 16, 64), True),
    ((2, 8, 128), UNIT, (16, 128), True),
    ((8, 3, 64), BETWEEN, (8, 192), True),
    ((8, 192), T, (8, 3, 64), True),
    ((4, 64), None, (2, 2, 64), True),
    ((4, 64), None, (256,), True),
    ((64, 128), T, (128, 64), False),
    ((16, 64), T, (4, 4, 64), False),
    ((16, 64), T, (1024,), False),
    ((8, 3, 64), BETWEEN, (24, 64), False),
]


@pytest.mark.parametrize(("shape", "tiling", "new", "fits"), TILED)
def test_a_tiled_array_keeps_its_tiles(shape, tiling, new, fits):
    layout = SmemLayout(shape, 16, tiling, 128)
    if not fits:
        with pytest.raises(LayoutError, match="cuts through the tiles"):
            layout.reinterpreted(new, 16)
        return
    found = layout.reinterpreted(new, 16)
    for coordinates in np.ndindex(*shape[:-1], 2):
        last = 37 * coordinates[-1]
        flat = np.ravel_multi_index((*coordinates[:-1], last), shape)
        there = np.unravel_index(flat, new)
        assert found.byte_offset(there) == layout.byte_offset((*coordinates[:-1], last))


def test_tiles_of_a_wider_type_are_narrower():
    layout = SmemLayout((16, 64), 16, (8, 64), 128)
    assert layout.reinterpreted((16, 32), 32) == SmemLayout((16, 32), 32, (8, 32), 128)
