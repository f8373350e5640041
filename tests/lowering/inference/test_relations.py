# SPDX-License-Identifier: Apache-2.0
"""Layouts through operations that change shapes agree with what the emitters do."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_gpu.layouts import Layout, LinearLayout
from pallas_gpu.layouts.moves.reductions import plan_reduction
from pallas_gpu.layouts.registers.placement import place
from pallas_gpu.lowering.inference import relations
from pallas_gpu.lowering.inference.relations import (
    Broadcast,
    Reduce,
    Reshape,
    Slice,
    Transpose,
)

SHAPE = (64, 64)
LAYOUTS = [
    place(layout, SHAPE)
    for layout in (
        Layout.WGMMA,
        Layout.WGMMA_TRANSPOSED,
        Layout.WGMMA_8BIT,
        Layout.WG_STRIDED(SHAPE, 4),
        Layout.WG_STRIDED(SHAPE, 1),
        Layout.TCGEN05_M64_COLLECTIVE(64),
    )
]
layouts = st.sampled_from(LAYOUTS)


def held(layout: LinearLayout, array: np.ndarray) -> np.ndarray:
    """What each thread holds of an array, register by register."""
    coordinates = layout.all_coordinates()
    return array[tuple(np.moveaxis(coordinates, -1, 0))]


ARRAY = np.arange(4096).reshape(SHAPE)


@given(layouts, st.sampled_from([(4096,), (2, 32, 64), (64, 8, 8), (1, 64, 64)]))
def test_a_reshape_keeps_every_register_there_and_back(layout, shape):
    there = Reshape(SHAPE, shape)
    result = there.forward(layout)
    if result is not None:
        assert there.backward(result) == layout
        np.testing.assert_array_equal(
            held(result, ARRAY.reshape(shape)), held(layout, ARRAY)
        )


@given(layouts)
def test_a_transpose_and_back_is_no_change(layout):
    turned = Transpose((1, 0)).forward(layout)
    assert turned is not None
    assert Transpose((1, 0)).backward(turned) == layout
    there, back = held(turned, ARRAY.T), held(layout, ARRAY)
    np.testing.assert_array_equal(np.sort(there[0].ravel()), np.sort(back[0].ravel()))


@given(
    layouts,
    st.sampled_from([((0, 0), (64, 32)), ((0, 32), (64, 32)), ((32, 0), (32, 64))]),
)
def test_a_slice_holds_some_of_the_registers(layout, part):
    starts, sizes = part
    result = Slice(SHAPE, starts, sizes).forward(layout)
    if result is None:
        return
    chosen = ARRAY[tuple(slice(s, s + n) for s, n in zip(starts, sizes, strict=True))]
    mine, all_ = held(result, chosen), held(layout, ARRAY)
    for thread in (0, 37, 127):
        assert set(mine[thread].ravel()) <= set(all_[thread].ravel())


@pytest.mark.parametrize("start", [0, 64])
def test_a_layout_of_a_slice_leads_back_to_one_of_the_whole(start):
    relation = Slice((128, 64), (start, 0), (64, 64))
    for layout in LAYOUTS:
        whole = relation.backward(layout)
        assert whole is not None
        assert relation.forward(whole) == layout


def test_every_slice_of_few_elements_has_a_layout_of_its_operand():
    starts_and_sizes = itertools.product((0, 1, 16, 33), (1, 8, 30))
    for start, size in starts_and_sizes:
        relation = Slice((64, 8), (start, 0), (size, 8))
        natural = list(relation.natural((64, 8), 32))
        assert any(relation.forward(layout) is not None for layout in natural)


def test_an_axis_of_size_one_is_broadcast():
    layout = place(Layout.WGMMA, SHAPE)
    operand = Broadcast((1, 64), SHAPE, (0, 1)).backward(layout)
    assert operand is not None
    assert operand.shape == (1, 64)
    assert layout.broadcast_matches(operand, (0, 1))


def test_a_strided_layout_without_linear_form_is_reduced_only_as_a_whole():
    layout = place(Layout.WG_STRIDED((48, 40), 1), (48, 40))
    assert Reduce((0,)).forward(layout) is None
    plan = plan_reduction(layout, (0, 1))
    assert (len(plan.lanes), len(plan.warps), len(plan.groups)) == (5, 2, 1)


@pytest.mark.parametrize("axes", [(0,), (1,)])
def test_layouts_for_a_reduction_keep_the_warps_apart(axes):
    for layout in Reduce(axes).natural(SHAPE, 32):
        assert not plan_reduction(layout, axes).warps
        assert Reduce(axes).forward(layout) is not None


def test_reductions_across_warps_cost_more():
    crossing = place(Layout.WG_STRIDED(SHAPE, 4), SHAPE)
    inside = place(Layout.WGMMA, SHAPE)
    relation = Reduce((0,))
    assert relation.cost(crossing, 32) > 0
    assert Reduce((1,)).cost(inside, 32) < Reduce((0,)).cost(inside, 32)


def test_a_reduction_of_an_odd_shape_may_keep_its_warps_apart():
    (layout,) = relations.Reduce((1,)).natural((7, 1001), 32)
    assert layout.is_padded
    assert not plan_reduction(layout, (1,)).warps
