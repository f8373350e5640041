# SPDX-License-Identifier: Apache-2.0
"""Which register layouts the instructions between registers and TMEM carry."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_gpu.layouts import Layout, LinearLayout, TmemLayout, transfers
from pallas_gpu.layouts.tmem.access import TmemAccess, find_access

COLUMNS = 64


def registers(layout, rows: int, columns: int = COLUMNS) -> LinearLayout:
    return (
        layout.to_layout().linear((rows, columns))
        if isinstance(layout, Layout)
        else layout.linear((rows, columns))
    )


NATIVE = Layout.TCGEN05_TMEM_NATIVE(2)
COLLECTIVE = Layout.TCGEN05_M64_COLLECTIVE(COLUMNS)
COLLECTIVE_NATIVE = Layout.TCGEN05_M64_COLLECTIVE_NATIVE(COLUMNS, 2)
HALF_LANE = TmemLayout.half_lane(COLUMNS)
HALF_LANE_PAIRS = TmemLayout.half_lane(COLUMNS, 2)
M64 = TmemLayout.m64_collective(COLUMNS)
M64_PAIRS = TmemLayout.m64_collective(COLUMNS, 2)
DEFAULT, PAIRS = TmemLayout.default(), TmemLayout.default(2)

# SPEC 3.2: the pairs that transfer, with the instruction that does it.
CARRIED = [
    (Layout.TCGEN05, 128, DEFAULT, 32, TmemAccess("16x256b", False)),
    (Layout.TCGEN05, 128, DEFAULT, 16, TmemAccess("16x128b", True)),
    (Layout.TCGEN05, 128, PAIRS, 16, TmemAccess("16x128b", False)),
    (NATIVE, 128, DEFAULT, 32, TmemAccess("32x32b", False)),
    (NATIVE, 128, DEFAULT, 16, TmemAccess("32x32b", True)),
    (NATIVE, 128, PAIRS, 16, TmemAccess("32x32b", False)),
    (Layout.WGMMA, 64, HALF_LANE, 32, TmemAccess("16x256b", False)),
    (Layout.WGMMA, 64, HALF_LANE_PAIRS, 16, TmemAccess("16x128b", False)),
    (COLLECTIVE, 64, M64, 32, TmemAccess("16x256b", False)),
    (COLLECTIVE, 64, M64_PAIRS, 16, TmemAccess("16x128b", False)),
    (COLLECTIVE_NATIVE, 64, M64_PAIRS, 16, TmemAccess("32x32b", False)),
]
# The same placements, which the instructions therefore carry as well.
CARRIED_TOO = [
    (Layout.WGMMA, 64, HALF_LANE, 16, TmemAccess("16x128b", True)),
    (Layout.WGMMA_ACC_32BIT, 64, HALF_LANE, 32, TmemAccess("16x256b", False)),
    (COLLECTIVE, 64, M64, 16, TmemAccess("16x128b", True)),
    (COLLECTIVE_NATIVE, 64, M64, 32, TmemAccess("32x32b", False)),
    (Layout.TCGEN05_TMEM_NATIVE(4), 128, DEFAULT, 32, TmemAccess("32x32b", False)),
]


@pytest.mark.parametrize(
    ("layout", "rows", "tmem", "bits", "access"), CARRIED + CARRIED_TOO
)
def test_pairs_that_an_instruction_carries(layout, rows, tmem, bits, access):
    placement = registers(layout, rows)
    assert transfers(placement, tmem, bits)
    assert find_access(placement, tmem, bits) == access


@pytest.mark.parametrize(
    ("layout", "bits"),
    [(TmemLayout.default(32 // bits), bits) for bits in (4, 8, 16, 32)]
    + [(TmemLayout.m64_collective(64, 32 // bits), bits) for bits in (8, 16, 32)]
    + [(TmemLayout.half_lane(64, 32 // bits), bits) for bits in (8, 16, 32)]
    + [(TmemLayout.scales(), 8), (TmemLayout.scales_m64_collective(), 8)],
    ids=str,
)
def test_a_layout_whose_columns_are_full_transfers_to_its_own_tiles(layout, bits):
    shape = layout.base_tile_shape[0], COLUMNS
    placement = layout.tiled.linear(shape)
    assert find_access(placement, layout, bits) == TmemAccess("32x32b", False)


@pytest.mark.parametrize("width", [8, 16, 32])
def test_columns_that_are_not_full_only_transfer_in_pairs_of_16_bits(width):
    own = DEFAULT.tiled.linear((128, COLUMNS))
    assert transfers(own, DEFAULT, width) == (width == 32)
    pairs = registers(NATIVE, 128)
    assert transfers(pairs, DEFAULT, width) == (width > 8)


OTHERS = [
    (Layout.WGMMA, 128),
    (Layout.TCGEN05_TRANSPOSED, 128),
    (Layout.WG_STRIDED((128, COLUMNS), 2), 128),
    (Layout.WG_STRIDED((128, COLUMNS), 4), 128),
    (Layout.MMA_ACC(2), 128),
    (Layout.WGMMA_TRANSPOSED, 64),
    (Layout.WG_STRIDED((64, COLUMNS), 2), 64),
    (Layout.MMA_ACC(1), 64),
]


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize(("layout", "rows"), OTHERS)
def test_no_instruction_carries_other_layouts(layout, rows, bits):
    placement = registers(layout, rows)
    tmems = [DEFAULT, PAIRS, TmemLayout.scales(), HALF_LANE, M64, HALF_LANE_PAIRS]
    assert not any(transfers(placement, tmem, bits) for tmem in tmems)


def test_layouts_of_one_kind_do_not_transfer_with_another():
    assert not transfers(registers(Layout.WGMMA, 64), M64, 32)
    assert not transfers(registers(COLLECTIVE, 64), HALF_LANE, 32)
    assert not transfers(registers(Layout.TCGEN05, 128), TmemLayout.scales(), 32)
    # Halves of 32 columns are not those of 64.
    assert not transfers(registers(COLLECTIVE, 64), TmemLayout.m64_collective(32), 32)
    assert not transfers(registers(Layout.WGMMA, 128), DEFAULT, 32)


def test_a_row_for_each_thread_reads_no_copies_of_scales():
    """Threads would find their column by different rules, and miss the copies."""
    rows = registers(Layout.TCGEN05_TMEM_NATIVE(4), 128)
    assert not transfers(rows, TmemLayout.scales(), 8)


def test_sparse_metadata_does_not_pass_through_registers():
    metadata = TmemLayout.sparse_metadata()
    assert not transfers(metadata.tiled.linear((128, 64)), metadata, 2)


def test_strided_layouts_that_are_not_linear_do_not_transfer():
    assert not transfers(Layout.WG_STRIDED((128, 24), 8), DEFAULT, 32)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_transfer_puts_every_element_where_its_thread_finds_it(data):
    """Plays the fragments of the PTX ISA's figures on a numbered array."""
    layout, rows, tmem, bits, access = data.draw(st.sampled_from(CARRIED))
    placement = registers(layout, rows)
    places = tmem.places((rows, COLUMNS))
    per_register = 32 // bits
    memory = np.full((128, tmem.columns((rows, COLUMNS)), tmem.packing), -1)
    numbers = np.arange(rows * COLUMNS).reshape(rows, COLUMNS)
    for copy in range(tmem.copies):
        spots = places.lanes[..., copy], places.columns, places.positions
        memory[spots] = numbers
    loaded = [
        tuple(register)
        for warp in range(4)
        for lane in range(32)
        for register in fragments(memory[32 * warp :][:32], access, lane)
    ]
    held = placement.flat_indices().reshape(-1, per_register)
    assert sorted(loaded) == sorted(map(tuple, held.tolist()))
    thread = data.draw(st.integers(0, 127))
    mine = fragments(memory[thread // 32 * 32 :][:32], access, thread % 32)
    wanted = placement.flat_indices()[thread].reshape(-1, per_register).tolist()
    assert sorted(map(tuple, mine)) == sorted(map(tuple, wanted))


def fragments(memory: np.ndarray, access: TmemAccess, lane: int) -> list[list[int]]:
    """The 32-bit registers of a lane: contents of its part of 32 TMEM lanes."""
    if access.shape == "32x32b":
        cells = [(lane, c) for c in range(memory.shape[1])]
    else:
        each = 1 if access.shape == "16x128b" else 2
        each *= 1 + access.paired  # of packed registers, columns count in pairs
        width = 4 * each
        cells = [
            (row + lane // 4, first + each * (lane % 4) + i)
            for row in (0, 8, 16, 24)
            for first in range(0, memory.shape[1], width)
            for i in range(each)
        ]
    columns = [memory[cell].tolist() for cell in cells]
    if not access.paired:
        return columns
    return [a + b for a, b in zip(columns[::2], columns[1::2], strict=True)]
