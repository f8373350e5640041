# SPDX-License-Identifier: Apache-2.0
"""Cells: the parts of an array that have always been accessed as a whole.

On each axis the bounds of all boxes so far are multiples of the cells' size, so each
box consists of whole cells. A box that divides a cell makes all cells of the axis
smaller; that happens at most log2(size) times.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pallas_gpu.emulator.engine.ordering import Box

# Number of cells up to which a Python set is faster than NumPy.
_FEW = 256
# Number of boxes whose indices are remembered: the slots of a pipeline.
_INDICES = 64


class Cells:
    """Numbers that an array's cells store, in several layers; at first 0.

    Args:
      shape: of the array.
      layers: how many numbers each cell stores.

    Attributes:
      layers: the numbers, an array of cells for each layer.
    """

    __slots__ = ("_indices", "_shape", "_sizes", "layers")

    def __init__(self, shape: tuple[int, ...], layers: int):
        self._shape = shape
        # Of a cell, on each axis; 0 for all of it.
        self._sizes = [0] * len(shape)
        self._indices: dict[Box, tuple[Any, ...]] = {}
        self.layers = [np.zeros((1,) * len(shape), np.int32) for _ in range(layers)]

    def index(self, box: Box) -> tuple[Any, ...]:
        """Returns the index of a box's cells, which yields a view."""
        index = self._indices.get(box)
        if index is None:
            # This may divide cells, which changes the indices.
            index = self._find(box)
            if len(self._indices) >= _INDICES:
                self._indices.clear()
            self._indices[box] = index
        return index

    def _find(self, box: Box) -> tuple[Any, ...]:
        key: list[Any] = []
        for axis, (low, high) in enumerate(box):
            if low >= high:
                key.append(slice(0, 0))
                continue
            size = self._sizes[axis]
            end = 0 if high == self._shape[axis] else high
            if (low or end) and (not size or low % size or end % size):
                size = math.gcd(size, low, end)
                self._divide(axis, size)
            key.append(slice(low // size, -(-high // size)) if size else slice(0, 1))
        return (*key, ...)

    def _divide(self, axis: int, size: int) -> None:
        count, old = -(-self._shape[axis] // size), self._sizes[axis]
        parent = np.arange(count) * size // old if old else np.zeros(count, np.intp)
        self.layers = [layer.take(parent, axis) for layer in self.layers]
        self._sizes[axis] = size
        self._indices.clear()

    def numbers(self, layer: int, index: tuple[Any, ...]) -> set[int]:
        """Returns the numbers in some cells."""
        part = self.layers[layer][index]
        if part.size == 1:
            return {part.item()}
        if part.size <= _FEW:
            return set(part.ravel().tolist())
        first = part.flat[0]
        if (part == first).all():
            return {int(first)}
        return set(np.unique(part).tolist())

    def replace(
        self, layer: int, index: tuple[Any, ...], numbers: dict[int, int]
    ) -> None:
        """Replaces each number in some cells by another."""
        results = set(numbers.values())
        if len(results) == 1:
            self.layers[layer][index] = results.pop()
            return
        part = self.layers[layer][index]
        before = part.copy()
        for old, new in numbers.items():
            if old != new:
                part[before == old] = new

    def boxes(
        self, layer: int, index: tuple[Any, ...], number: int, box: Box
    ) -> list[Box]:
        """Returns the parts of a box whose cells store a number."""
        found = np.argwhere(self.layers[layer][index] == number)
        result = []
        for cell in found:
            part = []
            for axis, (low, high) in enumerate(box):
                size = self._sizes[axis] or self._shape[axis]
                start = (index[axis].start + int(cell[axis])) * size
                part.append((max(low, start), min(high, start + size)))
            result.append(tuple(part))
        return result

    def renumber(self) -> list[int]:
        """Numbers the stored numbers consecutively, from 0; returns them in order."""
        used = np.unique(
            np.concatenate([layer.ravel() for layer in self.layers] + [[0]])
        )
        # Of one without axes NumPy returns a number, not an array.
        self.layers = [
            np.asarray(np.searchsorted(used, layer), np.int32) for layer in self.layers
        ]
        return used.tolist()
