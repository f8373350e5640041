# SPDX-License-Identifier: Apache-2.0
"""Reads and writes of references, loads with a layout, layout casts."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import memref

from pallas_gpu import _jax, errors
from pallas_gpu.layouts import WGSplatLayout, to_layout
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering import warp
from pallas_gpu.lowering.context import RuleContext, unflatten_transforms
from pallas_gpu.lowering.rules import warpgroup
from pallas_gpu.lowering.warpgroup import elementwise, memory, wgmma
from pallas_gpu.lowering.warpgroup.shapes import as_vector, splat_source
from pallas_gpu.mosaic import dialect, mbarrier
from pallas_gpu.mosaic.elements import arithmetic, convert, dtypes
from pallas_gpu.primitives.registers import layout_cast_p, load_p


def read(handle: vals.MemrefHandle, transforms: Any, optimized: bool = True) -> Any:
    """Loads a part of a reference."""
    source = memory.part(handle, transforms)
    stored = dtypes.memory_dtype(handle.dtype)
    if not source.type.shape:
        value = memref.load(source, [])
        value = _from_memory(value, stored)
        return vals.regs.Splat(
            convert.convert_value(value, stored, handle.dtype), handle.dtype, ()
        )
    loaded = dialect.ops.vector_load(source, optimized=optimized)
    return elementwise.convert(vals.Vector(loaded, stored), handle.dtype)


def write(ctx: RuleContext, handle: Any, transforms: Any, value: Any) -> None:
    """Stores into a part of a reference, in order with the warpgroup's accesses."""
    target = memory.part(handle, transforms)
    automatic = not ctx.kernel.params.compiler_params.unsafe_no_auto_barriers
    stored = dtypes.memory_dtype(handle.dtype)
    if automatic:
        # Another warp may still read what this store overwrites.
        mbarrier.meet()
    if not target.type.shape:
        single = convert.convert_value(vals.scalar_value(value), handle.dtype, stored)
        element = _to_memory(single, target.type.element_type)
        warp.mark_scope(ctx, memref.store(element, target, []))
    else:
        vector = as_vector(value, tuple(target.type.shape))
        dialect.ops.vector_store(elementwise.convert(vector, stored).value, target)
    if automatic:
        mbarrier.meet()


def _from_memory(value: ir.Value, dtype: Any) -> ir.Value:
    """A float8 scalar is the byte of its bits."""
    return dtypes.bitcast(value, dtype)


def _to_memory(value: ir.Value, element: ir.Type) -> ir.Value:
    if value.type == element:
        return value
    return memory.arith.bitcast(element, value)


@warpgroup(_jax.get_p)
def _get(ctx: RuleContext, handle: Any, *leaves: Any) -> Any:
    transforms = unflatten_transforms(ctx.eqn.params["tree"], leaves)
    if isinstance(handle, vals.AccumulatorHandle):
        return wgmma.read_accumulator(ctx, handle, transforms, 0)
    return read(handle, transforms)


@warpgroup(_jax.swap_p)
def _swap(ctx: RuleContext, handle: Any, value: Any, *leaves: Any) -> Any:
    transforms = unflatten_transforms(ctx.eqn.params["tree"], leaves)
    old = None
    if isinstance(handle, vals.AccumulatorHandle):
        if ctx.result_is_read:
            old = wgmma.read_accumulator(ctx, handle, transforms, 0)
        wgmma.write_accumulator(ctx, handle, value)
        return old
    if ctx.result_is_read:
        old = read(handle, transforms)
    write(ctx, handle, transforms, value)
    return old


@warpgroup(_jax.addupdate_p)
def _addupdate(ctx: RuleContext, handle: Any, value: Any, *leaves: Any) -> list[Any]:
    transforms = unflatten_transforms(ctx.eqn.params["tree"], leaves)
    if isinstance(handle, vals.AccumulatorHandle):
        old = wgmma.read_accumulator(ctx, handle, transforms, 0)
        wgmma.write_accumulator(ctx, handle, _add(old, value))
        return []
    write(ctx, handle, transforms, _add(read(handle, transforms), value))
    return []


def _add(old: Any, value: Any) -> Any:
    if vals.is_scalar(old):
        total = arithmetic.emit("add", old.dtype, old.value, vals.scalar_value(value))
        return vals.regs.Splat(total, old.dtype, ())
    return elementwise.emit("add", [old, value], old.dtype, old.shape)


@warpgroup(load_p)
def _load(ctx: RuleContext, *invals: Any) -> Any:
    src = ctx.operands(invals)["src"]
    params = ctx.eqn.params
    loaded = read(src.ref, src.transforms, params["optimized"])
    return _cast(loaded, params["layout"])


@warpgroup(layout_cast_p)
def _layout_cast(ctx: RuleContext, x: Any) -> Any:
    return _cast(x, ctx.eqn.params["layout"])


def _cast(x: Any, layout: Any) -> Any:
    if layout is None or vals.is_scalar(x):
        return x
    description = to_layout(layout)
    if isinstance(description, WGSplatLayout):
        if splat_source(x) is not None:
            return x
        raise errors.LayoutError(
            "Only a splat has a splat layout",
            expected="a layout with a place for each element",
            got=f"WG_SPLAT for shape {x.shape}",
            hint="cast to another layout",
        )
    attribute = dialect.to_attribute(description)
    return vals.Vector(dialect.ops.layout_cast(x.value, attribute), x.dtype)
