# SPDX-License-Identifier: Apache-2.0
"""Layouts with padding: every element has a place, and padding is never one."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts import LinearLayout
from pallas_gpu.layouts.moves.binary import binary_layout
from pallas_gpu.layouts.registers import catalogue
from pallas_gpu.layouts.registers.defaults import padded_layout, spread_layout
from pallas_gpu.layouts.registers.placement import uniform_length
from pallas_gpu.layouts.registers.reshapes import reshaped
from tests.support.odd_shapes import shapes

LAYOUT = spread_layout((100, 77))


@st.composite
def layouts(draw) -> LinearLayout:
    """Layouts of odd shapes, and those of the tensor core."""
    if draw(st.booleans()):
        return spread_layout(draw(shapes(most=3000, rank=3)))
    named = draw(st.sampled_from([catalogue.WGMMA, catalogue.WGMMA_TRANSPOSED]))
    return named.linear(draw(st.sampled_from([(128, 64), (2, 64, 64)])))


def values(layout: LinearLayout, array: np.ndarray) -> np.ndarray:
    """What each thread holds of an array: [128, registers, vector], -1 for padding."""
    flat = layout.flat_indices()
    return np.where(flat < 0, -1, array.reshape(-1)[flat])


def held(layout: LinearLayout) -> np.ndarray:
    return values(layout, np.arange(layout.size))


@given(shapes(most=3000, rank=3))
def test_every_element_has_equally_many_owners_and_padding_none(shape):
    layout = spread_layout(shape)
    flat = layout.flat_indices()
    owners = np.bincount(flat[flat >= 0], minlength=layout.size)
    assert (owners == 1 << len(layout.replication_bits)).all()
    assert ((flat < 0) == ~layout.inside()).all()
    assert layout.is_padded == (flat < 0).any()


@given(layouts(), st.data())
def test_a_transpose_moves_registers_with_their_axes(layout, data):
    shape = layout.shape
    order = data.draw(st.permutations(range(len(shape))))
    turned = layout.transpose(order)
    array = np.arange(layout.size).reshape(shape)
    moved = values(layout, array)[:, layout.transpose_registers(order)]
    assert (values(turned, array.transpose(order)) == moved).all()


@given(layouts(), st.data())
def test_a_reduced_layout_holds_what_broadcasts_back(layout, data):
    shape = layout.shape
    axis = data.draw(st.integers(0, len(shape) - 1))
    reduced = layout.reduce(axis)
    dims = [a for a in range(len(shape)) if a != axis]
    sources = layout.broadcast_elements(reduced, dims)
    array = np.arange(reduced.size).reshape(reduced.shape)
    given_ = values(reduced, array)[:, sources[..., 0], sources[..., 1]]
    wanted = values(layout, np.broadcast_to(np.expand_dims(array, axis), shape))
    inside = layout.inside()
    assert (given_[inside] == wanted[inside]).all()


def regrouped(data: st.DataObject, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Another shape of as many elements."""
    sizes = data.draw(st.permutations([p for n in shape for p in _factors(n)]))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(sizes)), max_size=3)))
    parts = itertools.pairwise([0, *cuts, len(sizes)])
    return tuple(math.prod(sizes[a:b]) for a, b in parts)


def _factors(n: int) -> list[int]:
    for p in range(2, n + 1):
        if n % p == 0:
            return [p, *_factors(n // p)]
    return []


@settings(max_examples=200)
@given(layouts(), st.data())
def test_a_reshape_keeps_elements_and_padding_or_is_refused(layout, data):
    new = regrouped(data, layout.shape)
    try:
        other = layout.reshape(new)
    except LayoutError:
        return
    assert other.shape == new
    assert (held(other) == held(layout)).all()


def test_unit_axes_and_leading_axes_reshape_with_padding():
    row = spread_layout((5000,))
    assert row.reshape((1, 5000)).reshape((5000,)) == row
    assert row.reshape((1250, 4)).padded_axes == (0,)
    assert spread_layout((8, 1001)).reshape((2, 4, 1001)).padded_axes == (2,)


@given(shapes(most=5000, rank=3), st.data())
def test_reshaped_coordinates_are_those_of_numpy(old, data):
    new = regrouped(data, old)
    flat = np.arange(math.prod(old))
    places = np.stack(np.unravel_index(flat, old), axis=-1)
    wanted = np.stack(np.unravel_index(flat, new), axis=-1)
    assert (reshaped(places, old, new) == wanted).all()


@given(shapes(most=3000, rank=2), st.data())
def test_a_slice_holds_its_elements_or_is_refused(shape, data):
    layout = spread_layout(shape)
    starts, sizes = [], []
    for n in shape:
        starts.append(data.draw(st.sampled_from(sorted({0, n // 2, 128 % n, n - 1}))))
        sizes.append(data.draw(st.integers(1, n - starts[-1])))
    try:
        part = layout.slice(starts, sizes)
    except LayoutError:
        return
    ranges = tuple(slice(s, s + n) for s, n in zip(starts, sizes, strict=True))
    array = np.arange(layout.size).reshape(shape)
    kept = values(layout, array)[:, layout.slice_registers(starts, sizes)]
    mine = values(part, array[ranges])
    assert (np.where(part.inside(), kept, -1) == mine).all()


def test_the_rest_of_an_array_is_a_slice_with_padding():
    part = spread_layout((1001,)).slice((896,), (105,))
    assert (part.num_registers, part.box) == (1, (128,))


def test_padded_layouts_have_no_binary_form():
    assert binary_layout(LAYOUT) is None
    assert binary_layout(spread_layout((64, 4))) is not None


def test_vectors_of_default_layouts_are_padding_as_a_whole():
    assert uniform_length(spread_layout((5000,))) == 4
    cut = LinearLayout.create((3,), [(0,)] * 7, [(0,)], 4, 0)
    assert uniform_length(cut) == 1


def test_warps_along_rows():
    layout = padded_layout((100, 77), (0,))
    assert layout is not None
    assert layout.thread_columns[-2:] == ((2, 0), (4, 0))
