# SPDX-License-Identifier: Apache-2.0
"""TMA plans, run on a model of the tensor copy, against slicing with zero fill."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts import SmemLayout, TmaPlan, plan_copy
from tests.support import tma_copies

DTYPES = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
UNWRITTEN = 0xEE


def numbered(shape: tuple[int, ...], bits: int) -> np.ndarray:
    """An array whose elements differ and are not zero, as far as the width allows."""
    top = min(2**bits - 1, 2**31)
    flat = np.arange(math.prod(shape), dtype=np.uint64) * 40503 % np.uint64(top) + 1
    return flat.astype(DTYPES[bits]).reshape(shape)


def window_coordinates(slice_shape, starts):
    grid = np.stack(
        np.meshgrid(*(np.arange(s) for s in slice_shape), indexing="ij"), axis=-1
    ).reshape(-1, len(slice_shape))
    return grid, grid + np.array(starts)


def expected_smem(gmem, slice_shape, squeezed, smem: SmemLayout, starts) -> np.ndarray:
    grid, at = window_coordinates(slice_shape, starts)
    inside = ((at >= 0) & (at < np.array(gmem.shape))).all(axis=1)
    safe = np.where(inside[:, None], at, 0)
    values = np.where(inside, gmem[tuple(safe.T)], 0).astype(gmem.dtype)
    kept = [g for g in range(gmem.ndim) if g not in squeezed]
    item = gmem.dtype.itemsize
    offsets = smem.byte_offsets(grid[:, kept])[:, None] + np.arange(item)
    result = np.full(smem.size_bytes, UNWRITTEN, dtype=np.uint8)
    result[offsets] = values.view(np.uint8).reshape(-1, item)
    return result


def check_load(gmem_shape, bits, slice_shape, squeezed, smem, starts, **known):
    gmem = numbered(gmem_shape, bits)
    plan = plan_copy(gmem_shape, bits, slice_shape, squeezed, smem, **known)
    check_limits(plan)
    wanted = expected_smem(gmem, slice_shape, squeezed, smem, starts)
    np.testing.assert_array_equal(tma_copies.load(plan, gmem, starts), wanted)
    return plan


def check_limits(plan: TmaPlan) -> None:
    assert len(plan.dims) <= 5
    assert all(1 <= d.box <= 256 for d in plan.dims)
    assert all(d.stride_bytes % 16 == 0 for d in plan.dims[:-1])
    assert all(0 < d.stride_bytes < 2**40 for d in plan.dims[:-1])
    assert plan.dims[-1].stride_elems == 1
    inner_bytes = plan.dims[-1].box * plan.element_bits // 8
    assert inner_bytes % 16 == 0
    assert plan.swizzle == 16 or inner_bytes == plan.swizzle
    if len(plan.instructions) > 1:
        assert all(i.smem_offset_bytes % 128 == 0 for i in plan.instructions)
    assert plan.box_bytes * len(plan.instructions) == plan.smem_bytes


def tiled(shape, bits, swizzle):
    return SmemLayout(shape, bits, (8, swizzle * 8 // bits), swizzle)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_tiled_load_equals_slicing_with_zero_fill(data):
    draw = data.draw
    bits = draw(st.sampled_from([8, 16, 32]))
    swizzle = draw(st.sampled_from([16, 32, 64, 128]))
    minor = swizzle * 8 // bits
    row_tiles, column_tiles = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    rows, columns = 8 * row_tiles, minor * column_tiles
    unit = 128 // bits
    gmem = (
        draw(st.integers(1, 3)),
        draw(st.sampled_from([rows, 2 * rows, rows - 3, 2 * rows + 5])),
        draw(st.sampled_from([columns, 2 * columns, columns + unit])),
    )
    exact = draw(st.booleans())
    steps = (1, 8, minor) if exact else (1, 1, 1)
    starts = (
        draw(st.integers(0, gmem[0] - 1)),
        steps[1] * draw(st.integers(0, 2)),
        steps[2] * draw(st.integers(0, 2)),
    )
    smem = tiled((rows, columns), bits, swizzle)
    known = {"start_multiples": steps}
    check_load(gmem, bits, (1, rows, columns), (0,), smem, starts, **known)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_an_untiled_load_equals_slicing_with_zero_fill(data):
    draw = data.draw
    bits = draw(st.sampled_from([8, 16, 32, 64]))
    unit = 128 // bits
    rank = draw(st.integers(1, 4))
    minor = draw(st.sampled_from([unit, 3 * unit, 16 * unit, 40 * unit]))
    lead = tuple(draw(st.integers(1, 5)) for _ in range(rank - 1))
    slice_shape = (*lead, minor)
    gmem = (
        *(s + draw(st.integers(0, 3)) for s in lead),
        minor + unit * draw(st.integers(0, 2)),
    )
    starts = tuple(draw(st.integers(0, max(0, g))) for g in gmem)
    smem = SmemLayout(slice_shape, bits)
    try:
        check_load(gmem, bits, slice_shape, (), smem, starts)
    except LayoutError:
        # Several boxes of fewer than 128 bytes have no legal place in SMEM.
        assert minor > 256


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_store_writes_what_lies_inside_and_nothing_else(data):
    draw = data.draw
    bits = draw(st.sampled_from([16, 32]))
    minor = 128 * 8 // bits
    rows, columns = 16, minor * draw(st.integers(1, 2))
    shape = (draw(st.integers(5, 40)), columns + draw(st.sampled_from([0, 8, minor])))
    starts = (draw(st.integers(0, 30)), draw(st.sampled_from([0, 8, minor])))
    smem = tiled((rows, columns), bits, 128)
    plan = plan_copy(shape, bits, (rows, columns), (), smem)
    block = numbered((rows, columns), bits)
    held = expected_smem(block, block.shape, (), smem, (0, 0))
    before = np.zeros(shape, block.dtype)
    wanted = before.copy()
    part = wanted[starts[0] : starts[0] + rows, starts[1] : starts[1] + columns]
    part[...] = block[: part.shape[0], : part.shape[1]]
    np.testing.assert_array_equal(tma_copies.store(plan, held, before, starts), wanted)


COLUMN, SQUARE = tiled((128, 64), 16, 128), tiled((128, 128), 16, 128)
VECTOR = SmemLayout((4096,), 32)
STEPS = {"start_multiples": (8, 64)}
# The array, what is in SMEM, starts, what is known; boxes, and how many of them.
PLANS = {
    "a column of tiles": ((509, 520), COLUMN, (450, 3), {}, [128, 64], 1),
    "known starts": ((256, 192), SQUARE, (136, 64), STEPS, [16, 2, 8, 64], 1),
    "inside": ((261, 200), SQUARE, (133, 72), {"inside": (True, True)}, None, 1),
    "ragged rows": ((250, 256), SQUARE, (128, 128), STEPS, [2, 8, 64], 16),
    "a vector": ((8192,), VECTOR, (4096,), {"start_multiples": (4096,)}, None, 1),
    "an odd vector": ((8191,), VECTOR, (4095,), {}, None, 16),
    "whole rows of an odd length": (
        (100, 7),
        SmemLayout((64, 7), 32),
        (40, 0),
        {"start_multiples": (1, 0)},
        [224],
        2,
    ),
    "whole rows from a known start": (
        (1024, 6),
        SmemLayout((128, 6), 32),
        (384, 0),
        {"start_multiples": (128, 0)},
        [3, 256],
        1,
    ),
    "pieces": ((512, 512), COLUMN, (64, 64), {"pieces": 4}, None, 4),
}


@pytest.mark.parametrize("case", PLANS)
def test_a_plan_has_few_copies(case):
    shape, smem, starts, known, boxes, count = PLANS[case]
    bits = smem.itemsize_bits
    plan = check_load(shape, bits, smem.shape, (), smem, starts, **known)
    assert len(plan.instructions) == count
    assert boxes is None or [d.box for d in plan.dims] == boxes


def test_integer_indexed_dimensions_share_a_view_dim_beyond_rank_five():
    shape = (2, 3, 4, 3, 16, 64)
    smem = tiled((16, 64), 16, 128)
    plan = check_load(
        shape, 16, (1, 1, 1, 1, 16, 64), (0, 1, 2, 3), smem, (1, 2, 3, 1, 0, 0)
    )
    assert len(plan.dims) == 5


@pytest.mark.parametrize(
    "window", [(1, 64, 64), (1, 128, 64), (1, 8, 128), (3, 64, 64)]
)
def test_a_window_leaves_the_rest_of_smem_alone(window):
    smem = tiled((3, 128, 128), 16, 128)
    bits, shape = 16, (3, 256, 256)
    gmem = numbered(shape, bits)
    known = (1, 8, 64)
    plan = plan_copy(
        shape, bits, window, (), smem, start_multiples=known, window=window
    )
    starts = (0, 128, 192)
    wanted = expected_smem(gmem, window, (), smem, starts)
    np.testing.assert_array_equal(tma_copies.load(plan, gmem, starts), wanted)


def test_a_window_may_have_axes_that_the_slice_lacks():
    smem = tiled((4, 64, 64), 16, 128)
    plan = plan_copy((64, 64), 16, (64, 64), (), smem, window=(1, 64, 64))
    assert [d.box for d in plan.dims] == [64, 64]
