# SPDX-License-Identifier: Apache-2.0
"""The steps that JAX records on a reference, folded into windows."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_gpu import _jax, errors
from pallas_gpu.layouts.window import Sum, Window
from pallas_gpu.types import resolve


@st.composite
def chains(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=4)))
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
        steps.append(_jax.indexer(indices, (), current.shape))
        current = current[(*numpy_indices, ...)]
    return array, steps, current


@given(chains())
def test_a_chain_of_steps_names_the_same_elements_as_numpy(chain):
    array, steps, expected = chain
    window = resolve(array.shape, steps)
    assert window.shape == np.shape(expected)
    part = array[tuple(slice(low, high) for low, high in window.box())]
    part = part.transpose(*window.axes, *window.squeezed).reshape(window.shape)
    np.testing.assert_array_equal(part, expected)


def test_values_become_terms_of_a_start():
    steps = [
        _jax.indexer([_jax.Slice(8, 32, 1), 3], (), (64, 128)),
        _jax.indexer([_jax.Slice("i", 4, 1)], (), (32,)),
        _jax.indexer([_jax.Slice("j", 2, 1)], (), (4,)),
    ]
    window = resolve((64, 128), steps)
    assert window.starts == (Sum(8, ("i", "j")), 3)
    assert (window.shape, window.kept) == ((2,), (True, False))


def test_steps_continue_from_a_window():
    lead = Window.whole((4, 64, 128)).slice((2, 0, 0), (None, 64, 128))
    window = resolve(lead, [_jax.indexer([_jax.Slice(8, 16, 1), 3], (), (64, 128))])
    assert (window.starts, window.axes) == ((2, 8, 3), (1,))


@pytest.mark.parametrize(
    ("step", "what"),
    [
        (_jax.NDIndexer((_jax.Slice(0, 32, 2),), (64,), ()), "has a stride"),
        (_jax.ReshapeTransform((8, 8)), "ReshapeTransform"),
    ],
)
def test_strides_and_reshapes_have_no_window(step, what):
    with pytest.raises(errors.UnsupportedError, match=what):
        resolve((64,), [step])
