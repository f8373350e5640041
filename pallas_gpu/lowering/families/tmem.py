# SPDX-License-Identifier: Apache-2.0
"""Arrays in TMEM: allocation, loads, stores, and what copies from SMEM require.

A load needs no wait before its values are used: a true dependency of registers is
honoured (PTX ISA, tcgen05 "Memory consistency"). So a relayout of it may stand before
`wait_load_tmem`, which orders accesses to TMEM only.
"""

from __future__ import annotations

from typing import Any

import jax

from pallas_gpu import errors
from pallas_gpu.emitters import registers as regs
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.tensor_cores import tmem
from pallas_gpu.layouts.registers.placement import Placement, describe, place_registers
from pallas_gpu.layouts.tmem.access import register_layouts, transfers
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.families import shapes
from pallas_gpu.lowering.inference.collect import Node, Symbol
from pallas_gpu.lowering.references import Reference
from pallas_gpu.lowering.rules import emits, relates
from pallas_gpu.primitives.tensor_cores import tmem as primitives
from pallas_gpu.program.nodes import Access

# --- arrays ---------------------------------------------------------------------------


def new_array(ctx: RuleContext, aval: Any, first_column: int) -> vals.TmemHandle:
    """Returns the handle of an array that a scope declares."""
    dtype, layout = vals.numpy_dtype(aval), aval.storage.layout
    return vals.TmemHandle(tuple(aval.shape), dtype, first_column, layout)


# --- loads and stores -----------------------------------------------------------------


@emits(primitives.async_load_tmem_p)
def _load(ctx: RuleContext, src: Reference, *, layout: Any) -> Any:
    return ctx.operand(_load_view(ctx.view(src), layout, ctx.target("loaded")))


def _load_view(
    view: tmem.TmemView, layout: Any, assigned: Placement | None = None
) -> Any:
    if assigned is not None:
        return tmem.load(view, assigned)
    if layout is not None:
        return tmem.load(view, place_registers(layout, view.shape))
    bits = dtypes.stored_bits(view.dtype)
    return tmem.load(view, next(register_layouts(view.layout, view.shape, bits)))


def read(ctx: RuleContext, ref: Reference) -> Any:
    """Loads a part of an array, and waits: an index expression."""
    value = _load_view(ctx.view(ref), None, ctx.target("loaded"))
    tmem.wait_loads()
    return value


def write(ctx: RuleContext, ref: Reference, value: Any) -> None:
    """Stores to a part of an array, and waits: an index expression."""
    _store(ctx, ctx.view(ref), value)
    tmem.wait_stores()


@emits(primitives.async_store_tmem_p)
def _store_rule(ctx: RuleContext, ref: Reference, value: Any) -> None:
    _store(ctx, ctx.view(ref), value)


def _store(ctx: RuleContext, part: Any, value: Any) -> None:
    bits = dtypes.stored_bits(part.dtype)
    value = ctx.operand(vals.as_shape(value, part.shape), "stored")
    if isinstance(value, regs.Deferred):
        value = vals.as_shape(value, part.shape)
        value = value.materialize(next(register_layouts(part.layout, part.shape, bits)))
    elif not transfers(value.layout, part.layout, bits):
        raise errors.LayoutError(
            "async_store_tmem: no instruction stores from this register layout",
            expected=" or ".join(
                dict.fromkeys(
                    map(describe, register_layouts(part.layout, part.shape, bits))
                )
            ),
            got=describe(value.layout),
            hint="layout_cast the value, e.g. to plgpu.Layout.TCGEN05",
        )
    tmem.store(part, value)


@emits(primitives.wait_load_tmem_p)
def _wait_load(ctx: RuleContext) -> None:
    tmem.wait_loads()


@emits(primitives.commit_tmem_p)
def _commit(ctx: RuleContext) -> None:
    tmem.wait_stores()


@relates(primitives.async_load_tmem_p)
def _relate_load(node: Node, src: Access, *, layout: Any) -> Symbol:
    loaded = related_load(node, node.part(src), node.op.results[0])
    return loaded if layout is None else shapes.related_cast(node, loaded, layout)


@relates(primitives.async_store_tmem_p)
def _relate_store(node: Node, ref: Access, value: Symbol) -> None:
    related_store(node, node.part(ref), value)


def related_load(node: Node, part: Any, aval: Any, slot: Any = "loaded") -> Symbol:
    """A load of a part of an array."""
    return node.make(node.accessing(part, "load", aval), aval, slot)


def related_store(node: Node, part: Any, value: Symbol) -> None:
    """A store to a part of an array."""
    aval = jax.ShapeDtypeStruct(part.window.shape, value.dtype)
    node.taken(value, node.accessing(part, "store", aval), "stored")
