# SPDX-License-Identifier: Apache-2.0
"""Tiled, strided and splat descriptions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_gpu.layouts import (
    Replicated,
    TiledLayout,
    Tiling,
    WGSplatLayout,
    WGStridedLayout,
)
from pallas_gpu.layouts.registers import catalogue


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


def test_a_splat_of_one_element_is_a_replicated_register():
    assert WGSplatLayout((1, 1)).linear().replication_bits == tuple(range(7))
