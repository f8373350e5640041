# SPDX-License-Identifier: Apache-2.0
"""Plans reductions: within a thread, across the lanes of a warp, across the four warps.

Which of these a reduction needs follows from the layout. Registers whose origins differ
along a reduced axis are combined within the thread. Thread bits whose column is along a
reduced axis are combined by a butterfly of shuffles (lanes; for many operations one
instruction combines all of a warp) or through SMEM (warps).
"""

from __future__ import annotations

import dataclasses
import functools

from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts.registers.linear import (
    LANE_BITS,
    THREAD_BITS,
    WARPS,
    LinearLayout,
)
from pallas_gpu.layouts.registers.placement import Placement, describe


@dataclasses.dataclass(frozen=True)
class Reduction:
    """The steps of a reduction of a layout.

    Attributes:
      groups: for each register of the result the registers that are combined into it.
      vector_reduced: whether the elements within a register are combined too.
      lanes: thread bits to combine within a warp.
      warps: thread bits to combine through SMEM.
      slots: lane bits that distinguish the results within a warp.
      result: the result's layout; None for a scalar.
      length: elements per register of the result.
    """

    groups: tuple[tuple[int, ...], ...]
    vector_reduced: bool
    lanes: tuple[int, ...]
    warps: tuple[int, ...]
    slots: tuple[int, ...]
    result: LinearLayout | None
    length: int

    @property
    def is_of_warpgroup(self) -> bool:
        """Whether the result is one element, of several warps."""
        return self.result is None and bool(self.warps)

    def slot_bytes(self, bits: int) -> int:
        """Returns the scratch for one register of one lane.

        Args:
          bits: width of an element; elements of fewer than 8 bits occupy a byte.
        """
        return self.length * max(bits, 8) // 8

    def round_bytes(self, bits: int) -> int:
        """Returns the scratch for one register of each thread."""
        return WARPS * (1 << len(self.slots)) * self.slot_bytes(bits)

    def scratch_bytes(self, bits: int) -> int:
        """Returns the scratch for all results in a single round; 0 if it uses none."""
        return len(self.groups) * self.round_bytes(bits) if self.warps else 0

    def least_bytes(self, bits: int) -> int:
        """As `scratch_bytes`, for a lane of each warp at a time."""
        return WARPS * self.slot_bytes(bits) if self.warps else 0


@functools.lru_cache(maxsize=4096)
def plan_reduction(layout: Placement, axes: tuple[int, ...]) -> Reduction:
    """Plans the reduction of an array in registers.

    Args:
      layout: linear, or any if all axes are reduced.
      axes: the axes to reduce.

    Raises:
      LayoutError: a thread bit moves along reduced and along remaining axes.
    """
    if len(axes) == len(layout.shape):
        return _plan_full(layout)
    if not isinstance(layout, LinearLayout):
        layout = layout.linear()  # raises an error that states the reason
    kept = [a for a in range(layout.rank) if a not in axes]
    reduced_bits = []
    for bit, column in enumerate(layout.thread_columns):
        in_reduced = any(column[a] for a in axes)
        if in_reduced and any(column[a] for a in kept):
            raise LayoutError(
                "The layout mixes reduced and remaining axes across threads",
                expected=f"thread columns along axes {axes} or along the others, not "
                "both",
                got=describe(layout),
                hint="layout_cast the array first",
            )
        if in_reduced:
            reduced_bits.append(bit)
    result = layout.reduce(axes)
    groups: dict[tuple[int, ...], list[int]] = {}
    for register, origin in enumerate(layout.origins):
        groups.setdefault(tuple(origin[a] for a in kept), []).append(register)
    vector_reduced = layout.vector_length > 1 and layout.vector_axis in axes
    slots = [
        bit
        for bit in range(LANE_BITS)
        if any(layout.thread_columns[bit][a] for a in kept)
    ]
    return Reduction(
        groups=tuple(tuple(groups[key]) for key in sorted(groups)),
        vector_reduced=vector_reduced,
        lanes=tuple(b for b in reduced_bits if b < LANE_BITS),
        warps=tuple(b for b in reduced_bits if b >= LANE_BITS),
        slots=tuple(slots),
        result=result,
        length=result.vector_length,
    )


def _plan_full(layout: Placement) -> Reduction:
    copies = layout.replication_bits if isinstance(layout, LinearLayout) else ()
    bits = [b for b in range(THREAD_BITS) if b not in copies]
    return Reduction(
        groups=(tuple(range(layout.num_registers)),),
        vector_reduced=layout.vector_length > 1,
        lanes=tuple(b for b in bits if b < LANE_BITS),
        warps=tuple(b for b in bits if b >= LANE_BITS),
        slots=(),
        result=None,
        length=1,
    )
