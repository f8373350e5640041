# SPDX-License-Identifier: Apache-2.0
"""The pieces of a multicast are equal runs of the slice's bytes."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pallas_gpu.layouts import SmemLayout
from pallas_gpu.layouts.smem.pieces import pieces


@st.composite
def slices(draw):
    tile = draw(st.sampled_from([(1, 1), (2, 4), (1, 3), (1, 1, 1), (1, 2, 2)]))
    sizes = tuple(draw(st.integers(1, 4)) * t for t in tile)
    total = math.prod(sizes)
    count = draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
    return sizes, tile, count


@given(slices())
def test_each_piece_is_one_range_of_bytes(case):
    sizes, tile, count = case
    layout = SmemLayout(sizes, 8, tile)
    share = math.prod(sizes) // count
    for i, boxes in enumerate(pieces(sizes, tile, count)):
        found = [
            layout.byte_offset(index)
            for box in boxes
            for index in itertools.product(*(range(s, s + n) for s, n in box))
        ]
        assert sorted(found) == list(range(i * share, (i + 1) * share))


def test_rows_that_divide_evenly_are_one_box():
    (first, second) = pieces((4, 8), (1, 1), 2)
    assert first == (((0, 2), (0, 8)),)
    assert second == (((2, 2), (0, 8)),)
    assert np.shape(pieces((1, 8, 4), (1, 1, 1), 2)) == (2, 1, 3, 2)
