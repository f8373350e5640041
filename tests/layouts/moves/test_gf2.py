# SPDX-License-Identifier: Apache-2.0
"""Vectors over GF(2)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pallas_gpu.layouts.moves.gf2 import Basis, combine, intersection, span

VECTORS = st.lists(st.integers(0, 63), max_size=8)


@given(VECTORS)
def test_coordinates_lead_back_to_the_vector(vectors):
    basis = Basis(vectors)
    assert len(span(basis.vectors)) == len(set(span(basis.vectors)))
    for vector in span(vectors):
        assert combine(basis.vectors, basis.coordinates(vector)) == vector


@given(VECTORS)
def test_sums_add_nothing_to_a_basis(vectors):
    basis = Basis(vectors)
    assert not any(basis.copy().add(vector) for vector in span(vectors))
    outside = set(range(64)) - set(span(vectors))
    assert not any(vector in basis for vector in outside)


@given(VECTORS, VECTORS)
def test_an_intersection_is_what_both_span(a, b):
    both = set(span(a)) & set(span(b))
    assert set(span(intersection(a, b, 6).vectors)) == both
