# SPDX-License-Identifier: Apache-2.0
"""The linear form and what is made from it."""

from __future__ import annotations

import numpy as np

from pallas_gpu.layouts import Layout, LinearLayout, WGStridedLayout
from pallas_gpu.layouts.registers import catalogue

WGMMA = catalogue.WGMMA.linear((128, 64))


def test_the_formula_of_the_docstring_gives_the_coordinates():
    coordinates = WGMMA.all_coordinates()
    for t, r, v in [(0, 0, 0), (1, 0, 1), (37, 5, 0), (127, 31, 1)]:
        wanted = np.array(WGMMA.origins[r])
        for b in range(7):
            wanted = wanted + ((t >> b) & 1) * np.array(WGMMA.thread_columns[b])
        wanted[WGMMA.vector_axis] += v
        np.testing.assert_array_equal(coordinates[t, r, v], wanted)
        np.testing.assert_array_equal(WGMMA.coordinates(t)[r, v], wanted)


def test_registers_are_sorted_and_duplicates_dropped():
    again = LinearLayout.create(
        WGMMA.shape,
        WGMMA.thread_columns,
        [*WGMMA.origins[::-1], WGMMA.origins[0]],
        2,
        1,
    )
    assert again == WGMMA


def test_a_column_vector_broadcasts_whole_registers():
    sources = WGMMA.broadcast_elements(WGMMA.reduce(0), (1,))
    assert (sources[..., 1] == np.arange(2)).all()


def test_a_unit_axis_broadcasts_like_a_missing_one():
    row = WGMMA.reduce(1)
    kept = row.insert_axes(1)
    assert kept.shape == (128, 1)
    sources = WGMMA.broadcast_elements(row, (0,))
    np.testing.assert_array_equal(WGMMA.broadcast_elements(kept, (0, 1)), sources)


def test_every_thread_has_the_scalar_of_a_whole_array():
    scalar = WGMMA.reduce((0, 1))
    assert (scalar.shape, scalar.num_registers) == ((), 1)
    assert scalar.replication_bits == tuple(range(7))
    assert not WGMMA.broadcast_elements(scalar, ()).any()


def test_a_vector_in_other_threads_does_not_broadcast():
    strided = WGStridedLayout((128,), 1).linear()
    assert not WGMMA.broadcast_matches(strided, (0,))


def test_a_slice_of_whole_thread_tiles_keeps_registers():
    part = WGMMA.slice((64, 16), (64, 32))
    assert part == catalogue.WGMMA.linear((64, 32))
    registers = WGMMA.slice_registers((64, 16), (64, 32))
    moved = [tuple(np.subtract(WGMMA.origins[r], (64, 16))) for r in registers]
    assert moved == list(part.origins)


def test_equal_placements_are_equal_whatever_the_description():
    assert catalogue.TCGEN05_COL.linear((64,)) == Layout.WGMMA.reduce(0).linear((64,))
    tiled = catalogue.TiledLayout(
        catalogue.Tiling(((256,), (64,), (2,))), (-3,), (-2,), -1
    )
    assert tiled.linear((1024,)) == WGStridedLayout((1024,), 2).linear()
