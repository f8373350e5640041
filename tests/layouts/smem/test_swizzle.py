# SPDX-License-Identifier: Apache-2.0
"""Swizzles, banks and the placement of arrays in shared memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_gpu.layouts import SmemLayout
from pallas_gpu.layouts.smem.banks import ideal_wavefronts, wavefronts_of
from pallas_gpu.layouts.smem.swizzle import SWIZZLES, atom_bytes, swizzle_bytes

OFFSETS = st.integers(0, 2**18 - 1)
LANES = np.arange(32)


@given(OFFSETS, OFFSETS, st.sampled_from(SWIZZLES))
def test_a_swizzle_is_linear_over_xor_and_its_own_inverse(a, b, swizzle):
    both = swizzle_bytes(a, swizzle) ^ swizzle_bytes(b, swizzle)
    assert swizzle_bytes(a ^ b, swizzle) == both
    assert swizzle_bytes(swizzle_bytes(a, swizzle), swizzle) == a


@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_a_swizzle_permutes_the_chunks_of_one_atom(swizzle):
    atom = np.arange(atom_bytes(swizzle))
    moved = swizzle_bytes(atom, swizzle)
    assert sorted(moved) == atom.tolist()
    assert (moved % 16 == atom % 16).all()
    assert (moved // swizzle == atom // swizzle).all()


@pytest.mark.parametrize(
    "swizzle, offset, moved",
    [(128, 0x380, 0x3F0), (64, 0x180, 0x1B0), (32, 0x80, 0x90)],
)
def test_the_line_number_is_xored_into_the_chunk_number(swizzle, offset, moved):
    assert swizzle_bytes(offset, swizzle) == moved


@pytest.mark.parametrize(
    "addresses, width, count",
    [
        (LANES * 4, 4, 1),
        (LANES * 128, 4, 32),
        (LANES * 0, 4, 1),
        (LANES * 8, 4, 2),
        (LANES * 2, 2, 1),
        (LANES * 8, 8, 2),
        (LANES * 16, 16, 4),
        (LANES * 128, 16, 32),
        (LANES // 4 * 128 + LANES % 4 * 8, 8, 8),
    ],
)
def test_wavefronts_are_distinct_words_of_the_busiest_bank(addresses, width, count):
    assert wavefronts_of(addresses, width) == count


def test_the_degree_is_relative_to_the_ideal():
    assert wavefronts_of(LANES * 16, 16) == ideal_wavefronts(32, 16)
    assert wavefronts_of(LANES * 128, 16) == 8 * ideal_wavefronts(32, 16)


def test_tiles_are_stored_one_after_the_other():
    smem = SmemLayout((16, 128), 16, (8, 64))
    assert smem.physical_shape == (2, 2, 8, 64)
    assert smem.byte_offset((0, 64)) == 8 * 64 * 2
    assert smem.byte_offset((9, 1)) == 2 * (2 * 512 + 64 + 1)


@pytest.mark.parametrize("tiling, swizzle", [(None, 16), ((8, 64), 128), ((8, 32), 64)])
def test_placement_is_a_permutation_of_the_bytes(tiling, swizzle):
    smem = SmemLayout((2, 16, 128), 16, tiling, swizzle)
    grid = np.stack(np.meshgrid(*map(np.arange, smem.shape), indexing="ij"), axis=-1)
    offsets = smem.byte_offsets(grid.reshape(-1, 3))
    assert sorted(offsets) == list(range(0, smem.size_bytes, 2))


def test_four_bit_elements_share_bytes():
    smem = SmemLayout((8, 256), 4, (8, 256), 128)
    assert smem.size_bytes == 1024
    assert smem.byte_offset((0, 3)) == 1
