# SPDX-License-Identifier: Apache-2.0
"""Which threads can have four consecutive elements of an array of rank 1."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np

from pallas_gpu.layouts.registers.linear import LANE_BITS, LinearLayout
from pallas_gpu.layouts.registers.placement import Placement

COUNT = 4
# Of an element that a thread holds: its register, its position there.
_Place = tuple[int, int]
# And the bits in which the index of the lane that holds it differs.
_Element = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Fours:
    """Groups of four consecutive elements, the first one's index a multiple of four.

    Attributes:
      groups: of each the places of its elements in a thread that collects them.
      lane_bits: bits of the lane that are zero in these threads.
    """

    groups: tuple[tuple[_Element, ...], ...]
    lane_bits: tuple[int, ...]


@functools.lru_cache(maxsize=256)
def fours(layout: Placement) -> Fours | None:
    """Returns how threads collect groups of four elements from their warp.

    None where the elements of a group are in several warps, or their number is not a
    multiple of four.

      >>> fours(catalogue.TMA_INDICES.linear((16,))).groups
      (((0, 0, 0), (0, 1, 0), (0, 2, 0), (0, 3, 0)),)
    """
    if not isinstance(layout, LinearLayout) or layout.rank != 1 or layout.size % COUNT:
        return None
    origins = [origin[0] for origin in layout.origins]
    places = {
        origin + i: (register, i)
        for register, origin in enumerate(origins)
        for i in range(layout.vector_length)
    }
    one, two = (_lanes_with(layout, places, distance) for distance in (1, 2))
    if one is None or two is None:
        return None
    groups = []
    for first in sorted(places):
        if (one == 0 and first & 1) or (two == 0 and first & 2):
            continue
        group = []
        for high, low in itertools.product((0, 1), repeat=2):
            held = first + (0 if one else low) + (0 if two else 2 * high)
            group.append((*places[held], low * one | high * two))
        groups.append(tuple(group))
    bits = tuple(b for b in range(LANE_BITS) if (one | two) >> b & 1)
    found = Fours(tuple(groups), bits)
    return found if _are_consecutive(layout, found) else None


def _lanes_with(
    layout: LinearLayout, places: dict[int, _Place], distance: int
) -> int | None:
    """The mask of the lane that holds the element at a distance; 0: the same one."""
    for bit, column in enumerate(layout.thread_columns):
        if column == (distance,):
            return 1 << bit if bit < LANE_BITS else None
    missing = [p for p in places if not p & distance and p + distance not in places]
    return None if missing else 0


def _are_consecutive(layout: LinearLayout, found: Fours) -> bool:
    """Whether the groups are what they have to be, in all threads that collect."""
    held = layout.all_coordinates()[..., 0]
    mask = sum(1 << bit for bit in found.lane_bits)
    threads = np.array([t for t in range(len(held)) if not t & mask])
    for group in found.groups:
        rows = [held[threads ^ lanes, r, i] for r, i, lanes in group]
        first = rows[0]
        if (first % COUNT).any():
            return False
        if any((row != first + k).any() for k, row in enumerate(rows)):
            return False
    return True
