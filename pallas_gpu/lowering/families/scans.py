# SPDX-License-Identifier: Apache-2.0
"""Cumulative operations along one axis: sums, products, extrema, logarithms of sums."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from pallas_gpu.emitters import registers as regs
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.moves import scans
from pallas_gpu.layouts import LinearLayout, rates
from pallas_gpu.layouts.moves.scans import ScanPlan, plan_scan
from pallas_gpu.layouts.registers.linear import THREADS
from pallas_gpu.layouts.registers.placement import Placement
from pallas_gpu.lowering import scratch
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.families.reductions import enter_rules
from pallas_gpu.lowering.inference import relations

# lax's primitives, and the operations that combine the elements.
KINDS: dict[str, scans.Kind] = {
    "cumsum": "add",
    "cumprod": "mul",
    "cummax": "max",
    "cummin": "min",
    "cumlogsumexp": "logaddexp",
}


@dataclasses.dataclass(frozen=True)
class Scan(relations.Relation):
    """Accumulates along an axis; the result has the operand's layout."""

    axis: int

    @property
    def requirement(self) -> str:
        return (
            f"each bit of the thread's index moves along axis {self.axis} or along the "
            "others, never along both"
        )

    def forward(self, layout: Placement) -> Placement | None:
        return None if _plan(layout, self.axis) is None else layout

    def backward(self, layout: Placement) -> Placement | None:
        return self.forward(layout)

    def natural(
        self, shape: tuple[int, ...], bits: int, threads: int = THREADS
    ) -> Iterator[Placement]:
        """The layouts of a reduction, in which warps need not synchronize."""
        return relations.Reduce((self.axis,)).natural(shape, bits, threads)

    def cost(self, layout: Placement, bits: int) -> float:
        """An operation for each element and level, shuffles, exchange through SMEM."""
        plan = _plan(layout, self.axis)
        if plan is None:
            return 0.0
        words = max(1, bits // 32)
        elements = layout.num_registers * layout.vector_length
        cycles = elements * len(plan.levels) * 2.0
        for bit in plan.lane_bits:
            cycles += plan.exchanges(bit) * words * rates.SHUFFLE
        for bit in plan.warp_bits:
            cycles += 8 * plan.exchanges(bit) * words * rates.SMEM_WAVEFRONT
            cycles += 2 * (rates.BARRIER + rates.SMEM_LATENCY)
        return cycles

    def scratch_bytes(self, layout: Placement, bits: int) -> int | None:
        plan = _plan(layout, self.axis)
        return None if plan is None else plan.scratch_bytes(max(bits, 8) // 8)


@relations.where_it_fits
def _plan(layout: Placement, axis: int) -> ScanPlan | None:
    return plan_scan(layout, axis) if isinstance(layout, LinearLayout) else None


def _scan(
    kind: scans.Kind, ctx: RuleContext, x: regs.RegisterArray
) -> regs.RegisterArray:
    axis, reverse = ctx.op.params["axis"], ctx.op.params["reverse"]
    bits = 8 * dtypes.memory_dtype(x.dtype).itemsize
    needed = Scan(axis).scratch_bytes(x.layout, bits) or 0
    got = f"{x.dtype}{list(x.shape)}"
    room = scratch.of_bytes(ctx.kernel, needed, "a scan across warps", got)
    return scans.scan(kind, x, axis, reverse=reverse, scratch=room)


enter_rules(KINDS, "scanned", lambda params: Scan(params["axis"]), _scan)
