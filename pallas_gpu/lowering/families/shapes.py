# SPDX-License-Identifier: Apache-2.0
"""Splats, broadcasts, iotas, transposes, and slices of accumulators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from pallas_gpu import errors
from pallas_gpu.layouts import WGSplatLayout, to_layout
from pallas_gpu.layouts.registers.placement import place
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.expansion.walk import Expansion
from pallas_gpu.lowering.inference import constraints, relations
from pallas_gpu.lowering.inference.collect import Node, Symbol
from pallas_gpu.lowering.inference.network import Key, Network
from pallas_gpu.lowering.rules import (
    expands,
    infers,
    lane,
    relates,
    warpgroup,
)
from pallas_gpu.mosaic import dialect, logical
from pallas_gpu.mosaic import registers as regs

# --- whole arrays ---------------------------------------------------------------------


def splat(x: Any, shape: tuple[int, ...]) -> vals.Vector:
    """Returns the array whose elements are all equal to a scalar."""
    result = logical.vector_type(x.dtype, shape)
    element = logical.to_element(x.value, x.dtype)
    return vals.Vector(vector.broadcast(result, element), x.dtype)


def as_vector(x: Any, shape: tuple[int, ...]) -> vals.Vector:
    """Returns an array; a scalar is broadcast."""
    return splat(x, shape) if vals.is_scalar(x) else x


def broadcast(x: vals.Vector, shape: tuple[int, ...], dims: Sequence[int]) -> Any:
    """Broadcasts an array: its axis i becomes axis `dims[i]`."""
    result = logical.vector_type(x.dtype, shape)
    value = dialect.ops.broadcast_in_dim(result, x.value, list(dims))
    return vals.Vector(value, x.dtype)


def broadcast_to(x: Any, shape: tuple[int, ...]) -> Any:
    """Returns an operand of an elementwise operation in the result's shape.

    lax broadcasts axes of size one implicitly. A scalar is returned unchanged.
    """
    if vals.is_scalar(x) or x.shape == shape:
        return x
    return broadcast(x, shape, range(len(shape) - len(x.shape), len(shape)))


def splat_source(x: vals.Vector) -> ir.Value | None:
    """Returns the element of a splat, None for any other array."""
    owner = x.value.owner
    if isinstance(owner, ir.Block) or owner.operation.name != "vector.broadcast":
        return None
    return owner.operation.operands[0]


def static_slice(x: vals.Vector, starts: Any, sizes: Any) -> vals.Vector:
    """Returns a slice of an array."""
    result = logical.vector_type(x.dtype, sizes)
    ones = [1] * len(sizes)
    value = vector.extract_strided_slice(
        result, x.value, list(starts), list(sizes), ones
    )
    return vals.Vector(value, x.dtype)


def placed(x: Any) -> regs.RegisterArray:
    """Materializes a deferred array in the default layout."""
    if isinstance(x, regs.Deferred):
        return regs.placed(x)
    return x


# --- splats, broadcasts, iotas --------------------------------------------------------


@lane("broadcast_in_dim")
def _broadcast_lane(ctx: RuleContext, x: Any, *dynamic: Any) -> Any:
    _refuse_dynamic_shape(dynamic)
    dims = tuple(ctx.eqn.params["broadcast_dimensions"])
    return regs.broadcast_in_dim(ctx.operand(x), ctx.out_aval.shape, dims)


@warpgroup("broadcast_in_dim")
def _broadcast_warpgroup(ctx: RuleContext, x: Any, *dynamic: Any) -> Any:
    _refuse_dynamic_shape(dynamic)
    shape = ctx.out_aval.shape
    if not shape:
        return x
    if vals.is_scalar(x):
        return splat(x, shape)
    return broadcast(x, shape, ctx.eqn.params["broadcast_dimensions"])


def _refuse_dynamic_shape(dynamic: Sequence[Any]) -> None:
    """Refuses shapes that are values."""
    if dynamic:
        raise errors.UnsupportedError(
            "broadcast_in_dim: the shape is not known at compile time",
            expected="a static shape",
            got=f"{len(dynamic)} dynamic sizes",
            hint="use the sizes of references, which are static",
        )


@relates("broadcast_in_dim")
def _relate_broadcast(node: Node, x: Symbol, *dynamic: Any) -> Symbol:
    dims = tuple(node.params["broadcast_dimensions"])
    return related_broadcast(node, x, node.op.results[0], dims)


def related_broadcast(
    node: Node, x: Symbol, aval: Any, dims: tuple[int, ...], slot: Any = 0
) -> Symbol:
    """Returns a broadcast array: axis i of the operand becomes axis `dims[i]`."""
    if not aval.shape:
        return x
    new = tuple(aval.shape)
    if not x.shape or x.deferred is not None:
        return node.defer(x.deferred or "splat", aval, slot)
    if math.prod(x.shape) == math.prod(new):
        relation: relations.Relation = relations.Reshape(x.shape, new)
    else:
        relation = relations.Broadcast(x.shape, new, dims)
    return node.related(x, aval, relation, slot)


@relates("iota")
def _relate_iota(node: Node, *dynamic: Any) -> Symbol:
    return node.defer("made", node.op.results[0])


@relates("transpose")
def _relate_transpose(node: Node, x: Symbol) -> Symbol:
    permutation = tuple(node.params["permutation"])
    result = node.related(x, node.op.results[0], relations.Transpose(permutation))
    for symbol in (x, result):
        if symbol.port is not None:
            symbol.port.cell.transposed = True
    return result


def related_cast(node: Node, x: Symbol, layout: Any, slot: Any = 0) -> Symbol:
    """Returns an array in the layout that the author has chosen."""
    description = to_layout(layout)
    is_splat = isinstance(description, WGSplatLayout)
    if not x.shape or (is_splat and x.deferred == "splat"):
        return x
    if is_splat:
        raise errors.LayoutError(
            "Only a splat can have a splat layout",
            expected="a layout that distributes the elements",
            got=f"WG_SPLAT for shape {x.shape}",
            hint="cast to another layout",
            where=node.where,
        )
    try:
        placement = place(description, x.shape)
    except errors.LayoutError as error:
        raise errors.LayoutError(
            f"layout_cast: an array of shape {x.shape} does not fit the layout",
            expected=error.expected,
            got=error.got,
            hint=f"{error.what}: cast to a layout that fits the shape, or remove the "
            "layout_cast",
            where=node.where,
        ) from None
    variable = node.variable(x, fixed=placement)
    node.take(x, variable, slot)
    return node.make(variable, x, slot)


@infers("vector.broadcast")
def _infer_splat(network: Network, op: ir.Operation, key: Key) -> None:
    if constraints.vector_operands(op):
        raise constraints.no_rule(op)
    network.defer(op.results[0], "splat")


@expands("vector.broadcast")
def _expand_splat(expansion: Expansion, op: Any) -> None:
    dtype = logical.dtype_of(op.result.type)
    value = logical.from_element(op.operands[0], dtype)
    expansion.set(op.result, regs.splat(value, dtype, op.result.type.shape))
    expansion.dead.append(op.operation)


@infers("mosaic_gpu.broadcast_in_dim")
def _infer_broadcast(network: Network, op: ir.Operation, key: Key) -> None:
    old, _ = network.vector_type(op.operands[0].type)
    new, _ = network.vector_type(op.results[0].type)
    if op.operands[0] in network.deferred:
        network.defer(op.results[0], network.deferred[op.operands[0]])
        return
    dims = tuple(ir.DenseI64ArrayAttr(op.attributes["broadcast_dimensions"]))
    if math.prod(old) == math.prod(new):
        related(network, op, key, relations.Reshape(old, new))
    else:
        related(network, op, key, relations.Broadcast(old, new, dims))


@expands("mosaic_gpu.broadcast_in_dim")
def _expand_broadcast(expansion: Expansion, op: Any) -> None:
    dims = ir.DenseI64ArrayAttr(op.attributes["broadcast_dimensions"])
    shape = tuple(op.result.type.shape)
    array = regs.broadcast_in_dim(expansion.operand(op, 0), shape, tuple(dims))
    expansion.set(op.result, array)
    expansion.dead.append(op.operation)


@lane("iota")
def _iota_lane(ctx: RuleContext, *dynamic: Any) -> Any:
    aval = ctx.out_aval
    return regs.iota(vals.numpy_dtype(aval), aval.shape, ctx.eqn.params["dimension"])


@warpgroup("iota")
def _iota_warpgroup(ctx: RuleContext, *dynamic: Any) -> Any:
    aval = ctx.out_aval
    dtype = vals.numpy_dtype(aval)
    dimension = ctx.eqn.params["dimension"]
    result = logical.vector_type(dtype, aval.shape)
    return vals.Vector(dialect.ops.broadcasted_iota(result, dimension), dtype)


@infers("mosaic_gpu.broadcasted_iota")
def _infer_iota(network: Network, op: ir.Operation, key: Key) -> None:
    network.defer(op.results[0], "made")


@expands("mosaic_gpu.broadcasted_iota")
def _expand_iota(expansion: Expansion, op: Any) -> None:
    dtype = logical.dtype_of(op.result.type)
    dimension = ir.IntegerAttr(op.attributes["dimension"]).value
    expansion.set(op.result, regs.iota(dtype, op.result.type.shape, dimension))
    expansion.dead.append(op.operation)


# --- transposes and slices ------------------------------------------------------------


@lane("transpose")
def _transpose_lane(ctx: RuleContext, x: Any) -> Any:
    permutation = tuple(ctx.eqn.params["permutation"])
    if isinstance(x, regs.Splat):
        return regs.Splat(x.value, x.dtype, ctx.out_aval.shape)
    return regs.transpose(ctx.kernel.semantics.linear(ctx, x), permutation)


@warpgroup("transpose")
def _transpose_warpgroup(ctx: RuleContext, x: Any) -> Any:
    permutation = list(ctx.eqn.params["permutation"])
    if vals.is_scalar(x):
        return x
    result = logical.vector_type(x.dtype, ctx.out_aval.shape)
    return vals.Vector(vector.transpose(result, x.value, permutation), x.dtype)


@infers("vector.transpose")
def _infer_transpose(network: Network, op: ir.Operation, key: Key) -> None:
    permutation = tuple(ir.DenseI64ArrayAttr(op.attributes["permutation"]))
    related(network, op, key, relations.Transpose(permutation))
    for value in (op.operands[0], op.results[0]):
        if value in network.results:
            network.results[value].cell.transposed = True


@expands("vector.transpose")
def _expand_transpose(expansion: Expansion, op: Any) -> None:
    permutation = tuple(ir.DenseI64ArrayAttr(op.attributes["permutation"]))
    array = expansion.operand(op, 0)
    if isinstance(array, regs.Splat):
        shape = tuple(op.result.type.shape)
        expansion.set(op.result, regs.splat(array.value, array.dtype, shape))
    else:
        expansion.set(op.result, regs.transpose(expansion.placed(op, 0), permutation))
    expansion.dead.append(op.operation)


@infers("vector.extract_strided_slice")
def _infer_slice(network: Network, op: ir.Operation, key: Key) -> None:
    shape, _ = network.vector_type(op.operands[0].type)
    starts, sizes = (integers(op.attributes[n]) for n in ("offsets", "sizes"))
    # Trailing axes that the attributes omit are not sliced.
    starts += (0,) * (len(shape) - len(starts))
    sizes += shape[len(sizes) :]
    related(network, op, key, relations.Slice(shape, starts, sizes))


@expands("vector.extract_strided_slice")
def _expand_slice(expansion: Expansion, op: Any) -> None:
    starts, sizes = (integers(op.attributes[n]) for n in ("offsets", "sizes"))
    array = expansion.operand(op, 0)
    if not isinstance(array, regs.Splat):
        array = expansion.placed(op, 0)
    expansion.set(op.result, regs.static_slice(array, starts, sizes))
    expansion.dead.append(op.operation)


def integers(attribute: ir.Attribute) -> tuple[int, ...]:
    """Returns the numbers of an array attribute."""
    return tuple(ir.IntegerAttr(x).value for x in ir.ArrayAttr(attribute))


def related(
    network: Network, op: ir.Operation, key: Key, relation: relations.Relation
) -> None:
    """Declares an operation whose operand's layout determines the result's."""
    result = op.results[0]
    if network.deferred.get(op.operands[0]) == "splat":
        network.defer(result, "splat")
        return
    shape, _ = network.vector_type(result.type)
    variable = network.variable(
        op, op.operands[0].type, key, result=shape, relation=relation
    )
    network.consume(op, 0, variable)
    network.produce(result, variable)
