# SPDX-License-Identifier: Apache-2.0
"""Where masks change along an axis, and the parts of a vector that a mask cuts."""

from __future__ import annotations

import math
from typing import NamedTuple

# The most elements of an access: 16 bytes (PTX ISA, ld: .v4 of 32 bits).
_WINDOW = 16


class Edges(NamedTuple):
    """Where bools may change along an axis, which they do at few indices.

    Attributes:
      rises: indices modulo 16, as bits, of elements that may be True after a False one.
      falls: of those that may be False after a True one.
    """

    rises: int = 0
    falls: int = 0

    @classmethod
    def at(cls, index: int, modulus: int, falls: bool) -> Edges:
        """Returns one change at an index that is known modulo a number, or 0: known."""
        step = math.gcd(modulus, _WINDOW)
        places = sum(1 << i for i in range(index % step, _WINDOW, step))
        return cls(0, places) if falls else cls(places, 0)

    def union(self, other: Edges) -> Edges:
        """Returns the changes of both."""
        return Edges(self.rises | other.rises, self.falls | other.falls)

    def inverted(self) -> Edges:
        """Returns the changes of the negation."""
        return Edges(self.falls, self.rises)

    def unsigned(self) -> Edges:
        """Returns the changes of a function that may invert the elements."""
        return self.union(self.inverted())

    def within(self, width: int) -> Edges:
        """Returns the changes inside of aligned vectors, at indices of a vector."""
        inner = [
            sum(
                1 << i
                for i in range(1, width)
                if any(places >> j & 1 for j in range(i, _WINDOW, width))
            )
            for places in self
        ]
        return Edges(*inner)


class Cut(NamedTuple):
    """How a vector is accessed of which a mask has some elements.

    Attributes:
      pieces: first element and number of parts in which the mask is the same: those
        that the mask can have without having the whole vector.
      every: elements that the mask has if and only if it has the whole vector; () if it
        is accessed in pieces in any case.
      some: elements of which the mask has one if and only if it has any of the vector.
    """

    pieces: tuple[tuple[int, int], ...]
    every: tuple[int, ...]
    some: tuple[int, ...]


def cut(edges: Edges | None, width: int) -> Cut:
    """Returns the accesses to aligned vectors of so many elements, a power of two.

    Args:
      edges: where the mask changes; None if it may change with each element.
    """
    if edges is None:
        singles = tuple(range(width))
        return Cut(tuple((i, 1) for i in singles), (), singles)
    rises, falls = edges.within(width)
    starts = [i for i in range(width) if i == 0 or (rises | falls) >> i & 1]
    runs = list(zip(starts, [*starts[1:], width], strict=True))
    every = some = tuple(starts)
    if len(runs) == 1:
        every = ()
    elif not rises:
        # Who has the last element has all before it.
        runs, every, some = runs[:-1], every[-1:], some[:1]
    elif not falls:
        runs, every, some = runs[1:], every[:1], some[-1:]
    pieces = [piece for start, end in runs for piece in _aligned(start, end)]
    return Cut(tuple(pieces), every, some)


def _aligned(start: int, end: int) -> list[tuple[int, int]]:
    """A range in parts that are powers of two and start at multiples of their size."""
    result = []
    while start < end:
        size = 1
        while start % (2 * size) == 0 and start + 2 * size <= end:
            size *= 2
        result.append((start, size))
        start += size
    return result
