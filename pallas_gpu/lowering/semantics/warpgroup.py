# SPDX-License-Identifier: Apache-2.0
"""Warpgroup semantics: arrays as vectors and memrefs, whose layouts are inferred."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import builtin, memref, vector

from pallas_gpu import errors, types
from pallas_gpu.layouts import WGSplatLayout, to_layout
from pallas_gpu.layouts.tmem.layout import LANES
from pallas_gpu.lowering import memrefs
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import (
    KernelState,
    RuleContext,
    part_dtype,
    part_window,
    tmem_window,
)
from pallas_gpu.lowering.families import elementwise
from pallas_gpu.lowering.families.shapes import (
    as_vector,
    splat_source,
    static_slice,
)
from pallas_gpu.lowering.semantics import protocol
from pallas_gpu.mosaic import addressing, dialect, logical
from pallas_gpu.mosaic import registers as regs
from pallas_gpu.mosaic.elements import convert, dtypes, table
from pallas_gpu.primitives._registry import RuleKind


@dataclasses.dataclass(frozen=True)
class Warpgroup:
    """Operations work on whole arrays; inference assigns layouts and adds relayouts."""

    rule_kind = RuleKind.WARPGROUP
    keeps_lines = True  # for the error messages of inference
    stages = ("layouts", "expand")

    def gmem_handle(
        self, kernel: KernelState, handle: vals.GmemHandle
    ) -> vals.MemrefHandle:
        cast = builtin.UnrealizedConversionCastOp(
            [logical.gmem_type(handle.dtype, handle.shape)],
            [kernel.builder.buffers[handle.buffer_index]],
        )
        index = ir.IntegerType.get_signless(32)
        cast.attributes[logical.BUFFER] = ir.IntegerAttr.get(index, handle.buffer_index)
        return vals.MemrefHandle(cast.results[0], handle.dtype, handle.lead)

    def smem_handle(
        self,
        ctx: RuleContext,
        i: int,
        aval: Any,
        offset_bytes: int,
        row_major: bool = False,
        distance: addressing.Distance | None = None,
    ) -> vals.MemrefHandle:
        dtype = vals.numpy_dtype(aval)
        array = dialect.ops.slice_smem(
            logical.smem_type(dtype, aval.shape), offset_bytes
        )
        if distance is not None:
            i32 = ir.IntegerType.get_signless(32)
            size = ir.IntegerAttr.get(i32, distance.size_bytes)
            array.owner.attributes[logical.DISTANCES[distance.of]] = size
        if aval.storage.internal:
            array.owner.attributes[logical.INTERNAL] = ir.UnitAttr.get()
        if aval.transforms or row_major:
            layout = types.smem_layout(aval.shape, aval.dtype, aval.transforms)
            given = dialect.transforms_to_attributes(layout.tiling, layout.swizzle)
            array = dialect.ops.with_transforms(array, ir.ArrayAttr.get(given))
        return vals.MemrefHandle(array, dtype)

    def tmem_allocation(self, kernel: KernelState) -> ir.Value:
        plan = kernel.plan
        word = builtin.unrealized_conversion_cast(
            [logical.smem_type(dtypes.I32, ())],
            [kernel.builder.smem_pointer(plan.tmem_address_offset_bytes)],
        )
        return dialect.ops.tmem_alloc(
            logical.tmem_type(dtypes.I32, (LANES, plan.tmem_columns)),
            word,
            collective=plan.collective_tmem,
            packing=1,
        )

    def tmem_handle(
        self, kernel: KernelState, aval: Any, first_column: int
    ) -> vals.TmemHandle:
        dtype, layout = vals.numpy_dtype(aval), aval.storage.layout
        *lead, rows, columns = aval.shape
        flat = logical.tmem_type(dtype, (rows, math.prod(lead) * columns))
        array = dialect.ops.slice_tmem(flat, kernel.tmem, first_column)
        array = dialect.ops.tmem_layout_cast(array, dialect.to_attribute(layout.tiled))
        return vals.TmemHandle(tuple(aval.shape), dtype, first_column, layout, array)

    def part(self, ctx: RuleContext, handle: Any, transforms: Any) -> Any:
        if isinstance(handle, vals.TmemHandle):
            window = tmem_window(handle, transforms)
            whole = window.is_whole
            return handle.memref if whole else memrefs.subview(handle.memref, window)
        window = part_window(handle, transforms)
        array = handle.memref
        if types.reinterpreted(transforms) is not None:
            dtype = part_dtype(handle, transforms)
            array = memrefs.reinterpreted(array, window.array_shape, dtype)
        return array if window.is_whole else memrefs.subview(array, window)

    def read(
        self,
        ctx: RuleContext,
        handle: Any,
        transforms: Any,
        layout: Any,
        optimized: bool | None,
    ) -> Any:
        source = self.part(ctx, handle, transforms)
        stored = dtypes.memory_dtype(handle.dtype)
        if not source.type.shape:
            value = logical.from_element(memref.load(source, []), stored)
            single = convert.convert_value(value, stored, handle.dtype)
            return regs.Splat(single, handle.dtype, ())
        loaded = vals.Vector(
            dialect.ops.vector_load(source, optimized=optimized), stored
        )
        array = elementwise.convert(loaded, handle.dtype)
        return array if layout is None else self.layout_cast(ctx, array, layout)

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
        target = self.part(ctx, handle, transforms)
        stored = dtypes.memory_dtype(handle.dtype)
        with ctx.in_order():
            if not target.type.shape:
                scalar = vals.scalar_value(value)
                single = convert.convert_value(scalar, handle.dtype, stored)
                element = logical.to_element(single, stored)
                memref.store(element, target, [])
                return
            array = as_vector(value, tuple(target.type.shape))
            converted = elementwise.convert(array, stored).value
            dialect.ops.vector_store(converted, target, optimized=optimized)

    def operand(self, ctx: RuleContext, x: Any, slot: Any = 0) -> Any:
        return x

    placed = linear = operand

    def result(self, ctx: RuleContext, x: Any, slot: Any) -> Any:
        return x

    def target(self, ctx: RuleContext, slot: Any) -> None:
        return None

    def alike(self, ctx: RuleContext, operands: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(operands)

    def carried(self, ctx: RuleContext, carry: list[Any], emit: Any) -> list[Any]:
        return carry

    def fit(self, kernel: KernelState, value: Any, layout: Any) -> Any:
        return value

    def add(self, ctx: RuleContext, a: Any, b: Any) -> Any:
        if vals.is_scalar(a):
            total = table.emit("add", a.dtype, a.value, vals.scalar_value(b))
            return regs.Splat(total, a.dtype, ())
        return elementwise.emit("add", [a, b], a.dtype, a.shape)

    def layout_cast(self, ctx: RuleContext, x: Any, layout: Any) -> Any:
        if vals.is_scalar(x):
            return x
        description = to_layout(layout)
        if isinstance(description, WGSplatLayout):
            if splat_source(x) is not None:
                return x
            raise errors.LayoutError(
                "Only a splat can have a splat layout",
                expected="a layout that distributes the elements",
                got=f"WG_SPLAT for shape {x.shape}",
                hint="cast to another layout",
            )
        attribute = dialect.to_attribute(description)
        return vals.Vector(dialect.ops.layout_cast(x.value, attribute), x.dtype)

    def packed(
        self,
        ctx: RuleContext,
        i: int,
        dtype: np.dtype,
        shape: tuple[int, ...],
        layouts: protocol.Layouts,
    ) -> vals.Packed:
        return vals.Packed(dtype, shape=shape or None)

    def accumulator(self, value: Any, shape: tuple[int, ...]) -> Any:
        return as_vector(value, shape)

    def fenced(self, whole: Any) -> Any:
        held = dialect.ops.optimization_barrier([whole.value])
        return vals.Vector(held, whole.dtype)

    def columns(self, whole: Any, starts: Sequence[int], sizes: Sequence[int]) -> Any:
        return static_slice(whole, starts, sizes)

    def with_columns(self, whole: Any, starts: Sequence[int], part: Any) -> Any:
        ones = [1] * len(starts)
        updated = vector.insert_strided_slice(
            part.value, whole.value, list(starts), ones
        )
        return vals.Vector(updated, whole.dtype)


protocol.enter(types.LoweringSemantics.Warpgroup, Warpgroup())
