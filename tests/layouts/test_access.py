# SPDX-License-Identifier: Apache-2.0
"""Access plans, run on a model of shared memory and of the instructions."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts import (
    AccessPlan,
    Layout,
    LinearLayout,
    SmemLayout,
    WGStridedLayout,
    catalogue,
    plan_access,
)
from pallas_gpu.layouts.access import _bit_offsets

NOTHING = -1


class Memory:
    """Shared memory in units of four bits, each holding the id of one."""

    def __init__(self, smem: SmemLayout):
        self.nibbles = np.full(2 * smem.size_bytes, NOTHING)

    def run(self, address: np.ndarray, width_bytes: int) -> np.ndarray:
        """Indices of the nibbles of accesses [...]: [..., 2 * width]."""
        return 2 * address[..., None] + np.arange(2 * width_bytes)


def expected_memory(layout, smem: SmemLayout, window: tuple[int, ...]) -> np.ndarray:
    """What memory holds when every element lies where SmemLayout says."""
    ids = register_nibbles(layout, smem.itemsize_bits)
    offsets, _ = _bit_offsets(layout, smem, window)
    per = smem.itemsize_bits // 4
    nibble = offsets[..., None] // 4 + np.arange(per)
    byte, rest = np.divmod(nibble.reshape(ids.shape), 2)
    # Swizzling moves whole bytes.
    from pallas_gpu.layouts.swizzle import swizzle_bytes

    memory = np.full(2 * smem.size_bytes, NOTHING)
    memory[2 * swizzle_bytes(byte, smem.swizzle) + rest] = ids
    return memory


def register_nibbles(layout, bits: int) -> np.ndarray:
    """Ids of what the threads hold: [128, registers, vector * nibbles per element]."""
    coordinates = layout.all_coordinates()
    shape = layout.shape
    flat = np.ravel_multi_index(tuple(np.moveaxis(coordinates, -1, 0)), shape)
    per = bits // 4
    ids = flat[..., None] * per + np.arange(per)
    return ids.reshape(*flat.shape[:2], -1)


def exchange(plan: AccessPlan, values: np.ndarray) -> np.ndarray:
    """Applies the staggers to [128, accesses, ...]."""
    values = values.copy()
    threads = np.arange(128)
    for stagger in plan.staggers:
        rows = threads[(threads >> stagger.thread_bit) & 1 == 1]
        for a, b in stagger.pairs:
            values[rows, a], values[rows, b] = values[rows, b], values[rows, a]
    return values


def places(plan: AccessPlan) -> np.ndarray:
    """Which nibbles each access of each thread touches: [128, accesses, nibbles]."""
    address = plan.addresses()
    if plan.method == "vector":
        assert plan.instructions == tuple((i,) for i in range(len(plan.accesses)))
        return 2 * address[..., None] + np.arange(2 * plan.width_bytes)
    lane = np.arange(128) % 32
    warp = np.arange(128) // 32
    result = np.zeros((128, len(plan.accesses), 8), dtype=np.int64)
    for i, group in enumerate(plan.instructions):
        for matrix, access in enumerate(group):
            if plan.transpose:
                first = address[warp * 32 + matrix * 8 + 2 * (lane % 4), i]
                second = address[warp * 32 + matrix * 8 + 2 * (lane % 4) + 1, i]
                pair = np.stack([first, second], axis=-1) + 2 * (lane // 4)[:, None]
                nibbles = 2 * pair[..., None] + np.arange(4)
            else:
                row = address[warp * 32 + matrix * 8 + lane // 4, i]
                nibbles = 2 * (row + 4 * (lane % 4))[:, None] + np.arange(8)
            result[:, access] = nibbles.reshape(128, 8)
    return result


def run_load(plan: AccessPlan, memory: np.ndarray, like: np.ndarray) -> np.ndarray:
    return exchange(plan, memory[places(plan)]).reshape(like.shape)


def run_store(plan: AccessPlan, values: np.ndarray, size: int) -> np.ndarray:
    memory = np.full(size, NOTHING)
    threads = np.arange(128)
    active = np.ones(128, dtype=bool)
    for bit in plan.predicate_bits:
        active &= (threads >> bit) & 1 == 0
    accesses = values.reshape(128, len(plan.accesses), -1)
    memory[places(plan)[active]] = exchange(plan, accesses)[active]
    return memory


def check(layout, smem: SmemLayout, window=None, **options) -> AccessPlan:
    """Plans a load and a store, runs both, returns the load's plan."""
    window = window or smem.shape
    memory = expected_memory(layout, smem, window)
    values = register_nibbles(layout, smem.itemsize_bits)
    load = plan_access(layout, smem, kind="load", window=window, **options)
    np.testing.assert_array_equal(run_load(load, memory, values), values)
    store = plan_access(layout, smem, kind="store", window=window, **options)
    stored = run_store(store, values, len(memory))
    np.testing.assert_array_equal(stored, memory)
    return load


def tiled(shape: tuple[int, ...], bits: int, swizzle: int) -> SmemLayout:
    return SmemLayout(shape, bits, (8, swizzle * 8 // bits), swizzle)


FIXED = [
    member.to_layout()
    for member in Layout
    if member.name
    in {
        "WGMMA",
        "WGMMA_ACC_32BIT",
        "WGMMA_8BIT",
        "WGMMA_UPCAST_2X",
        "WGMMA_UPCAST_4X",
        "WGMMA_TRANSPOSED",
        "TCGEN05",
        "TCGEN05_TRANSPOSED",
        "TCGEN05_TMEM_NATIVE",
        "MMA_ACC",
    }
]


@pytest.mark.parametrize("swizzle", [32, 64, 128])
@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("layout", FIXED, ids=str)
def test_every_catalogue_layout_reaches_every_swizzled_ref(
    layout, bits, swizzle, transposed
):
    linear = layout.linear((128, 128))
    if transposed:
        linear = linear.transpose((1, 0))
    check(linear, tiled((128, 128), bits, swizzle), optimized=False)
