# SPDX-License-Identifier: Apache-2.0
"""Boxes that consist of given elements of an array."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from pallas_gpu.emulator.engine.ordering import Box


def boxes_of(positions: np.ndarray, shape: tuple[int, ...]) -> Iterator[Box]:
    """Yields boxes that contain some elements of an array, and no others.

    Args:
      positions: of the elements in row-major order, sorted, each once.
      shape: of the array.
    """
    if not positions.size:
        return
    if not shape:
        yield ()
        return
    places = np.stack(np.unravel_index(positions, shape), axis=1)
    low, high = places.min(axis=0), places.max(axis=0) + 1
    if math.prod((high - low).tolist()) == positions.size:
        yield _box(low, high)
        return
    # Runs along the last axis.
    breaks = np.flatnonzero((np.diff(positions) != 1) | (np.diff(places[:, -1]) != 1))
    firsts = np.concatenate([[0], breaks + 1])
    lasts = np.concatenate([breaks, [positions.size - 1]])
    for first, last in zip(firsts, lasts, strict=True):
        yield _box(places[first], places[last] + 1)


def _box(low: Any, high: Any) -> Box:
    return tuple((int(a), int(b)) for a, b in zip(low, high, strict=True))
