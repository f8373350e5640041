# SPDX-License-Identifier: Apache-2.0
"""Costs: what is narrow, scattered or in conflict costs more."""

from __future__ import annotations

import pytest

from pallas_gpu.layouts import SmemLayout, WGStridedLayout
from pallas_gpu.layouts.moves.costs import (
    gmem_access_cost,
    relayout_cost,
    smem_access_cost,
)
from pallas_gpu.layouts.registers import catalogue

SHAPE = (128, 128)
WGMMA = catalogue.WGMMA.linear(SHAPE)
ROWS = WGStridedLayout(SHAPE, 4).linear()


@pytest.mark.parametrize("store", [False, True])
def test_swizzled_smem_is_cheaper_for_wgmma_than_plain_rows(store):
    swizzled = SmemLayout(SHAPE, 16, (8, 64), 128)
    tiled = smem_access_cost(swizzled, SHAPE, WGMMA, 16, store)
    plain = smem_access_cost(SmemLayout(SHAPE, 16), SHAPE, WGMMA, 16, store)
    # 32 KiB in wavefronts of 128 bytes.
    assert tiled == 256
    assert plain > tiled


def test_smem_that_no_plan_reaches_has_no_cost():
    assert smem_access_cost(SmemLayout((64, 64), 16), (64, 64), WGMMA, 16, True) is None


def test_a_bool_is_converted_on_the_way():
    flags = WGStridedLayout((1024,), 4).linear()
    smem = SmemLayout((1024,), 8)
    as_bool = smem_access_cost(smem, (1024,), flags, 1, False)
    assert as_bool > smem_access_cost(smem, (1024,), flags, 8, False)


def test_gmem_costs_more_in_narrow_and_in_scattered_accesses():
    wide = gmem_access_cost(SHAPE, (128, 1), ROWS, 32)
    narrow = gmem_access_cost(SHAPE, (128, 1), WGStridedLayout(SHAPE, 1).linear(), 32)
    scattered = gmem_access_cost(SHAPE, (1, 128), ROWS, 32)
    unaligned = gmem_access_cost(SHAPE, (128, 1), ROWS, 32, base_divisor_elems=1)
    assert wide < narrow < unaligned < scattered
    # 64 KiB at 64 bytes a cycle, and 32 instructions of four warps.
    assert wide == 1024 + 128


def test_impossible_accesses_and_relayouts_have_no_cost():
    odd = WGStridedLayout((384, 3), 1)
    assert gmem_access_cost((384, 3), (1, 384), odd, 32) is None
    assert gmem_access_cost((64, 64), (64, 1), WGMMA, 32) is None
    assert relayout_cost(WGMMA, odd, 32) is None


def test_no_relayout_is_cheaper_than_shuffles_and_these_than_all_of_smem():
    transposed = catalogue.WGMMA_TRANSPOSED.linear(SHAPE)
    assert relayout_cost(WGMMA, WGMMA, 16) == 0
    by_shuffles = relayout_cost(WGMMA, transposed, 16)
    assert 0 < by_shuffles < relayout_cost(ROWS, transposed, 16)
    assert relayout_cost(WGMMA, transposed, 1) > relayout_cost(WGMMA, transposed, 8)
