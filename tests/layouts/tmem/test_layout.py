# SPDX-License-Identifier: Apache-2.0
"""Places of elements in tensor memory."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_gpu.layouts import TiledLayout, Tiling, TmemLayout
from pallas_gpu.layouts.tmem import layout as tmem
from tests.support import tmem_layouts

SIXTY_FOUR = {"half-lane": TmemLayout.half_lane, "M64": TmemLayout.m64_collective}
SCALES_OF_HALVES = TmemLayout.scales_m64_collective()


@st.composite
def arrays(draw) -> tuple[TmemLayout, tuple[int, int]]:
    """A layout and a shape that has it."""
    name = draw(st.sampled_from(["default", *SIXTY_FOUR, "scales", "collective", "2"]))
    count = draw(st.integers(1, 4))
    rows = draw(st.integers(1, 2))
    packing = draw(st.sampled_from([1, 2, 4, 8]))
    match name:
        case "default":
            return TmemLayout.default(packing), (128, packing * count)
        case "scales":
            return TmemLayout.scales(), (128 * rows, 4 * count)
        case "collective":
            return TmemLayout.scales_m64_collective(), (256 * rows, 4 * count)
        case "2":
            return TmemLayout.sparse_metadata(), (128, 16 * count)
    columns = 16 * draw(st.sampled_from([1, 2, 3]))
    return SIXTY_FOUR[name](columns, packing), (64, columns * count)


@settings(max_examples=80, deadline=None)
@given(arrays())
def test_every_bit_of_every_column_holds_one_element(array):
    layout, shape = array
    lanes, columns, positions = layout.places(shape)
    assert lanes.shape == (*shape, layout.copies)
    spots = (lanes * layout.columns(shape) + columns[..., None]) * layout.packing
    spots = spots + positions[..., None]
    size = tmem.LANES * layout.columns(shape) * layout.packing
    assert sorted(spots.reshape(-1).tolist()) == list(range(size))


@settings(max_examples=80, deadline=None)
@given(arrays())
def test_warps_lanes_and_vectors_are_those_of_the_tiles(array):
    """Columns are the registers, in the order of the tiled array's dims."""
    layout, shape = array
    tiled = layout.tiled
    lanes, columns, positions = layout.places(shape)
    held = tiled.linear(shape).all_coordinates()
    for thread in range(tmem.LANES):
        rows, cols = held[thread].reshape(-1, 2).T
        assert (lanes[rows, cols] == thread).any(axis=-1).all()
        # Each column once for each of its positions.
        spots = columns[rows, cols] * layout.packing + positions[rows, cols]
        assert sorted(spots.tolist()) == list(range(len(rows)))
    origins = held[0, :, 0]
    assert (positions[tuple(origins.T)] == 0).all()


@settings(max_examples=40, deadline=None)
@given(arrays())
def test_tiles_tell_their_kind(array):
    layout, _ = array
    assert TmemLayout.from_tiled(layout.tiled) == layout


@settings(max_examples=40, deadline=None)
@given(arrays(), st.integers(0, 3))
def test_whole_tiles_lie_alike_wherever_they_start(array, start):
    """A part made of whole tiles is an array with the same layout."""
    layout, (rows, columns) = array
    tile_rows, tile = layout.base_tile_shape
    if rows != tile_rows or columns // tile <= start:
        return
    whole = layout.places((rows, columns))
    part = layout.places((rows, tile))
    here = slice(start * tile, (start + 1) * tile)
    first = layout.columns((rows, tile)) * start
    assert np.array_equal(whole.lanes[:, here], part.lanes)
    assert np.array_equal(whole.columns[:, here], part.columns + first)
    assert np.array_equal(whole.positions[:, here], part.positions)


def test_halves_of_scales_are_where_the_halves_of_the_accumulator_are():
    """Lanes 64 to 127 multiply the second half of N, and read its scales there."""
    scales = SCALES_OF_HALVES.places((256, 4)).lanes
    accumulator = TmemLayout.m64_collective(256).places((64, 256)).lanes
    for column in range(256):
        assert set(scales[column].reshape(-1) // 64) == set(
            accumulator[:, column].reshape(-1) // 64
        )


@pytest.mark.parametrize("layout", [TmemLayout.scales(), SCALES_OF_HALVES], ids=str)
def test_scales_are_where_their_copy_puts_them(layout):
    assert tmem_layouts.is_as_copied(layout)


def test_the_worked_examples_hold():
    finder = doctest.DocTestFinder(recurse=True)
    examples = finder.find(tmem, globs=vars(tmem))
    runner = doctest.DocTestRunner()
    for example in examples:
        runner.run(example)
    assert runner.summarize(verbose=False) == (0, 9)


@pytest.mark.parametrize(
    ("needed", "taken"), [(1, 32), (32, 32), (33, 64), (300, 512), (512, 512)]
)
def test_allocations_are_powers_of_two(needed, taken):
    assert tmem.allocated_columns(needed) == taken


def test_tiles_may_be_written_in_other_ways():
    """A tile that splits nothing more changes no place."""
    tiles = Tiling(((128, 2), (32, 2), (16, 2)))
    layout = TiledLayout(tiles, (-6,), (-4, -2), -1)
    assert TmemLayout.from_tiled(layout) == TmemLayout.default(2)


@pytest.mark.parametrize("rows", [128, 256, 384])
def test_scales_of_all_rows_are_next_to_each_other(rows):
    """PTX ISA: the scales of an instruction's rows are in consecutive columns."""
    k = 12
    found = TmemLayout.scales().places((rows, k))
    row, scale = np.indices((rows, k))
    tile = scale // 4 * (rows // 128) + row // 128
    assert np.array_equal(found.columns, 4 * tile + row % 128 // 32)
    assert np.array_equal(found.lanes[..., 0], row % 32)
    assert np.array_equal(found.positions, scale % 4)
