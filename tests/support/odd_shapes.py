# SPDX-License-Identifier: Apache-2.0
"""Shapes of any sizes, for Hypothesis, and a few that tests list by name."""

from __future__ import annotations

from hypothesis import strategies as st

# Primes, one more and one less than powers of two, several axes, unit axes.
ODD_SHAPES = [
    (129,),
    (1001,),
    (5000,),
    (1, 5000),
    (100, 77),
    (65, 3),
    (2, 1001),
    (3, 5, 7, 11),
]


@st.composite
def shapes(draw, *, most: int = 65536, rank: int = 4) -> tuple[int, ...]:
    """A shape of 1 to `most` elements and up to `rank` axes."""
    result: list[int] = []
    left = most
    for _ in range(draw(st.integers(1, rank))):
        size = draw(st.integers(1, left))
        result.append(size)
        left //= size
    return tuple(draw(st.permutations(result)))
