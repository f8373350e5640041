# SPDX-License-Identifier: Apache-2.0
"""Chains of steps on a reference, against numpy's."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_gpu import _jax, errors
from pallas_gpu.types import View, resolve


@st.composite
def chains(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    array = np.arange(math.prod(shape)).reshape(shape)
    steps, current = [], array
    for _ in range(draw(st.integers(0, 4))):
        if draw(st.booleans()):
            order = tuple(draw(st.permutations(range(current.ndim))))
            steps.append(_jax.TransposeTransform(order))
            current = current.transpose(order)
            continue
        indices, numpy_indices = [], []
        for n in current.shape:
            start = draw(st.integers(0, n - 1))
            if draw(st.integers(0, 3)) == 0:
                indices.append(start)
                numpy_indices.append(start)
            else:
                size = draw(st.integers(1, n - start))
                indices.append(_jax.Slice(start, size, 1))
                numpy_indices.append(slice(start, start + size))
        steps.append(_jax.indexer(indices, current.shape))
        current = current[tuple(numpy_indices)]
    return array, steps, current


def elements(array: np.ndarray, view: View) -> np.ndarray:
    """What a view names, by its own account."""
    window = array[tuple(slice(a.start, a.start + a.size) for a in view.axes)]
    dropped = [a for a, axis in enumerate(view.axes) if not axis.kept]
    return window.transpose(*view.order, *dropped).reshape(view.shape)


@given(chains())
def test_a_chain_of_steps_names_the_same_elements_as_numpy(chain):
    array, steps, expected = chain
    view = resolve(array.shape, steps)
    assert view.shape == np.shape(expected)
    np.testing.assert_array_equal(elements(array, view), expected)


@given(chains())
def test_a_chain_inside_of_the_reference_is_not_over_the_edge(chain):
    array, steps, _ = chain
    assert resolve(array.shape, steps).over_the_edge() == []


def test_static_and_dynamic_starts_add_up():
    steps = [
        _jax.indexer([_jax.Slice(8, 32, 1), 3], (64, 128)),
        _jax.indexer([_jax.Slice("i", 4, 1)], (32,)),
        _jax.indexer([_jax.Slice("j", 2, 1)], (4,)),
    ]
    view = resolve((64, 128), steps)
    add = lambda a, b: f"{a}+{b}"  # noqa: E731
    assert view.starts(add) == ("i+j+8", 3)
    assert (view.shape, view.axes[0].kept, view.axes[1].kept) == ((2,), True, False)


@pytest.mark.parametrize(
    ("start", "size", "bad"),
    [(0, 64, []), (0, 65, [0]), (-1, 4, [0]), (61, 4, [0]), (60, 4, [])],
)
def test_static_ranges_over_the_edge_are_found(start, size, bad):
    view = View.whole((64, 8)).index([_jax.Slice(start, size, 1), _jax.Slice(0, 8, 1)])
    assert view.over_the_edge() == bad


def test_a_dynamic_start_is_left_to_the_run():
    view = View.whole((64,)).index([_jax.Slice("i", 4, 1)])
    assert view.over_the_edge() == []
    assert View.whole((64,)).index([_jax.Slice("i", 65, 1)]).over_the_edge() == [0]


def test_the_whole_is_the_whole():
    view = View.whole((64, 8))
    assert view.is_whole
    assert view.transpose((1, 0)).transpose((1, 0)).is_whole
    assert not view.transpose((1, 0)).is_whole


def test_a_stride_has_no_view():
    with pytest.raises(errors.UnsupportedError, match="has a stride"):
        View.whole((64,)).index([_jax.Slice(0, 32, 2)])


def test_a_reshape_has_no_view():
    with pytest.raises(errors.UnsupportedError, match="ReshapeTransform"):
        resolve((64,), [_jax.ReshapeTransform((8, 8))])
