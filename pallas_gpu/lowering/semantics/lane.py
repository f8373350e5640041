# SPDX-License-Identifier: Apache-2.0
"""Lane semantics: arrays in registers with a layout each, emitted at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pallas_gpu import _jax, errors, types
from pallas_gpu.layouts import Layout, WGSplatLayout, WGStridedLayout
from pallas_gpu.layouts.registers.placement import Placement, place, place_registers
from pallas_gpu.layouts.window import is_contiguous
from pallas_gpu.lowering import accesses, agreement, borders, scratch
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import (
    KernelState,
    RuleContext,
    part_dtype,
    part_window,
    tmem_window,
)
from pallas_gpu.lowering.semantics import protocol
from pallas_gpu.mosaic import addressing, elementwise, gmem, module, smem
from pallas_gpu.mosaic import registers as regs
from pallas_gpu.mosaic.elements import dtypes
from pallas_gpu.mosaic.moves import relayout
from pallas_gpu.mosaic.registers import default_placement, spread_layout
from pallas_gpu.mosaic.tensor_cores import tmem, wgmma
from pallas_gpu.primitives._registry import RuleKind

# Rows and columns of the smallest tile of the tensor core's layouts.
_WGMMA_ROWS, _WGMMA_COLUMNS = 64, 8


@dataclasses.dataclass(frozen=True)
class Lane:
    """The author determines the layouts: none is inferred."""

    rule_kind = RuleKind.LANE
    keeps_lines = False
    stages = ()

    def gmem_handle(
        self, kernel: KernelState, handle: vals.GmemHandle
    ) -> vals.GmemHandle:
        return handle

    def smem_handle(
        self,
        ctx: RuleContext,
        i: int,
        aval: Any,
        offset_bytes: int,
        row_major: bool = False,
        distance: addressing.Distance | None = None,
    ) -> vals.SmemHandle:
        layout = types.smem_layout(aval.shape, aval.dtype, aval.transforms)
        pointer = addressing.own_smem_pointer(offset_bytes, distance)
        dtype, internal = vals.numpy_dtype(aval), aval.storage.internal
        return vals.SmemHandle(pointer, layout, dtype, internal)

    def tmem_allocation(self, kernel: KernelState) -> tmem.Allocation:
        plan, builder = kernel.plan, kernel.builder
        return tmem.allocate(
            builder.smem_pointer(plan.tmem_address_offset_bytes),
            plan.tmem_columns,
            collective=plan.collective_tmem,
            barriers=plan.barriers > 0,
        )

    def tmem_handle(
        self, kernel: KernelState, aval: Any, first_column: int
    ) -> vals.TmemHandle:
        dtype, layout = vals.numpy_dtype(aval), aval.storage.layout
        return vals.TmemHandle(tuple(aval.shape), dtype, first_column, layout)

    def part(self, ctx: RuleContext, handle: Any, transforms: Any) -> Any:
        if isinstance(handle, vals.TmemHandle):
            return tmem.TmemView(
                ctx.kernel.tmem,
                handle.first_column,
                handle.layout,
                handle.dtype,
                tmem_window(handle, transforms),
            )
        window = part_window(handle, transforms)
        dtype = part_dtype(handle, transforms)
        if isinstance(handle, vals.SmemHandle):
            layout = handle.layout.reinterpreted(
                window.array_shape, dtypes.stored_bits(dtype)
            )
            return smem.SmemView(handle.pointer, layout, dtype, window, handle.internal)
        if isinstance(handle, vals.GmemHandle):
            pointer = ctx.builder.buffers[handle.buffer_index]
            return gmem.GmemView(pointer, handle.buffer_index, dtype, window)
        raise errors.InternalError(f"{type(handle).__name__} is not an array in memory")

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
        placement = (
            _default_layout(handle, view)
            if layout is None
            else place_registers(layout, tuple(view.shape))
        )
        return accesses.load(view, placement, optimized, lambda: _jax.where(ctx.eqn))

    def read_for(
        self, ctx: RuleContext, handle: Any, transforms: Any, other: Any
    ) -> Any:
        layout = getattr(other, "layout", None)
        return self.read(ctx, handle, transforms, layout, None)

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
            if isinstance(value, regs.Deferred):
                value = regs.placed(value, _default_layout(handle, view))
            if isinstance(view, smem.SmemView) and view.internal:
                value = agreement.to_store(ctx.kernel, view, value)
            accesses.store(view, value, lambda: _jax.where(ctx.eqn), optimized)

    def operand(self, ctx: RuleContext, x: Any, slot: Any = 0) -> Any:
        return x

    def placed(self, ctx: RuleContext, x: Any, slot: Any = 0) -> regs.RegisterArray:
        return regs.placed(x) if isinstance(x, regs.Deferred) else x

    def linear(self, ctx: RuleContext, x: Any, slot: Any = 0) -> regs.RegisterArray:
        return agreement.linear(ctx.kernel, self.placed(ctx, x, slot))

    def result(self, ctx: RuleContext, x: Any, slot: Any) -> Any:
        return x

    def target(self, ctx: RuleContext, slot: Any) -> Placement | None:
        return None

    def alike(self, ctx: RuleContext, operands: Sequence[Any]) -> tuple[Any, ...]:
        return agreement.agreed(ctx.kernel, operands)

    def carried(
        self,
        ctx: RuleContext,
        carry: list[Any],
        emit: Callable[[list[Any]], list[Any]],
    ) -> list[Any]:
        return borders.place_carry(ctx.kernel, carry, emit)

    def fit(self, kernel: KernelState, value: Any, layout: Placement) -> Any:
        return borders.match(kernel, value, layout)

    def add(self, ctx: RuleContext, a: Any, b: Any) -> Any:
        return elementwise.apply("add", a, b)

    def layout_cast(self, ctx: RuleContext, x: Any, layout: Any) -> Any:
        if vals.is_scalar(x):
            return x
        placement = place(layout, x.shape)
        room = None
        if isinstance(x, regs.RegisterArray) and not isinstance(
            placement, WGSplatLayout
        ):
            room = scratch.for_relayout(ctx.kernel, x, placement)
        return relayout.layout_cast(x, placement, room)

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
        found = next((layout for layout in layouts() if layout is not None), None)
        return vals.Packed(dtype, found or default_placement(shape, dtypes.bits(dtype)))

    def accumulator(self, value: Any, shape: tuple[int, ...]) -> Any:
        placement = place_registers(Layout.WGMMA, shape)
        if isinstance(value, regs.Deferred):
            value = vals.as_shape(value, shape).materialize(placement)
        return regs.regroup(value, placement)

    def fenced(self, whole: Any) -> Any:
        return wgmma.fence_accumulator(whole)

    def columns(self, whole: Any, starts: Sequence[int], sizes: Sequence[int]) -> Any:
        return wgmma.accumulator_slice(whole, starts, sizes)

    def with_columns(self, whole: Any, starts: Sequence[int], part: Any) -> Any:
        return wgmma.accumulator_update(whole, starts, part)


def _default_layout(handle: Any, view: Any) -> Any:
    """Returns the layout of a load that specifies none.

    An array tiled for the tensor core is loaded in WGMMA layout, any other in a strided
    one, or in one of powers of two where a strided one cannot be addressed.
    """
    shape = tuple(view.shape)
    tiled = isinstance(handle, vals.SmemHandle) and handle.layout.tiling is not None
    in_warp = module.current().issuer == "warp"
    if tiled and not in_warp and len(shape) == 2 and _covered_by_wgmma(*shape):
        return place(Layout.WGMMA, shape)
    placement = default_placement(shape, dtypes.bits(handle.dtype))
    window = view.window
    row_major = not (tiled or window.is_transposed) and is_contiguous(
        window.array_shape, window.sizes
    )
    if isinstance(placement, WGStridedLayout) and not row_major:
        return spread_layout(shape)
    if tiled and accesses.by_element(view, placement, "load"):
        return spread_layout(shape)
    return placement


def _covered_by_wgmma(rows: int, columns: int) -> bool:
    return rows % _WGMMA_ROWS == 0 and columns % _WGMMA_COLUMNS == 0


protocol.enter(types.LoweringSemantics.Lane, Lane())
