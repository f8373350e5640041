# SPDX-License-Identifier: Apache-2.0
"""Chunks of copies by threads: adjacent and aligned in both memories, and all of it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_gpu.layouts import SmemLayout
from pallas_gpu.layouts.gmem.thread_copy import plan_threads
from pallas_gpu.layouts.window import Window

TILINGS = [(None, 16), ((8, 16), 16), ((8, 8), 32), ((8, 16), 64), ((4,), 16)]


@st.composite
def copies(draw):
    """A slice of GMEM, a layout of SMEM, a slice of it, and the direction."""
    bits = draw(st.sampled_from([8, 16, 32, 64]))
    tiling, swizzle = draw(st.sampled_from(TILINGS))
    if tiling is not None and swizzle != 16 and tiling[-1] * bits != 8 * swizzle:
        swizzle = 16
    sizes = draw(st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 20)))
    rank = 3
    around = [
        draw(st.tuples(st.integers(0, 5), st.integers(0, 9))) for _ in range(rank)
    ]
    gmem = Window.whole(
        [a + n + b for n, (a, b) in zip(sizes, around, strict=True)]
    ).slice([a for a, _ in around], sizes)
    tile = (1,) * (rank - len(tiling or ())) + (tiling or ())
    before = [draw(st.integers(0, 4)) for _ in range(rank)]
    shape = [-(-(a + n) // t) * t for a, n, t in zip(before, sizes, tile, strict=True)]
    smem = Window.whole(shape).slice(before, sizes)
    order = draw(st.permutations(range(rank))) if draw(st.booleans()) else range(rank)
    if list(order) != list(range(rank)):
        # The same axes in another order on one side only would have another shape.
        gmem, smem = gmem.transpose(order), smem.transpose(order)
    return gmem, SmemLayout(tuple(shape), bits, tiling, swizzle), smem


def places(plan, gmem, layout, smem):
    """For each chunk the bytes of its elements in GMEM and in SMEM."""
    item = layout.itemsize_bits // 8
    strides = np.array(gmem.array_strides)
    shape = gmem.shape
    for chunk in itertools.product(*map(range, plan.counts)):
        first = list(chunk)
        first[-1] *= plan.chunk_elems
        elements = []
        for i in range(plan.chunk_elems):
            at = [*first[:-1], first[-1] + i]
            if plan.is_line:
                at = list(np.unravel_index(at[0], shape))
            here, there = list(gmem.starts), list(smem.starts)
            for axis, index in enumerate(at):
                here[gmem.axes[axis]] += int(index)
                there[smem.axes[axis]] += int(index)
            elements.append((int(strides @ here) * item, layout.byte_offset(there)))
        yield elements


@settings(max_examples=60, deadline=None)
@given(copies(), st.booleans())
def test_chunks_are_adjacent_and_aligned_and_cover_the_slice_once(copy, store):
    gmem, layout, smem = copy
    plan = plan_threads(gmem, layout, smem, store=store)
    item = layout.itemsize_bits // 8
    seen = []
    for elements in places(plan, gmem, layout, smem):
        for side in zip(*elements, strict=True):
            assert side[0] % plan.chunk_bytes == 0
            assert list(side) == [side[0] + i * item for i in range(len(side))]
        seen += [a for a, _ in elements]
    assert plan.chunk_bytes == plan.chunk_elems * item
    assert len(set(seen)) == len(seen) == math.prod(gmem.shape)


@pytest.mark.parametrize(
    ("shape", "starts", "sizes", "width"),
    [
        ((64, 3), (4, 0), (32, 3), 16),
        ((64, 6), (1, 2), (32, 4), 8),
        ((64, 33), (1, 2), (32, 8), 4),
        ((64, 64), (1, 4), (32, 8), 16),
    ],
)
def test_chunks_are_as_wide_as_the_slices_admit(shape, starts, sizes, width):
    gmem = Window.whole(shape).slice(starts, sizes)
    plan = plan_threads(gmem, SmemLayout(sizes, 32), Window.whole(sizes), store=False)
    assert plan.chunk_bytes == width


@pytest.mark.parametrize(("bits", "width", "is_cut"), [(16, 16, True), (4, 1, False)])
def test_a_store_over_the_edge_cuts_chunks_of_whole_bytes(bits, width, is_cut):
    gmem = Window.whole((10,)).slice((8,), (16,))
    layout, smem = SmemLayout((16,), bits), Window.whole((16,))
    plan = plan_threads(gmem, layout, smem, store=True)
    assert (plan.chunk_bytes, plan.is_cut) == (width, is_cut)
