# SPDX-License-Identifier: Apache-2.0
"""Reshapes, and arrays of one element that become scalars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from pallas_gpu import errors
from pallas_gpu.layouts import LinearLayout
from pallas_gpu.layouts.moves import rearrange as plans
from pallas_gpu.layouts.registers.placement import Placement
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.expansion.walk import Expansion
from pallas_gpu.lowering.families import shapes
from pallas_gpu.lowering.families.moves.rearrange import (
    in_registers,
    lane_moved,
    moved,
    related_moved,
    warpgroup_moved,
)
from pallas_gpu.lowering.inference import relations
from pallas_gpu.lowering.inference.collect import Node, Symbol
from pallas_gpu.lowering.inference.network import Key, Network, digest
from pallas_gpu.lowering.rules import expands, infers, lane, relates, warpgroup
from pallas_gpu.mosaic import logical
from pallas_gpu.mosaic import registers as regs
from pallas_gpu.mosaic.elements import dtypes
from pallas_gpu.mosaic.registers import default_placement


@lane("reshape")
def _reshape_lane(ctx: RuleContext, x: Any, *dynamic: Any) -> Any:
    return _array_in_shape(ctx, x, ctx.out_aval.shape, ctx.eqn.params["dimensions"])


@lane("squeeze")
def _squeeze_lane(ctx: RuleContext, x: Any) -> Any:
    return _array_in_shape(ctx, x, ctx.out_aval.shape, None)


def _array_in_shape(
    ctx: RuleContext, x: Any, shape: tuple[int, ...], dimensions: Any
) -> Any:
    if isinstance(x, regs.Splat):
        return regs.reshape(x, shape)
    if not shape:
        if ctx.kernel.layouts is None:
            x = in_registers(ctx, x)
        return _element(ctx.kernel, ctx.placed(x, "element"))
    if _permutes(x.shape, dimensions):
        plan = plans.reshape(x.shape, shape, dimensions)
        return lane_moved(ctx, plan, [x])
    if x.shape == shape:
        return x
    if ctx.target("moved") is not None:
        plan = plans.reshape(x.shape, shape)
        return lane_moved(ctx, plan, [x], rename=_renamed)
    if ctx.kernel.layouts is not None:
        return regs.reshape(ctx.operand(x), shape)
    try:
        return regs.reshape(x, shape)
    except errors.LayoutError:
        held = in_registers(ctx, x)
    try:
        return regs.reshape(held, shape)
    except errors.LayoutError:
        return lane_moved(ctx, plans.reshape(x.shape, shape), [held])


def _renamed(held: Sequence[regs.RegisterArray], target: Placement) -> Any:
    """The array with its registers renamed; None if data moves."""
    relation = relations.Reshape(held[0].shape, target.shape)
    if relation.forward(held[0].layout) != target:
        return None
    return regs.reshape(held[0], target.shape)


@relates("reshape")
def _relate_reshape(node: Node, x: Symbol, *dynamic: Any) -> Symbol:
    return _related_shape(node, x, node.params["dimensions"])


@relates("squeeze")
def _relate_squeeze(node: Node, x: Symbol) -> Symbol:
    return _related_shape(node, x, None)


def _related_shape(node: Node, x: Symbol, dimensions: Any) -> Symbol:
    """Axes of size one are inserted and removed in any layout."""
    (aval,) = node.op.results
    old, new = x.shape, tuple(aval.shape)
    if not old or x.deferred == "splat":
        return node.defer("splat", aval) if new else node.scalar(aval)
    if not new:
        variable = node.variable(x, moved_bits=max(x.bits, 8))
        node.take(x, variable, "element")
        return node.scalar(aval)
    if _permutes(old, dimensions):
        return related_moved(node, [x], aval)
    if old == new:
        return x
    relation = relations.Reshape(old, new)
    if [n for n in old if n != 1] == [n for n in new if n != 1]:
        return node.related(x, aval, relation)
    return related_moved(node, [x], aval, renames=[relation])


def _permutes(shape: Sequence[int], dimensions: Sequence[int] | None) -> bool:
    """Whether a reshape with dimensions is more than one without."""
    kept = [a for a in dimensions or () if shape[a] != 1]
    return kept != sorted(kept)


def _element(kernel: Any, x: regs.RegisterArray) -> regs.Splat:
    """The element of an array of one: each thread has it, if not in its layout."""
    shape = x.shape
    if not _is_everywhere(x.layout):
        target = default_placement(shape, dtypes.bits(x.dtype))
        x = moved(kernel, plans.reshape(shape, shape), [x], (), None, target)
    return regs.splat(dtypes.extract(x.values[0], 0), x.dtype)


def _is_everywhere(layout: Placement) -> bool:
    linear = isinstance(layout, LinearLayout)
    return linear and not any(map(any, layout.thread_columns))  # type: ignore[union-attr]


@warpgroup("reshape")
def _reshape_warpgroup(ctx: RuleContext, x: Any, *dynamic: Any) -> Any:
    return _vector_in_shape(x, ctx.out_aval.shape, ctx.eqn.params["dimensions"])


@warpgroup("squeeze")
def _squeeze_warpgroup(ctx: RuleContext, x: Any) -> Any:
    return _vector_in_shape(x, ctx.out_aval.shape, None)


def _vector_in_shape(x: Any, shape: tuple[int, ...], dimensions: Any) -> Any:
    if vals.is_scalar(x):
        return shapes.splat(x, shape) if shape else x
    if not shape:
        return _single(x)
    if _permutes(x.shape, dimensions):
        return warpgroup_moved(plans.reshape(x.shape, shape, dimensions), [x])
    if x.shape == shape:
        return x
    result = logical.vector_type(x.dtype, shape)
    return vals.Vector(vector.shape_cast(result, x.value), x.dtype)


def _single(x: vals.Vector) -> regs.Splat:
    """The element of an array of one."""
    value = shapes.splat_source(x)
    if value is None:
        type_ = dtypes.mlir_type(x.dtype)
        op = ir.Operation.create("pallas_gpu.element", [type_], [x.value])
        value = op.result
    return regs.Splat(dtypes.bitcast(value, x.dtype), x.dtype, ())


@infers("pallas_gpu.element")
def _infer_element(network: Network, op: ir.Operation, key: Key) -> None:
    _, bits = network.vector_type(op.operands[0].type)
    moved_bits = max(bits, 8)
    variable = network.variable(op, op.operands[0].type, key, moved_bits=moved_bits)
    network.consume(op, 0, variable)


@expands("pallas_gpu.element")
def _expand_element(expansion: Expansion, op: Any) -> None:
    (result,) = op.operation.results
    element = _element(expansion.kernel, expansion.placed(op, 0))
    result.replace_all_uses_with(element.value)
    expansion.dead.append(op.operation)


@infers("vector.shape_cast")
def _infer_reshape(network: Network, op: ir.Operation, key: Key) -> None:
    """Axes of size one are inserted and removed in any layout."""
    (operand,), (result,) = op.operands, op.results
    old, _ = network.vector_type(operand.type)
    new, _ = network.vector_type(result.type)
    relation = relations.Reshape(old, new)
    splat = network.deferred.get(operand) == "splat"
    if splat or [n for n in old if n != 1] == [n for n in new if n != 1]:
        shapes.related(network, op, key, relation)
        return
    taken = network.variable(
        op, operand.type, digest(str(key), "operand"), role="operand"
    )
    made = network.variable(op, result.type, key)
    network.consume(op, 0, taken)
    network.move(taken, made, relation)
    network.produce(result, made)


@expands("vector.shape_cast")
def _expand_reshape(expansion: Expansion, op: Any) -> None:
    shape = tuple(op.result.type.shape)
    array = expansion.operand(op, 0)
    target = expansion.assignment.result(op.result)
    result: Any = None
    if target is None or isinstance(array, regs.Splat):
        result = regs.reshape(array, shape)
    else:
        array = expansion.placed(op, 0)
        relation = relations.Reshape(array.shape, shape)
        if relation.forward(array.layout) == target:
            result = regs.reshape(array, shape)
        else:
            plan = plans.reshape(array.shape, shape)
            result = moved(expansion.kernel, plan, [array], (), None, target)
    expansion.set(op.result, result)
    expansion.dead.append(op.operation)
