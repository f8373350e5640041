# SPDX-License-Identifier: Apache-2.0
"""Tiled, strided and splat descriptions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts import (
    Replicated,
    TiledLayout,
    Tiling,
    WGSplatLayout,
    WGStridedLayout,
)
from pallas_gpu.layouts.registers import catalogue
from tests.support.refusal import refused


def test_tiles_apply_in_order_to_the_minor_dimensions():
    tiling = Tiling(((64, 8), (16, 8), (8, 8), (2,)))
    assert tiling.tile_shape((3, 128, 32)) == (3, 2, 4, 4, 1, 2, 1, 8, 4, 2)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_linear_form_is_the_tiled_array_with_its_dims_dealt_out(data):
    """Reshapes and transposes a numbered array by the definition of tiling."""
    grid = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    layout = data.draw(st.sampled_from(TWO_DIMENSIONAL))
    base = layout.tiling.tiles[0]
    shape = (grid[0] * base[0], grid[1] * base[1])
    array = np.arange(shape[0] * shape[1]).reshape(shape)
    for tile in layout.tiling.tiles:
        lead = array.shape[: array.ndim - len(tile)]
        pairs = [
            (s // t, t) for s, t in zip(array.shape[len(lead) :], tile, strict=True)
        ]
        array = array.reshape(*lead, *(x for pair in pairs for x in pair))
        first = len(lead)
        counts = range(first, array.ndim, 2)
        inner = range(first + 1, array.ndim, 2)
        array = array.transpose(*range(first), *counts, *inner)
    dims = [d + array.ndim for d in (*layout.warp_dims, *layout.lane_dims)]
    vector = layout.vector_dim + array.ndim
    rest = [d for d in range(array.ndim) if d not in (*dims, vector)]
    dealt = array.transpose(*dims, *rest, vector).reshape(128, -1, layout.vector_length)
    held = layout.linear(shape).flat_indices()
    for t in (0, 1, 31, 64, 127):
        assert sorted(map(tuple, dealt[t])) == sorted(map(tuple, held[t]))


TWO_DIMENSIONAL = [
    catalogue.WGMMA,
    catalogue.WGMMA_8BIT,
    catalogue.WGMMA_UPCAST_2X,
    catalogue.WGMMA_UPCAST_4X,
    catalogue.WGMMA_TRANSPOSED,
    catalogue.WGMMA_ACC_32BIT,
    catalogue.TCGEN05_TRANSPOSED,
    catalogue.tcgen05_tmem_native(4),
    catalogue.tcgen05_m64_collective(64),
    catalogue.mma_acc(2),
]


@pytest.mark.parametrize("layout", TWO_DIMENSIONAL, ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_a_reduced_description_and_a_reduced_linear_form_agree(layout, axis):
    shape = tuple(2 * s for s in layout.base_tile_shape)
    rest = (shape[1 - axis],)
    assert layout.reduce(axis).linear(rest) == layout.linear(shape).reduce(axis)


def test_reduced_layouts_drop_the_tiles_that_do_nothing():
    column = catalogue.WGMMA.reduce(0)
    assert column == TiledLayout(
        Tiling(((8,), (2,))), (Replicated(4),), (Replicated(8), -2), -1
    )
    row = catalogue.WGMMA.reduce(1)
    assert row == TiledLayout(
        Tiling(((64,), (16,), (8,), (1,))), (-4,), (-2, Replicated(4)), -1
    )


def test_reducing_every_axis_is_refused():
    with pytest.raises(LayoutError, match="at least one of its axes"):
        catalogue.WGMMA.reduce((0, 1))


def test_the_shape_must_be_whole_tiles():
    with pytest.raises(LayoutError, match="does not divide the shape") as caught:
        catalogue.WGMMA.linear((63, 8))
    assert "(64, 8)" in str(caught.value)


@pytest.mark.parametrize(
    "tiles", [(), ((),), ((8,), (8, 8)), ((8, 0),), ((8, 8), (3, 8))]
)
@refused
def test_a_bad_tiling_is_refused(tiles):
    Tiling(tiles)


@pytest.mark.parametrize(
    "warp, lane, vector, message",
    [
        ((-7,), (-3, -3), -1, "distinct"),
        ((-7,), (0, -2), -1, "negative"),
        ((-8,), (-3, -2), -1, "inside the tiles"),
        ((-5,), (-3, -2), -1, "cover all 4 warps"),
        ((-7,), (-3,), -1, "cover all 32 lanes"),
        ((-7,), (-3, -1, Replicated(2)), -2, "adjacent"),
    ],
)
def test_a_bad_partition_is_refused(warp, lane, vector, message):
    with pytest.raises(LayoutError, match=message):
        TiledLayout(catalogue.WGMMA.tiling, warp, lane, vector)


@pytest.mark.parametrize("shape", [(128, 96), (5, 128), (256,), (2, 3, 64)])
def test_a_strided_layout_deals_vectors_in_turn(shape):
    layout = WGStridedLayout.default(shape, 32)
    flat = np.ravel_multi_index(
        tuple(np.moveaxis(layout.all_coordinates(), -1, 0)), shape
    )
    for t, r in [(0, 0), (3, layout.num_registers - 1), (127, 0)]:
        assert flat[t, r, 0] == layout.flat_offset(t, r)
        assert (flat[t, r] // layout.vec_size % 128 == t).all()


@pytest.mark.parametrize(
    "shape, bits, vec",
    [
        ((256,), 32, 2),
        ((1024,), 8, 4),
        ((1024,), 16, 4),
        ((1024,), 32, 4),
        ((1024,), 64, 2),
        ((384,), 8, 1),
    ],
)
def test_the_default_vector_is_the_same_for_all_types_of_up_to_32_bits(
    shape, bits, vec
):
    assert WGStridedLayout.default(shape, bits).vec_size == vec


def test_a_size_that_is_no_multiple_of_128_is_refused_with_a_hint():
    with pytest.raises(LayoutError, match="equally many elements") as caught:
        WGStridedLayout.default((100,), 32)
    assert "pad" in str(caught.value)


def test_a_strided_layout_without_linear_form_says_so():
    layout = WGStridedLayout.default((128, 96), 32)
    assert not layout.is_linear
    with pytest.raises(LayoutError, match="no linear form"):
        layout.linear()


def test_a_splat_of_one_element_is_a_replicated_register():
    assert WGSplatLayout((1, 1)).linear().replication_bits == tuple(range(7))
    with pytest.raises(LayoutError, match="does not have a placement"):
        WGSplatLayout((8,)).linear()
