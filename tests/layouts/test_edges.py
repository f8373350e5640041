# SPDX-License-Identifier: Apache-2.0
"""Vectors that masks cut: each element that a mask has is accessed exactly once."""

from __future__ import annotations

import itertools

import pytest

from pallas_gpu.layouts.edges import Edges, cut


def patterns(edges, width):
    """All bools of an aligned vector that change as stated."""
    for bits in itertools.product([False, True], repeat=width):
        steps = [(i, bits[i]) for i in range(1, width) if bits[i] != bits[i - 1]]
        if edges is None or all(edges[not to] >> i & 1 for i, to in steps):
            yield bits


def accessed(found, bits):
    """How often each element is accessed."""
    whole = bool(found.every) and all(bits[i] for i in found.every)
    counts = [int(whole)] * len(bits)
    for first, count in found.pieces:
        assert first % count == 0
        for i in range(first, first + count):
            counts[i] += bits[first] and not whole
    return counts


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_what_a_mask_has_is_accessed_once(width):
    places = [sum(1 << i for i in x) for x in ([], [1], [3], [2, 5], [4], range(8))]
    stated = [Edges(*pair) for pair in itertools.product(places, repeat=2)]
    for edges in (None, *stated):
        found = cut(edges, width)
        for bits in patterns(edges and edges.within(width), width):
            assert accessed(found, bits) == list(map(int, bits)), (edges, bits)
            assert any(bits[i] for i in found.some) == any(bits)


@pytest.mark.parametrize(
    ("edges", "pieces"),
    [
        (None, [(i, 1) for i in range(8)]),
        (Edges.at(127, 0, falls=True), [(0, 4), (4, 2), (6, 1)]),
        (Edges.at(1, 16, falls=False), [(1, 1), (2, 2), (4, 4)]),
        (Edges.at(7, 1, falls=True), [(i, 1) for i in range(7)]),
        (Edges.at(24, 8, falls=False), [(0, 8)]),
    ],
)
def test_pieces_are_as_wide_as_the_mask_is_the_same(edges, pieces):
    found = cut(edges, 8)
    assert list(found.pieces) == pieces
    assert bool(found.every) == (edges is not None and len(pieces) > 1)
