# SPDX-License-Identifier: Apache-2.0
"""Elements of arrays in registers at positions that are values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pallas_gpu.emitters import registers as regs
from pallas_gpu.emitters.elements import table
from pallas_gpu.emitters.moves import gather, image, scatter
from pallas_gpu.lowering import scratch
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.inference.collect import Node, Symbol
from pallas_gpu.lowering.rules import emits, relates
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.positions import gather_positions_p, scatter_positions_p

# --- gathers --------------------------------------------------------------------------


@emits(gather_positions_p)
def _gather(ctx: RuleContext, x: Any, index: Any, fill: Any) -> Any:
    x, index = ctx.placed(x, "x"), ctx.placed(index, "index")
    fill = regs.splat(vals.scalar_value(fill), x.dtype, index.shape)
    room = scratch.for_data(ctx.kernel, image.size_bytes(math.prod(x.shape), x.dtype))
    return gather.gather(x, index, fill.materialize(index.layout), room)


@relates(gather_positions_p)
def _relate_gather(node: Node, x: Symbol, index: Symbol) -> Symbol:
    """Index and result have one layout; the array may have any."""
    (aval,) = node.op.results
    made = node.variable(aval, moved_bits=max(x.bits, 8))
    node.take(x, node.variable(x, "array", moved_bits=max(x.bits, 8)), "x")
    node.take(index, made, "index")
    return node.make(made, aval)


@relates(scatter_positions_p)
def _relate_scatter(node: Node, x: Symbol, index: Symbol, updates: Symbol) -> Symbol:
    """Index and updates have one layout, the array and the result another."""
    (aval,) = node.op.results
    bits = max(x.bits, 8)
    taken = node.variable(index, "updates", moved_bits=bits)
    node.take(index, taken, "index")
    node.take(updates, taken, "updates")
    made = node.variable(x, moved_bits=bits)
    node.take(x, made, "x")
    return node.make(made, aval)


# --- scatters -------------------------------------------------------------------------


@registry.checks(scatter_positions_p)
def _check_scatter(op: Any, mesh: Any) -> None:
    if op.params["kind"] != "set":
        dtype = np.dtype(op.results[0].dtype)
        table.lookup(op.params["kind"]).require_combining(dtype)


@emits(scatter_positions_p)
def _scatter(
    ctx: RuleContext, x: Any, updates: Any, index: Any, *, kind: Any, unique: bool
) -> Any:
    x, updates = ctx.placed(x, "x"), ctx.placed(updates, "updates")
    index = ctx.placed(index, "index")
    updates = scratch.relayouted(ctx.kernel, updates, index.layout)
    wanted = scatter.wanted_bytes(
        math.prod(x.shape), math.prod(index.shape), x.dtype, unique
    )
    room = scratch.for_data(ctx.kernel, wanted)
    return scatter.scatter(kind, x, index, updates, room, unique=unique)
