# SPDX-License-Identifier: Apache-2.0
"""Linear algebra over GF(2): vectors are Python integers, a bit per coordinate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Basis:
    """Independent vectors in the order they were added.

    >>> basis = Basis([0b011, 0b110])
    >>> basis.coordinates(0b101)
    3
    >>> basis.add(0b101)
    False
    """

    def __init__(self, vectors: Iterable[int] = ()) -> None:
        self.vectors: list[int] = []
        # By the top bit of each row: the row, and the mask of the vectors it sums.
        self._rows: dict[int, tuple[int, int]] = {}
        for vector in vectors:
            self.add(vector)

    def __len__(self) -> int:
        return len(self.vectors)

    def __contains__(self, vector: int) -> bool:
        return not self._reduce(vector)[0]

    def _reduce(self, vector: int) -> tuple[int, int]:
        used = 0
        while vector and (row := self._rows.get(vector.bit_length())):
            vector ^= row[0]
            used ^= row[1]
        return vector, used

    def add(self, vector: int) -> bool:
        """Adds a vector; returns False, without adding it, if it is dependent."""
        rest, used = self._reduce(vector)
        if not rest:
            return False
        self._rows[rest.bit_length()] = (rest, used ^ 1 << len(self.vectors))
        self.vectors.append(vector)
        return True

    def coordinates(self, vector: int) -> int:
        """The mask of the basis vectors that sum to the vector."""
        rest, used = self._reduce(vector)
        assert not rest, "the vector is not in the span"
        return used

    def copy(self) -> Basis:
        """An independent copy."""
        return Basis(self.vectors)


def combine(vectors: Sequence[int], mask: int) -> int:
    """The sum of the vectors whose bits are set in the mask."""
    result = 0
    for i, vector in enumerate(vectors):
        if mask >> i & 1:
            result ^= vector
    return result


def span(vectors: Sequence[int]) -> list[int]:
    """All sums; entry i is the sum of the vectors whose bits are set in i."""
    result = [0]
    for vector in vectors:
        result += [x ^ vector for x in result]
    return result


def intersection(a: Iterable[int], b: Iterable[int], bits: int) -> Basis:
    """The intersection of two spans.

    Args:
      bits: an upper bound of the vectors' lengths in bits.
    """
    # Zassenhaus: rows (x, x) and (y, 0); the second halves of rows whose first is zero.
    rows: dict[int, int] = {}
    found = Basis()
    for vector in [*(x << bits | x for x in a), *(y << bits for y in b)]:
        while vector and (row := rows.get(vector.bit_length())):
            vector ^= row
        if vector >> bits:
            rows[vector.bit_length()] = vector
        elif vector:
            found.add(vector)
            rows[vector.bit_length()] = vector
    return found
