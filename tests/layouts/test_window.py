# SPDX-License-Identifier: Apache-2.0
"""Windows of arrays, against numpy's slices of the same arrays."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pallas_gpu.layouts.window import Sum, Window, is_contiguous


@st.composite
def shapes(draw):
    return tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))


@st.composite
def steps(draw, window, array):
    """A window and numpy's array after one more slice or transpose."""
    if draw(st.booleans()):
        permutation = draw(st.permutations(range(array.ndim)))
        return window.transpose(permutation), array.transpose(permutation)
    starts, sizes, index = [], [], []
    for n in array.shape:
        start = draw(st.integers(0, n - 1))
        size = draw(st.none() | st.integers(1, n - start))
        starts.append(start)
        sizes.append(size)
        index.append(start if size is None else slice(start, start + size))
    return window.slice(starts, sizes), array[(*index, ...)]


@st.composite
def chains(draw):
    """An array, a window of it and the view that numpy makes by the same steps."""
    shape = draw(shapes())
    whole = np.arange(math.prod(shape)).reshape(shape)
    window, array = Window.whole(shape), whole
    for _ in range(draw(st.integers(0, 4))):
        window, array = draw(steps(window, array))
    return whole, window, array


def elements(whole: np.ndarray, window: Window) -> np.ndarray:
    """What a window names, by its ranges and axes."""
    ranges = whole[tuple(slice(low, high) for low, high in window.box())]
    return ranges.transpose(*window.axes, *window.squeezed).reshape(window.shape)


@given(chains())
def test_a_chain_of_slices_and_transposes_names_the_same_elements_as_numpy(chain):
    whole, window, expected = chain
    assert window.shape == expected.shape
    np.testing.assert_array_equal(elements(whole, window), expected)


@given(chains())
def test_the_strides_and_starts_of_a_window_are_those_of_numpys_view(chain):
    whole, window, expected = chain
    first = sum(s * n for s, n in zip(window.starts, window.array_strides, strict=True))
    assert first == expected.reshape(-1)[0]
    steps = [n * whole.itemsize for n in window.strides]
    longer = [a for a, n in enumerate(window.shape) if n > 1]
    assert [steps[a] for a in longer] == [expected.strides[a] for a in longer]


@given(chains())
def test_kept_and_squeezed_axes_make_up_the_array(chain):
    whole, window, _ = chain
    assert sorted((*window.axes, *window.squeezed)) == list(range(whole.ndim))
    kept = [a for a, keep in enumerate(window.kept) if keep]
    assert tuple(kept[i] for i in window.order) == window.axes
    assert window.is_transposed == (list(window.axes) != kept)


@given(chains())
def test_a_window_is_contiguous_exactly_where_its_elements_follow_each_other(chain):
    _, window, expected = chain
    found = np.sort(expected.reshape(-1))
    gapless = found[-1] - found[0] + 1 == found.size
    assert is_contiguous(window.array_shape, window.sizes) == gapless


@given(chains())
def test_a_window_of_a_window_inside_of_its_array_stays_inside(chain):
    _, window, _ = chain
    assert window.over_the_edge() == []
    assert all(window.known_inside())
    assert window.multiples == window.starts


@given(chains(), st.data())
def test_a_window_that_starts_elsewhere_names_the_elements_there(chain, data):
    whole, window, _ = chain
    starts = tuple(
        data.draw(st.integers(0, n - size))
        for n, size in zip(whole.shape, window.sizes, strict=True)
    )
    there = whole[
        tuple(slice(s, s + n) for s, n in zip(starts, window.sizes, strict=True))
    ]
    expected = there.transpose(*window.axes, *window.squeezed).reshape(window.shape)
    np.testing.assert_array_equal(elements(whole, window.at(starts)), expected)


@given(shapes(), st.data())
def test_the_box_is_what_numpy_finds_inside_of_the_array(shape, data):
    starts = [data.draw(st.integers(-6, 6)) for _ in shape]
    sizes = [data.draw(st.integers(1, 6)) for _ in shape]
    window = Window.whole(shape).slice(starts, sizes)
    inside = np.array([
        [start <= i < start + size for i in range(n)] + [False] * (5 - n)
        for start, size, n in zip(starts, sizes, shape, strict=True)
    ])  # fmt: skip
    for row, (low, high) in zip(inside, window.box(), strict=True):
        assert list(np.flatnonzero(row)) == list(range(low, high))
    over = [a for a, n in enumerate(sizes) if inside[a].sum() != n]
    assert window.over_the_edge() == over
    assert [a for a, known in enumerate(window.known_inside()) if not known] == over


def test_of_a_dynamic_start_only_the_size_is_known():
    window = Window.whole((64,)).slice([Sum(0, ("i",))], [4])
    assert window.dynamic == (0,)
    assert window.over_the_edge() == []
    assert window.known_inside() == (False,)
    assert Window.whole((64,)).slice([Sum(0, ("i",))], [65]).over_the_edge() == [0]
    # An integer index is inside.
    assert Window.whole((64,)).slice([Sum(0, ("i",))], [None]).known_inside() == (True,)


def test_static_and_dynamic_starts_add_up():
    window = (
        Window.whole((64, 128))
        .slice([8, 3], [32, None])
        .slice([Sum(0, ("i",))], [4])
        .slice([Sum(1, ("j",))], [2])
    )
    assert window.starts == (Sum(9, ("i", "j")), 3)
    assert window.starts[0].total(lambda a, b: f"{a}+{b}") == "i+j+9"
    assert Sum(0, ("i",)).total(lambda a, b: f"{a}+{b}") == "i"


def test_values_of_an_ir_are_added_as_the_caller_says():
    add = "({} + {})".format
    window = Window.whole((64, 128)).slice(["i", "j"], [32, 64], add=add)
    assert window.starts == ("i", "j")
    window = window.slice([8, 0], [4, 4], add=add)
    assert window.starts == ("(i + 8)", "j")


@given(st.integers(0, 64), st.integers(0, 64), st.integers(0, 8), st.integers(0, 8))
def test_the_known_multiple_divides_every_start_that_a_window_may_have(m, n, i, j):
    window = Window.whole((4096,)).slice([Sum(0, ("a",))], [64], [m])
    window = window.slice([Sum(0, ("b",))], [1], [n])
    start, known = m * i + n * j, window.multiples[0]
    assert start % known == 0 if known else start == 0


def test_without_a_promise_nothing_is_known_of_a_dynamic_start():
    window = Window.whole((64, 64)).slice([8, Sum(0, ("i",))], [8, 8])
    assert window.multiples == (8, 1)
    assert window.at((8, "i"), (8, 16)).multiples == (8, 16)
    assert window.at((8, "i")).multiples == (8, 1)


def test_the_whole_is_the_whole():
    window = Window.whole((64, 8))
    assert window.is_whole
    assert window.transpose((1, 0)).transpose((1, 0)).is_whole
    assert not window.transpose((1, 0)).is_whole
    assert not window.slice([0, 0], [32, 8]).is_whole
    assert not Window.whole((1, 8)).slice([0, 0], [None, 8]).is_whole
