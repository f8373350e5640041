# SPDX-License-Identifier: Apache-2.0
"""Loads, stores and updates of references, loads with a layout, layout casts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxlib.mlir import ir

from pallas_gpu import _jax, errors, types
from pallas_gpu.layouts import WGSplatLayout
from pallas_gpu.layouts.registers.linear import THREADS
from pallas_gpu.layouts.registers.placement import place
from pallas_gpu.lowering import accesses
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext, unflatten_transforms
from pallas_gpu.lowering.expansion.memory import view
from pallas_gpu.lowering.expansion.walk import Expansion
from pallas_gpu.lowering.families import shapes, tmem
from pallas_gpu.lowering.families.tensor_cores import wgmma
from pallas_gpu.lowering.inference import sources
from pallas_gpu.lowering.inference.collect import Node, Part, Symbol
from pallas_gpu.lowering.inference.constraints import array_of
from pallas_gpu.lowering.inference.network import Key, Network, Use, Variable
from pallas_gpu.lowering.rules import expands, infers, relates, uniform
from pallas_gpu.mosaic import dialect, elementwise, logical
from pallas_gpu.mosaic import registers as regs
from pallas_gpu.mosaic.elements import dtypes, scalars, table
from pallas_gpu.mosaic.registers import default_placement
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


@uniform(load_p)
def _load(ctx: RuleContext, *invals: Any) -> Any:
    src = ctx.operands(invals)["src"]
    layout, optimized = (ctx.eqn.params[name] for name in ("layout", "optimized"))
    return ctx.kernel.semantics.read(ctx, src.ref, src.transforms, layout, optimized)


@infers("mosaic_gpu.vector_load")
def _infer_load(network: Network, op: ir.Operation, key: Key) -> None:
    use = _access(network, op, 0)
    variable = network.variable(op, op.results[0].type, key, access=use)
    _note_access(variable, use)
    network.produce(op.results[0], variable)


@expands("mosaic_gpu.vector_load")
def _expand_load(expansion: Expansion, op: Any) -> None:
    source = view(expansion, op.operands[0])
    placement = expansion.assignment.result(op.result)
    if placement is None:
        placement = default_placement(tuple(source.shape), dtypes.bits(source.dtype))
    array = accesses.load(
        source, placement, _optimized(op), lambda: sources.where(op.operation)
    )
    expansion.set(op.result, array)
    expansion.dead.append(op.operation)


def _optimized(op: Any) -> bool | None:
    """Whether bank conflicts are refused, True, or accepted; None: with a warning."""
    if "optimized" not in op.attributes:
        return None
    return ir.BoolAttr(op.attributes["optimized"]).value


# --- stores ---------------------------------------------------------------------------


@uniform(store_p)
def _store(ctx: RuleContext, *invals: Any) -> list[Any]:
    dst = ctx.operands(invals)["dst"]
    value = ops.unflatten(ctx.eqn.params["tree"], list(invals))["value"]
    optimized = ctx.eqn.params["optimized"]
    ctx.kernel.semantics.write(ctx, dst.ref, dst.transforms, value, optimized)
    return []


@infers("mosaic_gpu.vector_store")
def _infer_store(network: Network, op: ir.Operation, key: Key) -> None:
    use = _access(network, op, 1)
    variable = network.variable(op, op.operands[0].type, key, access=use)
    _note_access(variable, use)
    network.consume(op, 0, variable)


@expands("mosaic_gpu.vector_store")
def _expand_store(expansion: Expansion, op: Any) -> None:
    target = view(expansion, op.operands[1])
    array = expansion.placed(op, 0)
    array = regs.with_sign(array, target.dtype)
    assert isinstance(array, regs.RegisterArray)
    accesses.store(target, array, lambda: sources.where(op.operation), _optimized(op))
    expansion.dead.append(op.operation)


def _access(network: Network, op: ir.Operation, i: int) -> Use:
    part = array_of(network, op, i)
    optimized = math.prod(part.window.sizes) % THREADS == 0
    if "optimized" in op.attributes:
        optimized &= ir.BoolAttr(op.attributes["optimized"]).value
    use = Use(op, "store" if i else "load", part, network.weight, optimized)
    network.use_memory(use)
    return use


def _note_access(variable: Variable, use: Use) -> None:
    cell = variable.source
    in_smem = use.part.space is types.SMEM
    cell.loads.add(use.part.bits)
    cell.in_smem |= in_smem
    cell.in_gmem |= not in_smem
    cell.transposed |= use.part.window.is_transposed


@infers("memref.load", "memref.store")
def _infer_element(network: Network, op: ir.Operation, key: Key) -> None:
    i = 0 if op.name == "memref.load" else 1
    part = network.part(op.operands[i])
    if part is not None:
        network.use_memory(Use(op, "indexed", part, network.weight))


@expands("memref.load")
def _expand_load_element(expansion: Expansion, op: Any) -> None:
    source = view(expansion, op.operands[0])
    expansion.dead.append(op.operation)
    logical.replace_element(op.result, accesses.load_scalar(source), expansion.dead)


@expands("memref.store")
def _expand_store_element(expansion: Expansion, op: Any) -> None:
    value, ref = op.operands[0], op.operands[1]
    target = view(expansion, ref)
    accesses.store_scalar(target, logical.from_element(value, target.dtype))
    expansion.dead.append(op.operation)


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
    symbol = Symbol(aval.shape, np.dtype(aval.dtype), lambda: 0)
    variable = node.variable(symbol, access=use)
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
    symbol = Symbol(shape, np.dtype(value.dtype), lambda: 0)
    variable = node.variable(symbol, access=use)
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


@uniform(_jax.get_p)
def _get(ctx: RuleContext, handle: Any, *leaves: Any) -> Any:
    return _read(ctx, handle, _transforms(ctx, leaves), None)


@uniform(_jax.swap_p)
def _swap(ctx: RuleContext, handle: Any, value: Any, *leaves: Any) -> Any:
    transforms = _transforms(ctx, leaves)
    old = _read(ctx, handle, transforms, value) if ctx.result_is_read else None
    _write(ctx, handle, transforms, value)
    return old


@uniform(_jax.addupdate_p)
def _addupdate(ctx: RuleContext, handle: Any, value: Any, *leaves: Any) -> list[Any]:
    transforms = _transforms(ctx, leaves)
    old = _read(ctx, handle, transforms, value)
    _write(ctx, handle, transforms, ctx.kernel.semantics.add(ctx, old, value))
    return []


def _transforms(ctx: RuleContext, leaves: Sequence[Any]) -> tuple[Any, ...]:
    return unflatten_transforms(ctx.eqn.params["tree"], leaves)


def _read(ctx: RuleContext, handle: Any, transforms: Any, other: Any) -> Any:
    if isinstance(handle, vals.AccumulatorHandle):
        return wgmma.read_accumulator(ctx, handle, transforms, 0)
    if isinstance(handle, vals.TmemHandle):
        return tmem.read(ctx, handle, transforms)
    return ctx.kernel.semantics.read_for(ctx, handle, transforms, other)


def _write(ctx: RuleContext, handle: Any, transforms: Any, value: Any) -> None:
    if isinstance(handle, vals.AccumulatorHandle):
        wgmma.write_accumulator(ctx, handle, value)
    elif isinstance(handle, vals.TmemHandle):
        tmem.write(ctx, handle, transforms, value)
    else:
        ctx.kernel.semantics.write(ctx, handle, transforms, value)


# --- layout casts ---------------------------------------------------------------------


@uniform(layout_cast_p)
def _layout_cast(ctx: RuleContext, x: Any) -> Any:
    return ctx.kernel.semantics.layout_cast(ctx, x, ctx.eqn.params["layout"])


@infers("mosaic_gpu.layout_cast")
def _infer_layout_cast(network: Network, op: ir.Operation, key: Key) -> None:
    operand, result = op.operands[0], op.results[0]
    shape, _ = network.vector_type(result.type)
    layout = dialect.from_attribute(op.attributes["new_layout"])
    if isinstance(layout, WGSplatLayout) and network.deferred.get(operand) == "splat":
        network.defer(result, "splat")
        return
    try:
        placement = place(layout, shape)
    except errors.LayoutError as error:
        raise errors.LayoutError(
            f"layout_cast: an array of shape {shape} does not fit the layout",
            expected=error.expected,
            got=error.got,
            hint=f"{error.what}: cast to a layout that fits the shape, or remove the "
            "layout_cast",
            where=sources.where(op),
        ) from None
    if isinstance(placement, WGSplatLayout):
        made_by = operand.owner
        producer = sources.named(made_by.operation) if _is_op(made_by) else "a loop"
        raise errors.LayoutError(
            "layout_cast to WG_SPLAT: the elements of the array may differ",
            expected="a splat: a scalar broadcast to a shape",
            got=f"an array of shape {shape} from {producer}",
            hint="remove the layout_cast: a splat is broadcast to any layout",
            where=sources.where(op),
        )
    variable = network.variable(op, result.type, key, fixed=placement)
    network.consume(op, 0, variable)
    network.produce(result, variable)


def _is_op(owner: object) -> bool:
    return not isinstance(owner, ir.Block)


@expands("mosaic_gpu.layout_cast")
def _expand_layout_cast(expansion: Expansion, op: Any) -> None:
    expansion.set(op.result, expansion.operand(op, 0))
    expansion.dead.append(op.operation)


# --- registers per thread -------------------------------------------------------------


@uniform(set_max_registers_p)
def _set_max_registers(ctx: RuleContext) -> list[Any]:
    params = ctx.eqn.params
    mosaic_wgmma.set_max_registers(params["n"], params["action"])
    return []


# --- promises about indices -----------------------------------------------------------


@uniform(multiple_of_p)
def _multiple_of(ctx: RuleContext, x: Any) -> Any:
    promised = scalars.promise(vals.scalar_value(x), ctx.eqn.params["divisor"])
    return elementwise.scalar(promised, vals.numpy_dtype(ctx.eqn.invars[0].aval))
