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
from pallas_gpu.emitters.tensor_cores import tmem as emitter
from pallas_gpu.layouts.registers.linear import THREADS
from pallas_gpu.lowering import accesses, waits
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.families import shapes, tmem
from pallas_gpu.lowering.families.tensor_cores import wgmma
from pallas_gpu.lowering.inference.collect import Node, Part, Symbol
from pallas_gpu.lowering.rules import emits, emits_and_relates
from pallas_gpu.primitives.registers import (
    layout_cast_p,
    load_p,
    multiple_of_p,
    store_p,
)
from pallas_gpu.program.nodes import Access

# --- accesses -------------------------------------------------------------------------


@emits_and_relates(load_p)
def _load(on: Any, src: Any, *, layout: Any, optimized: bool | None) -> Any:
    return read(on, src, layout, optimized)


@emits_and_relates(store_p)
def _store(on: Any, dst: Any, value: Any, *, optimized: bool | None) -> None:
    write(on, dst, value, optimized)


@emits_and_relates(_jax.get_p)
def _get(on: Any, ref: Any) -> Any:
    return read(on, ref)


@emits_and_relates(_jax.swap_p)
def _swap(on: Any, ref: Any, value: Any) -> Any:
    old = read(on, ref, like=value) if on.is_read else None
    write(on, ref, value)
    return old


@emits_and_relates(_jax.addupdate_p)
def _addupdate(on: Any, ref: Any, value: Any) -> None:
    operands, slots = [read(on, ref, like=value), value], ["old", "added"]
    total: Any
    if isinstance(on, Node):
        cycles = table.lookup("add").cost(np.dtype(value.dtype), False)
        aval = jax.ShapeDtypeStruct(ref.window.shape, value.dtype)
        total = on.alike(operands, aval, slots, "total", cycles_per_element=cycles)
    else:
        total = elementwise.apply("add", *on.kernel.layouts.alike(on, operands, slots))
    write(on, ref, total)


def read(
    on: RuleContext | Node,
    ref: Any,
    layout: Any = None,
    optimized: bool | None = None,
    reduction: str | None = None,
    like: Any = None,
) -> Any:
    """Loads a part of a reference, in a layout if one is specified.

    Bank conflicts are an error if `optimized`; None avoids them where possible. A
    reduction combines the memory of all devices. `like` is what is combined with it.
    """
    if isinstance(on, Node):
        return _related_read(on, ref, layout, optimized, like)
    match ref.handle:
        case vals.AccumulatorHandle():
            return wgmma.read_accumulator(on, ref, 0)
        case emitter.TmemView():
            loaded = tmem.load(on, ref, ref.dtype)
            emitter.wait_loads()
            return loaded
    view, layouts = on.view(ref), on.kernel.layouts
    if tuple(view.shape) == ():
        loaded = accesses.load_scalar(view, reduction)
        return elementwise.scalar(loaded, ref.handle.dtype)
    if isinstance(view, gmem.GmemView):
        elements = math.prod(view.shape)
        waits.load(on, elements, elements * dtypes.stored_bits(view.dtype) // 8)
    # Where the author chooses, what is combined with a value has its layout.
    chosen = layout or (None if layouts.infers else getattr(like, "layout", None))
    placement = layouts.loaded(on, ref.handle, view, chosen)
    array = accesses.load(on, view, placement, optimized, reduction)
    return array if layout is None else on.operand(array, "cast")


def write(
    on: RuleContext | Node, ref: Any, value: Any, optimized: bool | None = None
) -> None:
    """Stores to a part of a reference, ordered with the warpgroup's accesses."""
    if isinstance(on, Node):
        _related_write(on, ref, value, optimized)
        return
    match ref.handle:
        case vals.AccumulatorHandle():
            wgmma.write_accumulator(on, ref.handle, value)
            return
        case emitter.TmemView():
            tmem.store(on, ref, value)
            emitter.wait_stores()
            return
    view = on.view(ref)
    with on.in_order():
        if tuple(view.shape) == ():
            accesses.store_scalar(view, vals.scalar_value(value))
            return
        array = on.kernel.layouts.stored(on, ref.handle, view, value)
        accesses.store(on, view, array, optimized)


def _related_read(
    node: Node, access: Access, layout: Any, optimized: bool | None, like: Any
) -> Symbol:
    dtype = node.op.results[0].dtype if like is None else like.dtype
    if isinstance(node.reference(access), types.AccumulatorRef):
        return wgmma.read_accumulator(node, access, 0)
    part = node.part(access)
    aval = jax.ShapeDtypeStruct(access.window.shape, dtype)
    if part.space is types.TMEM:
        return tmem.load(node, access, dtype)
    if not aval.shape:
        node.use(part, "indexed")
        return node.scalar(aval, "loaded")
    optimized = _is_optimized(part, optimized)
    variable = node.accessing(part, "load", aval, optimized=optimized)
    loaded = node.make(variable, aval, "loaded")
    return (
        loaded if layout is None else shapes.related_cast(node, loaded, layout, "cast")
    )


def _related_write(
    node: Node, access: Access, value: Symbol, optimized: bool | None
) -> None:
    if isinstance(node.reference(access), types.AccumulatorRef):
        variable = wgmma.accumulator(node, access.buffer.aval)
        node.taken(value, variable, "stored")
        return
    part = node.part(access)
    shape = access.window.shape
    if part.space is types.TMEM:
        tmem.store(node, access, value)
    elif not shape:
        node.use(part, "indexed")
    else:
        aval = jax.ShapeDtypeStruct(shape, value.dtype)
        optimized = _is_optimized(part, optimized)
        variable = node.accessing(part, "store", aval, optimized=optimized)
        node.taken(value, variable, "stored")


def _is_optimized(part: Part, optimized: bool | None) -> bool:
    whole = math.prod(part.window.sizes) % THREADS == 0
    return whole if optimized is None else whole and optimized


# --- layout casts ---------------------------------------------------------------------


@emits_and_relates(layout_cast_p)
def _layout_cast(on: RuleContext | Node, x: Any, *, layout: Any) -> Any:
    if isinstance(on, Node):
        return shapes.related_cast(on, x, layout, 0)
    return x if vals.is_scalar(x) else on.kernel.layouts.cast(on, x, layout)


# --- promises about indices -----------------------------------------------------------


@emits(multiple_of_p)
def _multiple_of(ctx: RuleContext, x: Any, *, divisor: int) -> Any:
    promised = scalars.promise(vals.scalar_value(x), divisor)
    return elementwise.scalar(promised, vals.numpy_dtype(ctx.eqn.invars[0].aval))
