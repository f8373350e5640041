# SPDX-License-Identifier: Apache-2.0
"""Loads, stores and updates of references, loads with a layout, layout casts."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from pallas_gpu import _jax, types
from pallas_gpu.emitters import elementwise, gmem
from pallas_gpu.emitters.elements import dtypes, scalars, table
from pallas_gpu.emitters.tensor_cores import wgmma as wgmma_emitter
from pallas_gpu.layouts.registers.linear import THREADS
from pallas_gpu.lowering import accesses, waits
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.families import shapes, tmem
from pallas_gpu.lowering.families.tensor_cores import wgmma
from pallas_gpu.lowering.inference.collect import Node, Part, Symbol
from pallas_gpu.lowering.references import Reference
from pallas_gpu.lowering.rules import emits, relates
from pallas_gpu.primitives.registers import (
    layout_cast_p,
    load_p,
    multiple_of_p,
    set_max_registers_p,
    store_p,
)
from pallas_gpu.program.nodes import Access

# --- loads ----------------------------------------------------------------------------


@emits(load_p)
def _load(ctx: RuleContext, src: Reference, *, layout: Any, optimized: Any) -> Any:
    return read_memory(ctx, src, layout, optimized)


def read_memory(
    ctx: RuleContext,
    ref: Reference,
    layout: Any = None,
    optimized: bool | None = None,
    reduction: str | None = None,
) -> Any:
    """Loads a part of a reference, in a layout if one is specified.

    Bank conflicts are an error if `optimized`; None avoids them where possible. A
    reduction combines the memory of all devices.
    """
    view = ctx.view(ref)
    if tuple(view.shape) == ():
        loaded = accesses.load_scalar(view, reduction)
        return elementwise.scalar(loaded, ref.handle.dtype)
    if isinstance(view, gmem.GmemView):
        elements = math.prod(view.shape)
        waits.load(ctx, elements, elements * dtypes.stored_bits(view.dtype) // 8)
    placement = ctx.kernel.layouts.loaded(ctx, ref.handle, view, layout)
    array = accesses.load(view, placement, optimized, lambda: ctx.op.where, reduction)
    return array if layout is None else ctx.operand(array, "cast")


# --- stores ---------------------------------------------------------------------------


@emits(store_p)
def _store(ctx: RuleContext, dst: Reference, value: Any, *, optimized: Any) -> None:
    write_memory(ctx, dst, value, optimized)


def write_memory(
    ctx: RuleContext, ref: Reference, value: Any, optimized: bool | None = None
) -> None:
    """Stores to a part of a reference, ordered with the warpgroup's accesses."""
    view = ctx.view(ref)
    with ctx.in_order():
        if tuple(view.shape) == ():
            accesses.store_scalar(view, vals.scalar_value(value))
            return
        array = ctx.kernel.layouts.stored(ctx, ref.handle, view, value)
        accesses.store(view, array, lambda: ctx.op.where, optimized)


# --- relations ------------------------------------------------------------------------


def relate_read(
    node: Node,
    access: Access,
    layout: Any = None,
    optimized: bool | None = None,
    dtype: Any = None,
) -> Symbol:
    """A load of a part of a reference."""
    if dtype is None:
        dtype = node.op.results[0].dtype
    reference = node.reference(access)
    if isinstance(reference, types.AccumulatorRef):
        return wgmma.related_read(node, access)
    part = node.part(access)
    aval = jax.ShapeDtypeStruct(access.window.shape, dtype)
    if part.space is types.TMEM:
        return tmem.related_load(node, part, aval)
    if not aval.shape:
        node.use(part, "indexed")
        return node.scalar(aval, "loaded")
    optimized = _is_optimized(part, optimized)
    variable = node.accessing(part, "load", aval, optimized=optimized)
    loaded = node.make(variable, aval, "loaded")
    return (
        loaded if layout is None else shapes.related_cast(node, loaded, layout, "cast")
    )


def relate_write(
    node: Node, access: Access, value: Symbol, optimized: bool | None = None
) -> None:
    """A store to a part of a reference."""
    reference = node.reference(access)
    if isinstance(reference, types.AccumulatorRef):
        wgmma.related_write(node, access, value)
        return
    part = node.part(access)
    shape = access.window.shape
    if part.space is types.TMEM:
        tmem.related_store(node, part, value)
        return
    if not shape:
        node.use(part, "indexed")
        return
    aval = jax.ShapeDtypeStruct(shape, value.dtype)
    optimized = _is_optimized(part, optimized)
    variable = node.accessing(part, "store", aval, optimized=optimized)
    node.taken(value, variable, "stored")


def _is_optimized(part: Part, optimized: bool | None) -> bool:
    whole = math.prod(part.window.sizes) % THREADS == 0
    return whole if optimized is None else whole and optimized


@relates(load_p)
def _relate_load(node: Node, src: Access, *, layout: Any, optimized: Any) -> Symbol:
    return relate_read(node, src, layout, optimized)


@relates(store_p)
def _relate_store(node: Node, dst: Access, value: Symbol, *, optimized: Any) -> None:
    relate_write(node, dst, value, optimized)


@relates(_jax.get_p)
def _relate_get(node: Node, ref: Access) -> Symbol:
    return relate_read(node, ref)


@relates(_jax.swap_p)
def _relate_swap(node: Node, ref: Access, value: Symbol) -> Symbol:
    old = node.defer("splat", node.op.results[0])
    if node.is_read:
        old = relate_read(node, ref)
    relate_write(node, ref, value)
    return old


@relates(_jax.addupdate_p)
def _relate_addupdate(node: Node, ref: Access, value: Symbol) -> None:
    old = relate_read(node, ref, dtype=value.dtype)
    cycles = table.lookup("add").cost(np.dtype(value.dtype), False)
    aval = jax.ShapeDtypeStruct(ref.window.shape, value.dtype)
    total = node.alike(
        [old, value], aval, ["old", "added"], "total", cycles_per_element=cycles
    )
    relate_write(node, ref, total)


@relates(layout_cast_p)
def _relate_layout_cast(node: Node, x: Symbol, *, layout: Any) -> Symbol:
    return shapes.related_cast(node, x, layout, 0)


# --- JAX's reads and writes of references ---------------------------------------------


@emits(_jax.get_p)
def _get(ctx: RuleContext, ref: Reference) -> Any:
    return _read(ctx, ref)


@emits(_jax.swap_p)
def _swap(ctx: RuleContext, ref: Reference, value: Any) -> Any:
    old = _read(ctx, ref, value) if ctx.result_is_read else None
    _write(ctx, ref, value)
    return old


@emits(_jax.addupdate_p)
def _addupdate(ctx: RuleContext, ref: Reference, value: Any) -> None:
    old = _read(ctx, ref, value)
    alike = ctx.kernel.layouts.alike(ctx, [old, value], ["old", "added"])
    _write(ctx, ref, elementwise.apply("add", *alike))


def _read(ctx: RuleContext, ref: Reference, other: Any = None) -> Any:
    """Loads a part, to combine it with another value if there is one."""
    match ref.handle:
        case vals.AccumulatorHandle():
            return wgmma.read_accumulator(ctx, ref, 0)
        case vals.TmemHandle():
            return tmem.read(ctx, ref)
    # Where the author chooses, what is combined with a value has its layout.
    layout = None if ctx.kernel.layouts.infers else getattr(other, "layout", None)
    return read_memory(ctx, ref, layout)


def _write(ctx: RuleContext, ref: Reference, value: Any) -> None:
    match ref.handle:
        case vals.AccumulatorHandle():
            wgmma.write_accumulator(ctx, ref.handle, value)
        case vals.TmemHandle():
            tmem.write(ctx, ref, value)
        case _:
            write_memory(ctx, ref, value)


# --- layout casts ---------------------------------------------------------------------


@emits(layout_cast_p)
def _layout_cast(ctx: RuleContext, x: Any, *, layout: Any) -> Any:
    return x if vals.is_scalar(x) else ctx.kernel.layouts.cast(ctx, x, layout)


# --- registers per thread -------------------------------------------------------------


@emits(set_max_registers_p)
def _set_max_registers(ctx: RuleContext, *, n: int, action: Any) -> None:
    wgmma_emitter.set_max_registers(n, action)


# --- promises about indices -----------------------------------------------------------


@emits(multiple_of_p)
def _multiple_of(ctx: RuleContext, x: Any, *, divisor: int) -> Any:
    promised = scalars.promise(vals.scalar_value(x), divisor)
    return elementwise.scalar(promised, vals.numpy_dtype(ctx.eqn.invars[0].aval))
