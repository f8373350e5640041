# SPDX-License-Identifier: Apache-2.0
"""Cumulative operations along one axis: sums, products, extrema, logarithms of sums."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from pallas_gpu import errors
from pallas_gpu.emitters.elements import dtypes, table
from pallas_gpu.emitters.moves import scans
from pallas_gpu.layouts import LinearLayout, rates
from pallas_gpu.layouts.moves.scans import ScanPlan, plan_scan
from pallas_gpu.layouts.registers.linear import THREADS
from pallas_gpu.layouts.registers.placement import Placement
from pallas_gpu.lowering import scratch
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.families.elementwise import convert_operand as convert
from pallas_gpu.lowering.families.reductions import related_wide
from pallas_gpu.lowering.inference import relations
from pallas_gpu.lowering.inference.collect import Node, Symbol
from pallas_gpu.lowering.rules import emits, find_primitive, relates
from pallas_gpu.primitives import _registry as registry

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
        return None if self._plan(layout) is None else layout

    def backward(self, layout: Placement) -> Placement | None:
        return self.forward(layout)

    def natural(
        self, shape: tuple[int, ...], bits: int, threads: int = THREADS
    ) -> Iterator[Placement]:
        """The layouts of a reduction, in which warps need not synchronize."""
        return relations.Reduce((self.axis,)).natural(shape, bits, threads)

    def cost(self, layout: Placement, bits: int) -> float:
        """An operation for each element and level, shuffles, exchange through SMEM."""
        plan = self._plan(layout)
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
        plan = self._plan(layout)
        return None if plan is None else plan.scratch_bytes(max(bits, 8) // 8)

    def _plan(self, layout: Placement) -> ScanPlan | None:
        if not isinstance(layout, LinearLayout):
            return None
        try:
            return plan_scan(layout, self.axis)
        except errors.LayoutError:
            return None


def _make(kind: scans.Kind):
    def rule(ctx: RuleContext, x: Any) -> Any:
        axis, reverse = ctx.eqn.params["axis"], ctx.eqn.params["reverse"]
        wide = convert(ctx, x, dtypes.combining(x.dtype), "widened")
        wide = ctx.kernel.layouts.linear(ctx, wide, "scanned")
        bits = 8 * dtypes.memory_dtype(wide.dtype).itemsize
        needed = Scan(axis).scratch_bytes(wide.layout, bits) or 0
        got = f"{wide.dtype}{list(wide.shape)}"
        room = scratch.of_bytes(ctx.kernel, needed, "a scan across warps", got)
        result = scans.scan(kind, wide, axis, reverse=reverse, scratch=room)
        return convert(ctx, ctx.result(result, "scanned"), x.dtype, "narrowed")

    return rule


def _relate(node: Node, x: Symbol) -> Symbol:
    return related_wide(node, x, Scan(node.params["axis"]), "scanned")


def _make_check(kind: scans.Kind):
    def check(op: Any, mesh: Any) -> None:
        table.lookup(kind).require_combining(np.dtype(op.inputs[0].dtype))

    return check


for _name, _kind in KINDS.items():
    registry.checks(find_primitive(_name))(_make_check(_kind))
    emits(_name)(_make(_kind))
    relates(_name)(_relate)
