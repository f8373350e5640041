# SPDX-License-Identifier: Apache-2.0
"""Where the metadata of sparse operands lies, by the PTX ISA's description."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_gpu.layouts.tmem.mma_instruction import Instruction
from pallas_gpu.layouts.tmem.sparsity import lanes_of, metadata_of, order_of_tile


@pytest.mark.parametrize("bits", [4, 8, 16, 32])
def test_a_tile_has_each_index_once(bits):
    found = np.sort(order_of_tile(bits).reshape(-1))
    np.testing.assert_array_equal(found, np.arange(128 * 64))


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_64_rows_of_metadata_lie_in_both_halves_of_the_lanes_of_a_warp(bits):
    """Those of rows 16 * w to 16 * w + 15, in the order of M = 128, in warp w."""
    order = order_of_tile(bits, 64).reshape(4, 2, 16, 64)
    for half in (0, 1):
        same = order_of_tile(bits)[:64]
        np.testing.assert_array_equal(order[:, half].reshape(64, 64), same)
        lanes = [32 * (m // 16) + 16 * half + m % 16 for m in range(64)]
        assert lanes_of(64, half).tolist() == lanes


def test_16_bit_metadata_lies_as_ptx_says():
    """lane = m % 8 + 8 * (k / 16) + 16 * (m / 16), bit k % 16 + 16 * (m / 8 % 2)."""
    order = order_of_tile(16)
    for m, k in ((0, 0), (5, 12), (9, 20), (40, 63), (127, 124)):
        step, within = divmod(k, 32)
        first, selector = metadata_of(step, 16)
        lane = m % 8 + 8 * (within // 16) + 16 * (m // 16)
        bit = within // 4 * 4 % 16 + 16 * (m // 8 % 2)
        index = 16 * (first + selector) + bit // 2
        assert order[lane, index] == m * 64 + k // 4 * 2


def test_32_bit_metadata_lies_as_ptx_says():
    """lane m % 8 + 8 * (k / 8) + 16 * (m / 16), bit 2 * (k % 8) + 16 * (m / 8 % 2)."""
    order = order_of_tile(32)
    for m, k in ((0, 0), (5, 12), (9, 20), (40, 62), (127, 34)):
        step, within = divmod(k, 16)
        first, selector = metadata_of(step, 32)
        lane = m % 8 + 8 * (within // 8) + 16 * (m // 16)
        bit = 2 * (within % 8) + 16 * (m // 8 % 2)
        index = 16 * (first + selector) + bit // 2
        assert order[lane, index] == m * 64 + k // 2 * 2


@pytest.mark.parametrize("bits", [4, 8])
def test_narrow_metadata_lies_in_the_lane_of_its_row(bits):
    order, group = order_of_tile(bits), 32 // bits
    for m, last in ((0, 0), (5, 15), (127, 31)):
        k = last * group
        step, within = divmod(k, 16 * group)
        first, selector = metadata_of(step, bits)
        assert selector == 0
        assert order[m, 16 * first + within // group * 2] == m * 64 + k // group * 2


def test_a_sparse_instruction_has_its_bit_and_mnemonic():
    dense = Instruction(128, 128, "f32", "f16", "f16")
    sparse = Instruction(128, 128, "f32", "f16", "f16", sparse=True)
    assert sparse.descriptor == 0x08200014 == dense.descriptor | 4
    assert sparse.mnemonic == "tcgen05.mma.sp.cta_group::1.kind::f16"
