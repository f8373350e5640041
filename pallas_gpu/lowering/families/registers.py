# SPDX-License-Identifier: Apache-2.0
"""Loads, stores and updates of references, loads with a layout, layout casts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pallas_gpu import _jax, types
from pallas_gpu.layouts.registers.linear import THREADS
from pallas_gpu.lowering import accesses
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext, unflatten_transforms
from pallas_gpu.lowering.families import shapes, tmem
from pallas_gpu.lowering.families.tensor_cores import wgmma
from pallas_gpu.lowering.inference.collect import Node, Part, Symbol
from pallas_gpu.lowering.inference.network import Use, Variable
from pallas_gpu.lowering.rules import emits, relates
from pallas_gpu.mosaic import elementwise
from pallas_gpu.mosaic.elements import scalars, table
from pallas_gpu.mosaic.tensor_cores import wgmma as mosaic_wgmma
from pallas_gpu.primitives import _operands as ops
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
def _load(ctx: RuleContext, *invals: Any) -> Any:
    src = ctx.operands(invals)["src"]
    layout, optimized = (ctx.eqn.params[name] for name in ("layout", "optimized"))
    return _read_memory(ctx, src.ref, src.transforms, layout, optimized)


def _read_memory(
    ctx: RuleContext,
    handle: Any,
    transforms: Any,
    layout: Any = None,
    optimized: bool | None = None,
) -> Any:
    """Loads a part of a reference, in a layout if one is specified.

    Bank conflicts are an error if `optimized`; None avoids them where possible.
    """
    view = ctx.view(handle, transforms)
    if tuple(view.shape) == ():
        return elementwise.scalar(accesses.load_scalar(view), handle.dtype)
    placement = ctx.kernel.layouts.loaded(ctx, handle, view, layout)
    array = accesses.load(view, placement, optimized, lambda: ctx.op.where)
    return array if layout is None else ctx.operand(array, "cast")


# --- stores ---------------------------------------------------------------------------


@emits(store_p)
def _store(ctx: RuleContext, *invals: Any) -> list[Any]:
    dst = ctx.operands(invals)["dst"]
    value = ops.unflatten(ctx.eqn.params["tree"], list(invals))["value"]
    _write_memory(ctx, dst.ref, dst.transforms, value, ctx.eqn.params["optimized"])
    return []


def _write_memory(
    ctx: RuleContext,
    handle: Any,
    transforms: Any,
    value: Any,
    optimized: bool | None = None,
) -> None:
    """Stores to a part of a reference, ordered with the warpgroup's accesses."""
    view = ctx.view(handle, transforms)
    with ctx.in_order():
        if tuple(view.shape) == ():
            accesses.store_scalar(view, vals.scalar_value(value))
            return
        array = ctx.kernel.layouts.stored(ctx, handle, view, value)
        accesses.store(view, array, lambda: ctx.op.where, optimized)


def _note_access(variable: Variable, use: Use) -> None:
    cell = variable.source
    in_smem = use.part.space is types.SMEM
    cell.loads.add(use.part.bits)
    cell.in_smem |= in_smem
    cell.in_gmem |= not in_smem
    cell.transposed |= use.part.window.is_transposed


# --- relations ------------------------------------------------------------------------


def _relate_read(
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
    use = node.use(part, "load", optimized=_is_optimized(part, optimized))
    variable = node.variable(aval, access=use)
    _note_access(variable, use)
    loaded = node.make(variable, aval, "loaded")
    return (
        loaded if layout is None else shapes.related_cast(node, loaded, layout, "cast")
    )


def _relate_write(
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
    use = node.use(part, "store", optimized=_is_optimized(part, optimized))
    variable = node.variable(jax.ShapeDtypeStruct(shape, value.dtype), access=use)
    _note_access(variable, use)
    node.taken(value, variable, "stored")


def _is_optimized(part: Part, optimized: bool | None) -> bool:
    whole = math.prod(part.window.sizes) % THREADS == 0
    return whole if optimized is None else whole and optimized


@relates(load_p)
def _relate_load(node: Node, *_: Any) -> Symbol:
    params = node.params
    return _relate_read(
        node, node.operands["src"], params["layout"], params["optimized"]
    )


@relates(store_p)
def _relate_store(node: Node, *_: Any) -> list[Any]:
    operands = node.operands
    _relate_write(node, operands["dst"], operands["value"], node.params["optimized"])
    return []


@relates(_jax.get_p)
def _relate_get(node: Node, *_: Any) -> Symbol:
    return _relate_read(node, node.operands["ref"])


@relates(_jax.swap_p)
def _relate_swap(node: Node, *_: Any) -> Symbol:
    access, (aval,) = node.operands["ref"], node.op.results
    old = node.defer("splat", aval)
    if node.is_read:
        old = _relate_read(node, access)
    _relate_write(node, access, node.operands["value"])
    return old


@relates(_jax.addupdate_p)
def _relate_addupdate(node: Node, *_: Any) -> list[Any]:
    access, value = node.operands["ref"], node.operands["value"]
    old = _relate_read(node, access, dtype=value.dtype)
    cycles = table.lookup("add").cost(np.dtype(value.dtype), False)
    aval = jax.ShapeDtypeStruct(access.window.shape, value.dtype)
    total = node.alike(
        [old, value], aval, ["old", "added"], "total", cycles_per_element=cycles
    )
    _relate_write(node, access, total)
    return []


@relates(layout_cast_p)
def _relate_layout_cast(node: Node, x: Symbol) -> Symbol:
    return shapes.related_cast(node, x, node.params["layout"], 0)


# --- JAX's reads and writes of references ---------------------------------------------


@emits(_jax.get_p)
def _get(ctx: RuleContext, handle: Any, *leaves: Any) -> Any:
    return _read(ctx, handle, _transforms(ctx, leaves), None)


@emits(_jax.swap_p)
def _swap(ctx: RuleContext, handle: Any, value: Any, *leaves: Any) -> Any:
    transforms = _transforms(ctx, leaves)
    old = _read(ctx, handle, transforms, value) if ctx.result_is_read else None
    _write(ctx, handle, transforms, value)
    return old


@emits(_jax.addupdate_p)
def _addupdate(ctx: RuleContext, handle: Any, value: Any, *leaves: Any) -> list[Any]:
    transforms = _transforms(ctx, leaves)
    old = _read(ctx, handle, transforms, value)
    alike = ctx.kernel.layouts.alike(ctx, [old, value], ["old", "added"])
    _write(ctx, handle, transforms, elementwise.apply("add", *alike))
    return []


def _transforms(ctx: RuleContext, leaves: Sequence[Any]) -> tuple[Any, ...]:
    return unflatten_transforms(ctx.eqn.params["tree"], leaves)


def _read(ctx: RuleContext, handle: Any, transforms: Any, other: Any) -> Any:
    if isinstance(handle, vals.AccumulatorHandle):
        return wgmma.read_accumulator(ctx, handle, transforms, 0)
    if isinstance(handle, vals.TmemHandle):
        return tmem.read(ctx, handle, transforms)
    # Where the author chooses, what is combined with a value has its layout.
    layout = None if ctx.kernel.layouts.infers else getattr(other, "layout", None)
    return _read_memory(ctx, handle, transforms, layout)


def _write(ctx: RuleContext, handle: Any, transforms: Any, value: Any) -> None:
    if isinstance(handle, vals.AccumulatorHandle):
        wgmma.write_accumulator(ctx, handle, value)
    elif isinstance(handle, vals.TmemHandle):
        tmem.write(ctx, handle, transforms, value)
    else:
        _write_memory(ctx, handle, transforms, value)


# --- layout casts ---------------------------------------------------------------------


@emits(layout_cast_p)
def _layout_cast(ctx: RuleContext, x: Any) -> Any:
    if vals.is_scalar(x):
        return x
    return ctx.kernel.layouts.cast(ctx, x, ctx.eqn.params["layout"])


# --- registers per thread -------------------------------------------------------------


@emits(set_max_registers_p)
def _set_max_registers(ctx: RuleContext) -> list[Any]:
    params = ctx.eqn.params
    mosaic_wgmma.set_max_registers(params["n"], params["action"])
    return []


# --- promises about indices -----------------------------------------------------------


@emits(multiple_of_p)
def _multiple_of(ctx: RuleContext, x: Any) -> Any:
    promised = scalars.promise(vals.scalar_value(x), ctx.eqn.params["divisor"])
    return elementwise.scalar(promised, vals.numpy_dtype(ctx.eqn.invars[0].aval))
