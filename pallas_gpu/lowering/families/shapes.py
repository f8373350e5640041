# SPDX-License-Identifier: Apache-2.0
"""Splats, broadcasts, iotas, transposes, and slices of accumulators."""

from __future__ import annotations

import math
from typing import Any

from pallas_gpu import errors
from pallas_gpu.emitters import registers as regs
from pallas_gpu.layouts import WGSplatLayout, to_layout
from pallas_gpu.layouts.registers.placement import place
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.inference import relations
from pallas_gpu.lowering.inference.collect import Node, Symbol
from pallas_gpu.lowering.inference.network import named
from pallas_gpu.lowering.rules import emits, relates

# --- splats, broadcasts, iotas --------------------------------------------------------


@emits("broadcast_in_dim")
def _broadcast(ctx: RuleContext, x: Any, *, broadcast_dimensions: Any) -> Any:
    dims = tuple(broadcast_dimensions)
    return regs.broadcast_in_dim(ctx.operand(x), ctx.out_aval.shape, dims)


@relates("broadcast_in_dim")
def _relate_broadcast(node: Node, x: Symbol, *, broadcast_dimensions: Any) -> Symbol:
    return related_broadcast(node, x, node.op.results[0], tuple(broadcast_dimensions))


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
def _relate_iota(node: Node) -> Symbol:
    return node.defer("made", node.op.results[0])


@relates("transpose")
def _relate_transpose(node: Node, x: Symbol, *, permutation: Any) -> Symbol:
    relation = relations.Transpose(tuple(permutation))
    result = node.related(x, node.op.results[0], relation)
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
            f"{node.words} to WG_SPLAT: the elements of the array may differ",
            expected="a splat: a scalar broadcast to a shape",
            got=f"an array of shape {x.shape}{_origin(x)}",
            hint="choose no layout: a splat is broadcast to any layout",
            where=node.where,
        )
    try:
        placement = place(description, x.shape)
    except errors.LayoutError as error:
        raise errors.LayoutError(
            f"{node.words}: an array of shape {x.shape} does not fit the layout",
            expected=error.expected,
            got=error.got,
            hint=f"{error.what}: choose a layout that fits the shape, or none",
            where=node.where,
        ) from None
    variable = node.variable(x, fixed=placement)
    node.take(x, variable, slot)
    return node.make(variable, x, slot)


def _origin(x: Symbol) -> str:
    return "" if x.port is None else f" from {named(x.port.variable.node)}"


@emits("iota")
def _iota(ctx: RuleContext, *, dimension: int) -> Any:
    aval = ctx.out_aval
    return regs.iota(vals.numpy_dtype(aval), aval.shape, dimension)


# --- transposes and slices ------------------------------------------------------------


@emits("transpose")
def _transpose(ctx: RuleContext, x: Any, *, permutation: Any) -> Any:
    if isinstance(x, regs.Splat):
        return regs.Splat(x.value, x.dtype, ctx.out_aval.shape)
    return regs.transpose(ctx.kernel.layouts.linear(ctx, x), tuple(permutation))
