# SPDX-License-Identifier: Apache-2.0
"""Warpgroup semantics: arrays in the layouts that inference has assigned."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from pallas_gpu.emitters import registers as regs
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.registers import default_placement
from pallas_gpu.layouts import SmemLayout
from pallas_gpu.layouts.registers.placement import Placement
from pallas_gpu.lowering import scratch
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.choice.authored import Authored
from pallas_gpu.lowering.context import KernelState, RuleContext
from pallas_gpu.lowering.inference import Assignment
from pallas_gpu.lowering.inference.collect import Slot


@dataclasses.dataclass(frozen=True)
class Assigned(Authored):
    """As `Authored`, by inference; relayouts lie between operations."""

    layouts: Assignment
    infers = True

    def smem(self, ctx: RuleContext, i: int, aval: Any) -> SmemLayout:
        return self.layouts.smem(ctx.kernel.path, ctx.op, i)

    def loaded(
        self, ctx: RuleContext, handle: Any, view: Any, layout: Any
    ) -> Placement:
        return self._target_or_default(ctx, "loaded", tuple(view.shape), handle.dtype)

    def stored(self, ctx: RuleContext, handle: Any, view: Any, value: Any) -> Any:
        return self.placed(ctx, vals.as_shape(value, view.shape), "stored")

    def operand(self, ctx: RuleContext, x: Any, slot: Slot = 0) -> Any:
        layout = self.layouts.operand(ctx.kernel.path, ctx.op, slot)
        return x if layout is None else self._moved(ctx.kernel, x, layout)

    def placed(self, ctx: RuleContext, x: Any, slot: Slot = 0) -> regs.RegisterArray:
        x = self.operand(ctx, x, slot)
        if isinstance(x, regs.Deferred):
            return x.materialize(default_placement(x.shape, dtypes.bits(x.dtype)))
        return x

    def linear(self, ctx: RuleContext, x: Any, slot: Slot = 0) -> regs.RegisterArray:
        return self.placed(ctx, x, slot)

    def alike(
        self,
        ctx: RuleContext,
        operands: Sequence[Any],
        slots: Sequence[Slot] | None = None,
    ) -> tuple[Any, ...]:
        names = range(len(operands)) if slots is None else slots
        pairs = zip(operands, names, strict=True)
        return tuple(self.operand(ctx, x, name) for x, name in pairs)

    def cast(self, ctx: RuleContext, x: Any, layout: Any) -> Any:
        return self.operand(ctx, x)

    def result(self, ctx: RuleContext, x: Any, slot: Slot) -> Any:
        layout = self.target(ctx, slot)
        # Deferred arrays stay so; a broadcast can only be materialized in one layout.
        if layout is None or not isinstance(x, (regs.RegisterArray, regs.Broadcast)):
            return x
        return self.fit(ctx.kernel, x, layout)

    def target(self, ctx: RuleContext, slot: Slot) -> Placement | None:
        return self.layouts.result(ctx.kernel.path, ctx.op, slot)

    def carried(
        self,
        ctx: RuleContext,
        carry: list[Any],
        emit: Callable[[list[Any]], list[Any]],
    ) -> list[Any]:
        return [
            x
            if vals.is_scalar(x) or not isinstance(x, regs.Array)
            else self.fit(
                ctx.kernel, x, self._target_or_default(ctx, i, x.shape, x.dtype)
            )
            for i, x in enumerate(carry)
        ]

    def of_branches(
        self, ctx: RuleContext, i: int, layouts: Callable[[], Sequence[Any]]
    ) -> Placement | None:
        return self.target(ctx, i)

    def fit(self, kernel: KernelState, value: Any, layout: Placement) -> Any:
        if isinstance(value, regs.Deferred):
            return value.materialize(layout)
        return scratch.relayouted(kernel, value, layout)

    def _target_or_default(
        self, ctx: RuleContext, slot: Slot, shape: tuple[int, ...], dtype: Any
    ) -> Placement:
        found = self.target(ctx, slot)
        return found or default_placement(shape, dtypes.bits(dtype))

    def _moved(self, kernel: KernelState, x: Any, layout: Placement) -> Any:
        """Moves an array to a layout, once for all that use it there."""
        if vals.is_scalar(x):
            return x
        if not isinstance(x, regs.RegisterArray) or x.layout == layout:
            return self.fit(kernel, x, layout)
        key = id(x), layout
        known = next((scope[key] for scope in kernel.moved if key in scope), None)
        if known is None:
            # The array is kept, so that no other one gets its identity.
            known = kernel.moved[-1][key] = x, self.fit(kernel, x, layout)
        return known[1]
