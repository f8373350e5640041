# SPDX-License-Identifier: Apache-2.0
"""Equal pieces of a slice of SMEM, as the CTAs of a multicast share a copy.

The instructions of a copy are ordered by address, so each CTA copies a range of the
slice's bytes. In logical indices that is one box or several.
"""

from __future__ import annotations

import functools
import math

# For each axis the start and the size.
Box = tuple[tuple[int, int], ...]


@functools.lru_cache(maxsize=1024)
def pieces(
    sizes: tuple[int, ...], tile: tuple[int, ...], count: int
) -> tuple[tuple[Box, ...], ...]:
    """Returns for each piece its boxes, relative to the slice's start.

    Args:
      sizes: of the slice on each axis of its array, whole tiles.
      tile: size of a tile on each axis.
      count: number of pieces; it divides the number of elements.

      >>> pieces((3, 8), (1, 1), 2)[0]
      (((0, 1), (0, 8)), ((1, 1), (0, 4)))
    """
    physical = (*(n // t for n, t in zip(sizes, tile, strict=True)), *tile)
    share = math.prod(sizes) // count
    return tuple(
        tuple(
            _logical(box, tile) for box in _boxes(physical, i * share, (i + 1) * share)
        )
        for i in range(count)
    )


def _boxes(shape: tuple[int, ...], low: int, high: int) -> list[Box]:
    """Divides a range of the elements of a row-major array into boxes."""
    if not shape:
        return [()]
    inner = shape[1:]
    row = math.prod(inner)
    (first, head), (last, tail) = divmod(low, row), divmod(high, row)
    if first == last:
        return [((first, 1), *box) for box in _boxes(inner, head, tail)]
    found: list[Box] = []
    if head:
        found += [((first, 1), *box) for box in _boxes(inner, head, row)]
        first += 1
    if first < last:
        found.append(((first, last - first), *((0, n) for n in inner)))
    if tail:
        found += [((last, 1), *box) for box in _boxes(inner, 0, tail)]
    return found


def _logical(box: Box, tile: tuple[int, ...]) -> Box:
    """Returns a box of whole tiles, or of a part of one tile, in logical indices."""
    tiles, within = box[: len(tile)], box[len(tile) :]
    return tuple(
        (number * t + start, (count - 1) * t + size)
        for (number, count), (start, size), t in zip(tiles, within, tile, strict=True)
    )
