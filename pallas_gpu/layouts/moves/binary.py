# SPDX-License-Identifier: Apache-2.0
"""Register layouts as linear maps over GF(2).

An axis of 2**k * odd elements is `odd` tiles of 2**k; tiles of an array are products of
those of its axes. Within a tile an element is a vector of bits, the minor axis lowest.
Without carries it is the sum over GF(2) of a column for each bit of the thread and a
vector for the slot, which is a position in a thread's registers. Relayouts between
such layouts are linear algebra.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

import numpy as np

from pallas_gpu.layouts.moves.gf2 import Basis, intersection
from pallas_gpu.layouts.registers.linear import LANE_BITS, THREAD_BITS, LinearLayout

# (register, element in it)
Slot = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class BinaryLayout:
    """The placement of the elements of every tile of an array.

    Attributes:
      bits: number of bits of an element's vector.
      thread_columns: for each of the seven bits of the thread the vector it adds.
      vector: the vectors that the bits of the position in a register add, lowest first.
      slots: for each tile, in row-major order, the slot at each vector of the slot
        space.
      slot_space: a basis of the slots' vectors, those of `vector` first.
    """

    bits: int
    thread_columns: tuple[int, ...]
    vector: tuple[int, ...]
    slots: tuple[Mapping[int, Slot], ...]
    slot_space: tuple[int, ...]

    def copies(self, first: int, last: int) -> list[int]:
        """The replication bits of the thread, from `first` up to `last` (exclusive)."""
        return [b for b in range(first, last) if not self.thread_columns[b]]


@functools.lru_cache(maxsize=2048)
def binary_layout(layout: LinearLayout) -> BinaryLayout | None:
    """The binary form, None if there is none. Padded layouts have none."""
    if layout.is_padded:
        return None
    widths = [(n & -n).bit_length() - 1 for n in layout.shape]
    masks = np.array([(1 << w) - 1 for w in widths], dtype=np.int64)
    columns = np.array(layout.thread_columns, dtype=np.int64).reshape(
        THREAD_BITS, layout.rank
    )
    joined = np.bitwise_or.reduce(columns, axis=0)
    slots = layout.coordinates(0)
    # No carries: the columns overlap neither each other nor a slot nor the next tile.
    if (
        (columns.sum(axis=0) != joined).any()
        or (joined & ~masks).any()
        or (slots & joined).any()
    ):
        return None
    shifts = np.array([sum(widths[a + 1 :]) for a in range(layout.rank)], np.int64)
    vectors = ((slots & masks) << shifts).sum(axis=-1)
    counts = [n >> w for n, w in zip(layout.shape, widths, strict=True)]
    strides = np.array([math.prod(counts[a + 1 :]) for a in range(layout.rank)])
    tiles = ((slots >> np.array(widths, dtype=np.int64)) * strides).sum(axis=-1)
    by_tile: list[dict[int, Slot]] = [{} for _ in range(math.prod(counts))]
    for register, row in enumerate(zip(tiles.tolist(), vectors.tolist(), strict=True)):
        for element, (tile, vector) in enumerate(zip(*row, strict=True)):
            by_tile[int(tile)][vector] = (register, element)
    unit = 1 << int(shifts[layout.vector_axis]) if layout.rank else 1
    steps = [unit << b for b in range((layout.vector_length - 1).bit_length())]
    space = Basis([s for s in steps if s in by_tile[0]] + sorted(by_tile[0]))
    if len(by_tile[0]) != 1 << len(space) or any(
        tile.keys() != by_tile[0].keys() for tile in by_tile
    ):
        return None
    return BinaryLayout(
        bits=sum(widths),
        thread_columns=tuple(((columns & masks) << shifts).sum(axis=-1).tolist()),
        vector=tuple(s for s in steps if s in by_tile[0]),
        slots=tuple(by_tile),
        slot_space=tuple(space.vectors),
    )


def common_slots(src: BinaryLayout, dst: BinaryLayout) -> list[int]:
    """A basis of the elements that one thread holds in both layouts.

    Adjacent elements of a register come first, so that runs of them stay adjacent.
    """
    shared = intersection(src.slot_space, dst.slot_space, src.bits)
    both = [v for v in src.vector if v in dst.vector]
    ordered = Basis(both)
    for vector in (*src.vector, *dst.vector, *shared.vectors):
        if vector in shared:
            ordered.add(vector)
    return ordered.vectors


def within_warps(src: BinaryLayout, dst: BinaryLayout) -> bool:
    """Whether every warp already holds the elements that it receives."""
    owned = [b for b in range(THREAD_BITS) if src.thread_columns[b]]
    basis = Basis((*(src.thread_columns[b] for b in owned), *src.slot_space))
    held = [basis.coordinates(v) for v in (*dst.thread_columns, *dst.slot_space)]
    for place, bit in enumerate(owned):
        if bit < LANE_BITS:
            continue
        # The source's warp is the thread's own, for every lane and slot.
        if [x >> place & 1 for x in held] != [int(i == bit) for i in range(len(held))]:
            return False
    return True
