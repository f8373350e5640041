# SPDX-License-Identifier: Apache-2.0
"""Warpgroup semantics of a program: arrays in the layouts that inference has assigned.

A rule asks for its operands by their slots, as its relation has named them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pallas_gpu.layouts.registers.placement import Placement
from pallas_gpu.lowering import accesses, scratch
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import KernelState, RuleContext
from pallas_gpu.lowering.inference import ProgramAssignment
from pallas_gpu.lowering.semantics import protocol
from pallas_gpu.lowering.semantics.lane import Lane
from pallas_gpu.mosaic import addressing, elementwise
from pallas_gpu.mosaic import registers as regs
from pallas_gpu.mosaic.elements import dtypes
from pallas_gpu.mosaic.moves import relayout
from pallas_gpu.mosaic.registers import default_placement


@dataclasses.dataclass(frozen=True)
class Assigned(Lane):
    """Operations have the layouts of an assignment; relayouts lie between them."""

    layouts: ProgramAssignment

    # --- references -------------------------------------------------------------------

    def smem_handle(
        self,
        ctx: RuleContext,
        i: int,
        aval: Any,
        offset_bytes: int,
        row_major: bool = False,
        distance: addressing.Distance | None = None,
    ) -> vals.SmemHandle:
        layout = self.layouts.smem(ctx.kernel.path, ctx.op, i)
        pointer = addressing.own_smem_pointer(offset_bytes, distance)
        dtype, internal = vals.numpy_dtype(aval), aval.storage.internal
        return vals.SmemHandle(pointer, layout, dtype, internal)

    def read(
        self,
        ctx: RuleContext,
        handle: Any,
        transforms: Any,
        layout: Any,
        optimized: bool | None,
    ) -> Any:
        view = self.part(ctx, handle, transforms)
        if tuple(view.shape) == ():
            return elementwise.scalar(accesses.load_scalar(view), handle.dtype)
        placement = self.target(ctx, "loaded")
        if placement is None:
            placement = default_placement(tuple(view.shape), dtypes.bits(handle.dtype))
        array = accesses.load(view, placement, optimized, lambda: ctx.op.where)
        return array if layout is None else self.operand(ctx, array, "cast")

    def read_for(
        self, ctx: RuleContext, handle: Any, transforms: Any, other: Any
    ) -> Any:
        return self.read(ctx, handle, transforms, None, None)

    def write(
        self,
        ctx: RuleContext,
        handle: Any,
        transforms: Any,
        value: Any,
        optimized: bool | None = None,
    ) -> None:
        view = self.part(ctx, handle, transforms)
        with ctx.in_order():
            if tuple(view.shape) == ():
                accesses.store_scalar(view, vals.scalar_value(value))
                return
            array = self.placed(ctx, vals.as_shape(value, view.shape), "stored")
            accesses.store(view, array, lambda: ctx.op.where, optimized)

    # --- values -----------------------------------------------------------------------

    def operand(self, ctx: RuleContext, x: Any, slot: Any = 0) -> Any:
        layout = self.layouts.operand(ctx.kernel.path, ctx.op, slot)
        return x if layout is None else self._moved(ctx.kernel, x, layout)

    def placed(self, ctx: RuleContext, x: Any, slot: Any = 0) -> regs.RegisterArray:
        x = self.operand(ctx, x, slot)
        if isinstance(x, regs.Deferred):
            return x.materialize(default_placement(x.shape, dtypes.bits(x.dtype)))
        return x

    def linear(self, ctx: RuleContext, x: Any, slot: Any = 0) -> regs.RegisterArray:
        return self.placed(ctx, x, slot)

    def result(self, ctx: RuleContext, x: Any, slot: Any) -> Any:
        layout = self.target(ctx, slot)
        # Deferred arrays stay so; a broadcast can only be materialized in one layout.
        if layout is None or not isinstance(x, regs.RegisterArray | regs.Broadcast):
            return x
        return self._in_layout(ctx.kernel, x, layout)

    def target(self, ctx: RuleContext, slot: Any) -> Placement | None:
        return self.layouts.result(ctx.kernel.path, ctx.op, slot)

    def alike(self, ctx: RuleContext, operands: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(self.operand(ctx, x, i) for i, x in enumerate(operands))

    def add(self, ctx: RuleContext, a: Any, b: Any) -> Any:
        a, b = (self.operand(ctx, x, s) for x, s in ((a, "old"), (b, "added")))
        return elementwise.apply("add", a, b)

    def layout_cast(self, ctx: RuleContext, x: Any, layout: Any) -> Any:
        return x if vals.is_scalar(x) else self.operand(ctx, x)

    def carried(
        self,
        ctx: RuleContext,
        carry: list[Any],
        emit: Callable[[list[Any]], list[Any]],
    ) -> list[Any]:
        return [
            self._in_layout(ctx.kernel, x, self._layout_of(ctx, x, i))
            for i, x in enumerate(carry)
        ]

    def _layout_of(self, ctx: RuleContext, x: Any, slot: Any) -> Placement | None:
        if vals.is_scalar(x) or not isinstance(x, regs.Array):
            return None
        made = self.target(ctx, slot)
        return made or default_placement(x.shape, dtypes.bits(x.dtype))

    def packed(
        self,
        ctx: RuleContext,
        i: int,
        dtype: np.dtype,
        shape: tuple[int, ...],
        layouts: protocol.Layouts,
    ) -> vals.Packed:
        if not shape:
            return vals.Packed(dtype)
        made = self.target(ctx, i)
        return vals.Packed(dtype, made or default_placement(shape, dtypes.bits(dtype)))

    def fit(self, kernel: KernelState, value: Any, layout: Placement) -> Any:
        return self._in_layout(kernel, value, layout)

    # --- layouts ----------------------------------------------------------------------

    def _moved(self, kernel: KernelState, x: Any, layout: Placement) -> Any:
        """Moves an array to a layout, once for all that use it there."""
        if not isinstance(x, regs.RegisterArray) or x.layout == layout:
            return self._in_layout(kernel, x, layout)
        for scope in kernel.moved:
            if (id(x), layout) in scope:
                return scope[id(x), layout][1]
        moved = self._in_layout(kernel, x, layout)
        # The array is kept, so that no other one gets its identity.
        kernel.moved[-1][id(x), layout] = x, moved
        return moved

    def _in_layout(self, kernel: KernelState, x: Any, layout: Placement | None) -> Any:
        if layout is None or vals.is_scalar(x):
            return x
        if isinstance(x, regs.Deferred):
            return x.materialize(layout)
        if x.layout == layout:
            return x
        return relayout.relayout(x, layout, scratch.for_relayout(kernel, x, layout))


protocol.enter_inferred(Assigned)
