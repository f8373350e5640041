# SPDX-License-Identifier: Apache-2.0
"""Reads and writes of references, loads with a layout, layout casts."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir.dialects import memref

from pallas_gpu import errors
from pallas_gpu.layouts import WGSplatLayout, to_layout
from pallas_gpu.lowering import access, warp
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.rules import warpgroup
from pallas_gpu.lowering.warpgroup import elementwise, memory, wgmma
from pallas_gpu.lowering.warpgroup.shapes import as_vector, element, splat_source
from pallas_gpu.mosaic import dialect, mbarrier
from pallas_gpu.mosaic import registers as regs
from pallas_gpu.mosaic.elements import arithmetic, convert, dtypes
from pallas_gpu.primitives.registers import layout_cast_p, load_p


def read(handle: vals.MemrefHandle, transforms: Any, optimized: bool = True) -> Any:
    """Loads a part of a reference."""
    source = memory.part(handle, transforms)
    stored = dtypes.memory_dtype(handle.dtype)
    if not source.type.shape:
        value = dtypes.bitcast(memref.load(source, []), stored)
        single = convert.convert_value(value, stored, handle.dtype)
        return regs.Splat(single, handle.dtype, ())
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
        warp.mark_scope(ctx, memref.store(element(single, stored), target, []))
    else:
        vector = as_vector(value, tuple(target.type.shape))
        dialect.ops.vector_store(elementwise.convert(vector, stored).value, target)
    if automatic:
        mbarrier.meet()


def _add(old: Any, value: Any) -> Any:
    if vals.is_scalar(old):
        total = arithmetic.emit("add", old.dtype, old.value, vals.scalar_value(value))
        return regs.Splat(total, old.dtype, ())
    return elementwise.emit("add", [old, value], old.dtype, old.shape)


access.enter_rules(
    warpgroup,
    read=lambda ctx, handle, transforms, like: read(handle, transforms),
    write=write,
    add=_add,
    accumulators=wgmma,
)


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
