# SPDX-License-Identifier: Apache-2.0
"""The layout of a broadcast that nothing else determines: registers are repeated."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from pallas_gpu.layouts.registers.linear import Coordinate, LinearLayout


def broadcast_layout(
    operand: LinearLayout, shape: Sequence[int], dims: Sequence[int], bits: int
) -> LinearLayout:
    """Returns the layout in which each thread keeps the elements that it repeats.

    Args:
      operand: the layout of what is repeated; its axis i is axis `dims[i]`.
      shape: of the result.
      dims: see `operand`.
      bits: width of an element: as many as are consecutive in the result, and are
        copies of one element, are one register of at most 128 bits.
    """
    shape, dims = tuple(shape), tuple(dims)
    new = [
        axis
        for axis, size in enumerate(shape)
        if axis not in dims or operand.shape[dims.index(axis)] != size
    ]
    last = len(shape) - 1
    length, axis, vector = operand.vector_length, 0, operand.vector_length > 1
    if last in new:
        length, axis, vector = math.gcd(shape[last], 128 // bits), last, False
    elif vector:
        axis = dims[operand.vector_axis]

    def widened(coordinate: Coordinate) -> list[int]:
        result = [0] * len(shape)
        for d, c in zip(dims, coordinate, strict=True):
            result[d] = c
        return result

    origins = []
    for origin in operand.origins if vector else _elements(operand):
        starts = [[c] for c in widened(origin)]
        for a in new:
            starts[a] = list(range(0, shape[a], length if a == last else 1))
        origins += list(itertools.product(*starts))
    columns = [widened(column) for column in operand.thread_columns]
    return LinearLayout.create(shape, columns, origins, length, axis)


def _elements(layout: LinearLayout) -> Iterator[Coordinate]:
    """The coordinates of a thread's elements that are inside of the shape."""
    for origin in layout.origins:
        for i in range(layout.vector_length):
            at = tuple(c + i * (a == layout.vector_axis) for a, c in enumerate(origin))
            if all(c < size for c, size in zip(at, layout.shape, strict=True)):
                yield at
