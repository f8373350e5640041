# SPDX-License-Identifier: Apache-2.0
"""Broadcasts, iotas, transposes, and layout casts."""

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
from pallas_gpu.lowering.rules import emits_and_relates


@emits_and_relates("broadcast_in_dim")
def _broadcast(on: RuleContext | Node, x: Any, *, broadcast_dimensions: Any) -> Any:
    return broadcast(on, x, on.op.results[0], tuple(broadcast_dimensions))


def broadcast(
    on: RuleContext | Node, x: Any, aval: Any, dims: tuple[int, ...], slot: Any = 0
) -> Any:
    """Returns a broadcast array: axis i of the operand becomes axis `dims[i]`."""
    new = tuple(aval.shape)
    if not isinstance(on, Node):
        return regs.broadcast_in_dim(on.operand(x, slot), new, dims)
    if not new:
        return x
    if not x.shape or x.deferred is not None:
        return on.defer(x.deferred or "splat", aval, slot)
    if math.prod(x.shape) == math.prod(new):
        relation: relations.Relation = relations.Reshape(x.shape, new)
    else:
        relation = relations.Broadcast(x.shape, new, dims)
    return on.related(x, aval, relation, slot)


@emits_and_relates("iota")
def _iota(on: RuleContext | Node, *, dimension: int) -> Any:
    (aval,) = on.op.results
    if isinstance(on, Node):
        return on.defer("made", aval)
    return regs.iota(vals.numpy_dtype(aval), aval.shape, dimension)


@emits_and_relates("transpose")
def _transpose(on: RuleContext | Node, x: Any, *, permutation: Any) -> Any:
    (aval,) = on.op.results
    if isinstance(on, Node):
        result = on.related(x, aval, relations.Transpose(tuple(permutation)))
        for symbol in (x, result):
            if symbol.port is not None:
                symbol.port.cell.transposed = True
        return result
    if isinstance(x, regs.Splat):
        return on.splat(x, aval)
    return regs.transpose(on.kernel.layouts.linear(on, x), tuple(permutation))


def related_cast(node: Node, x: Symbol, layout: Any, slot: Any = 0) -> Symbol:
    """Returns an array in the layout that the author has chosen."""
    description = to_layout(layout)
    is_splat = isinstance(description, WGSplatLayout)
    if not x.shape or (is_splat and x.deferred == "splat"):
        return x
    if is_splat:
        origin = "" if x.port is None else f" from {named(x.port.variable.node)}"
        raise errors.LayoutError(
            f"{node.words} to WG_SPLAT: the elements of the array may differ",
            expected="a splat: a scalar broadcast to a shape",
            got=f"an array of shape {x.shape}{origin}",
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
