# SPDX-License-Identifier: Apache-2.0
"""Arrays in TMEM: allocation, loads, stores, and what copies from SMEM require.

A load needs no wait before its values are used: a true dependency of registers is
honoured (PTX ISA, tcgen05 "Memory consistency"). So a relayout of it may stand before
`wait_load_tmem`, which orders accesses to TMEM only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu import errors, types
from pallas_gpu.layouts import TmemLayout
from pallas_gpu.layouts.registers.placement import Placement, describe, place_registers
from pallas_gpu.layouts.tmem.access import register_layouts, transfers
from pallas_gpu.layouts.tmem.layout import COLUMN_BITS
from pallas_gpu.lowering import memrefs
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.expansion.memory import barrier_pointer
from pallas_gpu.lowering.expansion.walk import Expansion
from pallas_gpu.lowering.families import shapes
from pallas_gpu.lowering.families.shapes import as_vector
from pallas_gpu.lowering.inference import sources
from pallas_gpu.lowering.inference.collect import Node, Symbol
from pallas_gpu.lowering.inference.constraints import array_of, use_as_pointers
from pallas_gpu.lowering.inference.network import Key, Network, Use, Variable
from pallas_gpu.lowering.memrefs import Part
from pallas_gpu.lowering.rules import expands, infers, lane, relates, uniform, warpgroup
from pallas_gpu.mosaic import dialect, logical
from pallas_gpu.mosaic import registers as regs
from pallas_gpu.mosaic.elements import dtypes
from pallas_gpu.mosaic.tensor_cores import tmem
from pallas_gpu.primitives.tensor_cores import tmem as primitives

# --- arrays ---------------------------------------------------------------------------


def new_array(ctx: RuleContext, aval: Any, first_column: int) -> vals.TmemHandle:
    """Returns the handle of an array that a scope declares."""
    return ctx.kernel.semantics.tmem_handle(ctx.kernel, aval, first_column)


@infers("mosaic_gpu.tmem_alloc", "mosaic_gpu.slice_tmem")
def _infer_array(network: Network, op: ir.Operation, key: Key) -> None:
    if op.name == "mosaic_gpu.tmem_alloc":
        use_as_pointers(network, op)  # the SMEM word that receives the address
    part = network.part(op.results[0])
    assert part is not None
    network.use_memory(Use(op, "alloc", part, network.weight))


@expands("mosaic_gpu.tmem_alloc")
def _expand_alloc(expansion: Expansion, op: Any) -> None:
    plan = expansion.kernel.plan
    expansion.kernel.tmem = tmem.allocate(
        barrier_pointer(op.operands[0]),
        plan.tmem_columns,
        collective=plan.collective_tmem,
        barriers=plan.barriers > 0,
    )
    expansion.dead.append(op.operation)


@expands("mosaic_gpu.slice_tmem", "mosaic_gpu.tmem_layout_cast")
def _expand_array(expansion: Expansion, op: Any) -> None:
    expansion.dead.append(op.operation)


def tmem_view(expansion: Expansion, ref: ir.Value) -> tmem.TmemView:
    """Returns the emitters' view of a memref in TMEM."""
    part = memrefs.resolve(ref)
    if part is None or part.space is not types.TMEM:
        raise errors.InternalError("not an array in TMEM", got=str(ref))
    column = ir.IntegerAttr(part.base.owner.attributes["offset"]).value
    return tmem.TmemView(
        expansion.kernel.tmem,
        column,
        expansion.assignment.tmem(part.base),
        logical.dtype_of(part.base.type),
        part.window,
    )


@infers("mosaic_gpu.tmem_layout_cast")
def _infer_layout_cast(network: Network, op: ir.Operation, key: Key) -> None:
    def admitted() -> TmemLayout:
        return dialect.tmem_from_attribute(op.attributes["new_layout"])

    require(network, op, 0, "", admitted)


# --- loads and stores -----------------------------------------------------------------


@lane(primitives.async_load_tmem_p)
def _load_lane(ctx: RuleContext, *invals: Any) -> Any:
    view, layout = ctx.part(ctx.operands(invals)["src"]), ctx.eqn.params["layout"]
    loaded = _load_view(view, layout, ctx.target("loaded"))
    return ctx.operand(loaded)


def _load_view(
    view: tmem.TmemView, layout: Any, assigned: Placement | None = None
) -> Any:
    if assigned is not None:
        return tmem.load(view, assigned)
    if layout is not None:
        return tmem.load(view, place_registers(layout, view.shape))
    bits = dtypes.stored_bits(view.dtype)
    return tmem.load(view, next(register_layouts(view.layout, view.shape, bits)))


@warpgroup(primitives.async_load_tmem_p)
def _load_warpgroup(ctx: RuleContext, *invals: Any) -> Any:
    src = ctx.operands(invals)["src"]
    return _load_vector(ctx, ctx.part(src), src.ref.dtype, ctx.eqn.params["layout"])


def _load_vector(ctx: RuleContext, part: Any, dtype: Any, layout: Any) -> Any:
    loaded = vals.Vector(dialect.ops.async_load_tmem(part), dtype)
    if layout is None:
        return loaded
    return ctx.kernel.semantics.layout_cast(ctx, loaded, layout)


def read(ctx: RuleContext, handle: vals.TmemHandle, transforms: Any) -> Any:
    """Loads a part of an array, and waits: an index expression."""
    part = ctx.kernel.semantics.part(ctx, handle, transforms)
    if isinstance(part, tmem.TmemView):
        value = _load_view(part, None, ctx.target("loaded"))
    else:
        value = _load_vector(ctx, part, handle.dtype, None)
    tmem.wait_loads()
    return value


def write(
    ctx: RuleContext, handle: vals.TmemHandle, transforms: Any, value: Any
) -> None:
    """Stores to a part of an array, and waits: an index expression."""
    _store(ctx, ctx.kernel.semantics.part(ctx, handle, transforms), value)
    tmem.wait_stores()


@uniform(primitives.async_store_tmem_p)
def _store_rule(ctx: RuleContext, *invals: Any) -> list[Any]:
    operands = ctx.operands(invals)
    _store(ctx, ctx.part(operands["ref"]), operands["value"])
    return []


def _store(ctx: RuleContext, part: Any, value: Any) -> None:
    if not isinstance(part, tmem.TmemView):
        shape = tuple(part.type.shape)
        dialect.ops.async_store_tmem(as_vector(value, shape).value, part)
        return
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


@uniform(primitives.wait_load_tmem_p)
def _wait_load(ctx: RuleContext) -> list[Any]:
    tmem.wait_loads()
    return []


@uniform(primitives.commit_tmem_p)
def _commit(ctx: RuleContext) -> list[Any]:
    tmem.wait_stores()
    return []


@relates(primitives.async_load_tmem_p)
def _relate_load(node: Node, *_: Any) -> Symbol:
    (aval,), layout = node.op.results, node.params["layout"]
    loaded = related_load(node, node.part(node.operands["src"]), aval)
    return loaded if layout is None else shapes.related_cast(node, loaded, layout)


@relates(primitives.async_store_tmem_p)
def _relate_store(node: Node, *_: Any) -> list[Any]:
    operands = node.operands
    related_store(node, node.part(operands["ref"]), operands["value"])
    return []


@infers("mosaic_gpu.async_load_tmem")
def _infer_load(network: Network, op: ir.Operation, key: Key) -> None:
    if "reduce" in op.attributes:
        raise errors.UnsupportedError(
            "Loads from TMEM with a reduction are not supported",
            expected="async_load_tmem without a reduction",
            got=op.attributes["reduce"],
            hint="reduce the loaded array",
            where=sources.where(op),
        )
    use = Use(op, "load", array_of(network, op, 0), network.weight)
    network.use_memory(use)
    variable = network.variable(op, op.results[0].type, key, access=use)
    _note_access(variable, use)
    network.produce(op.results[0], variable)


@expands("mosaic_gpu.async_load_tmem")
def _expand_load(expansion: Expansion, op: Any) -> None:
    placement = expansion.assignment.result(op.results[0])
    assert placement is not None
    view = tmem_view(expansion, op.operands[0])
    expansion.set(op.results[0], tmem.load(view, placement))
    expansion.dead.append(op.operation)


@expands("mosaic_gpu.async_store_tmem")
def _expand_store(expansion: Expansion, op: Any) -> None:
    view = tmem_view(expansion, op.operands[1])
    value = regs.with_sign(expansion.placed(op, 0), view.dtype)
    assert isinstance(value, regs.RegisterArray)
    tmem.store(view, value)
    expansion.dead.append(op.operation)


@infers("mosaic_gpu.async_store_tmem")
def _infer_store(network: Network, op: ir.Operation, key: Key) -> None:
    use = Use(op, "store", array_of(network, op, 1), network.weight)
    network.use_memory(use)
    variable = network.variable(op, op.operands[0].type, key, access=use)
    _note_access(variable, use)
    network.consume(op, 0, variable)


def related_load(node: Node, part: Any, aval: Any, slot: Any = "loaded") -> Symbol:
    """A load of a part of an array."""
    use = node.use(part, "load")
    like = Symbol(tuple(aval.shape), np.dtype(aval.dtype), lambda: 0)
    variable = node.variable(like, access=use)
    _note_access(variable, use)
    return node.make(variable, aval, slot)


def related_store(node: Node, part: Any, value: Symbol) -> None:
    """A store to a part of an array."""
    use = node.use(part, "store")
    shape = part.window.shape
    variable = node.variable(Symbol(shape, value.dtype, lambda: 0), access=use)
    _note_access(variable, use)
    node.taken(value, variable, "stored")


def _note_access(variable: Variable, use: Use) -> None:
    variable.source.loads.add(use.part.bits)
    variable.source.tmem[use.part.base] = None


# --- copies from SMEM -----------------------------------------------------------------


def related_contiguous_copy(node: Node, *admitted: TmemLayout) -> list[Any]:
    """Of a copy from contiguous SMEM to an array in one of some layouts."""
    operands = node.operands
    node.use(node.part(operands["smem"]), "pointer")
    node.use(node.part(operands["tmem"]), "constrain", admitted=admitted)
    return []


def constrain(node: Node, part: Any, role: str, make: Callable[[], TmemLayout]) -> None:
    """Constrains an operand in TMEM to the layout that `make` returns."""
    try:
        admitted = make()
    except errors.LayoutError as error:
        name = f"{role} of {node.words}" if role else node.words
        raise errors.LayoutError(
            f"{name}: {error.what}",
            expected=error.expected,
            got=error.got,
            hint=error.hint,
            where=node.where,
        ) from None
    node.use(part, "constrain", role=role, admitted=(admitted,))


def infer_contiguous_copy(
    network: Network, op: ir.Operation, *admitted: TmemLayout
) -> None:
    """Of a copy from contiguous SMEM to an array in one of some layouts."""
    source, target = array_of(network, op, 0), array_of(network, op, 1)
    network.use_memory(Use(op, "pointer", source, network.weight))
    network.use_memory(Use(op, "constrain", target, network.weight, admitted=admitted))


def packed(part: Part) -> TmemLayout:
    """Columns packed with elements, as in operands."""
    return TmemLayout.default(COLUMN_BITS // part.bits)


def require(
    network: Network,
    op: ir.Operation,
    i: int,
    role: str,
    make: Callable[[], TmemLayout],
) -> None:
    """Constrains operand `i`, an array in TMEM, to the layout that `make` returns."""
    try:
        admitted = make()
    except errors.LayoutError as error:
        where = sources.where(op)
        name = f"{role} of {sources.words(op)}" if role else sources.words(op)
        raise errors.LayoutError(
            f"{name}: {error.what}",
            expected=error.expected,
            got=error.got,
            hint=error.hint,
            where=where,
        ) from None
    view = array_of(network, op, i)
    use = Use(op, "constrain", view, network.weight, role=role, admitted=(admitted,))
    network.use_memory(use)
