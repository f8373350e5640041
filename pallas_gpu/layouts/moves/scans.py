# SPDX-License-Identifier: Apache-2.0
"""Plans a cumulative operation along one axis of an array in registers.

The positions along the axis are sums of a position that the thread determines and one
that the register determines, and every position occurs once. Such a decomposition of an
interval is nested: sorted by stride, the bits of the thread's index that move along the
axis alternate with runs of registers. So a scan consists of levels. At each level units
of equal length, whose prefixes and totals are known, are merged: first the consecutive
units that one thread holds, then two adjacent units that differ in one thread bit.
"""

from __future__ import annotations

import dataclasses
import functools

from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts.registers.linear import LANE_BITS, THREADS, LinearLayout

# (register, element in it)
Slot = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Level:
    """One merge of adjacent units.

    Attributes:
      units: number of consecutive units of a thread that are merged.
      bit: the thread bit in which the two halves of the next merge differ; None at the
        last level.
    """

    units: int
    bit: int | None


@dataclasses.dataclass(frozen=True)
class ScanPlan:
    """A scan of an array in one layout along one axis.

    Attributes:
      lines: for each line along the axis of which a thread holds a part, the slots of
        that part, in the order of the axis.
      levels: the merges, from adjacent elements to the whole axis.
    """

    lines: tuple[tuple[Slot, ...], ...]
    levels: tuple[Level, ...]

    @property
    def lane_bits(self) -> tuple[int, ...]:
        """Thread bits along the axis within a warp."""
        return tuple(b for b in self._bits if b < LANE_BITS)

    @property
    def warp_bits(self) -> tuple[int, ...]:
        """Thread bits along the axis between warps."""
        return tuple(b for b in self._bits if b >= LANE_BITS)

    @property
    def _bits(self) -> tuple[int, ...]:
        return tuple(level.bit for level in self.levels if level.bit is not None)

    def exchanges(self, bit: int) -> int:
        """Totals that each thread exchanges at the level of a thread bit."""
        held = 1
        for level in self.levels:
            held *= level.units
            if level.bit == bit:
                break
        return len(self.lines) * len(self.lines[0]) // held

    def scratch_bytes(self, itemsize_bytes: int) -> int:
        """The smallest scratch in SMEM for the scan: one total of each thread."""
        return THREADS * itemsize_bytes if self.warp_bits else 0


@functools.lru_cache(maxsize=1024)
def plan_scan(layout: LinearLayout, axis: int) -> ScanPlan:
    """Plans the scan of an array.

    Args:
      layout: the layout of the array.
      axis: the axis of the operation, 0 or more.

    Raises:
      LayoutError: a thread bit moves along this axis and another one.
    """
    strides = []
    for bit, column in enumerate(layout.thread_columns):
        others = any(x for a, x in enumerate(column) if a != axis)
        if column[axis] and others:
            raise LayoutError(
                "a thread bit moves along the scanned axis and another one",
                expected=f"thread columns along axis {axis} or along the others",
                got=f"column {column} of thread bit {bit}",
                hint="layout_cast the array first, e.g. to Layout.WGMMA",
            )
        if column[axis]:
            strides.append((column[axis], bit))
    length = layout.box[axis]  # padding takes part: it follows all elements
    levels, unit = [], 1
    for stride, bit in sorted(strides):
        levels.append(Level(stride // unit, bit))
        unit = 2 * stride
    levels.append(Level(length // unit, None))
    lines = _lines(layout, axis)
    along = sum(1 for column in layout.thread_columns if column[axis])
    if any(len(line) << along != length for line in lines):
        raise LayoutError(
            "registers do not hold whole lines along the scanned axis",
            expected=f"{length >> along} elements along axis {axis} in each thread",
            got=f"between {min(map(len, lines))} and {max(map(len, lines))}",
            hint="layout_cast the array first, or load it without a layout",
        )
    return ScanPlan(lines, tuple(levels))


def _lines(layout: LinearLayout, axis: int) -> tuple[tuple[Slot, ...], ...]:
    lines: dict[tuple[int, ...], dict[int, Slot]] = {}
    for register, row in enumerate(layout.coordinates(0).tolist()):
        for element, coordinate in enumerate(row):
            others = (*coordinate[:axis], *coordinate[axis + 1 :])
            lines.setdefault(others, {})[coordinate[axis]] = (register, element)
    return tuple(
        tuple(line[position] for position in sorted(line))
        for _, line in sorted(lines.items())
    )
