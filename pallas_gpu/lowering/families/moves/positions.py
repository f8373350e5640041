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
from pallas_gpu.lowering.inference.collect import Node
from pallas_gpu.lowering.rules import emits_and_relates
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.positions import gather_positions_p, scatter_positions_p


@emits_and_relates(gather_positions_p)
def _gather(on: RuleContext | Node, x: Any, index: Any, fill: Any) -> Any:
    """Index and result have one layout; the array may have any."""
    if isinstance(on, Node):
        bits, (aval,) = max(x.bits, 8), on.op.results
        made = on.variable(aval, moved_bits=bits)
        on.take(x, on.variable(x, "array", moved_bits=bits), "x")
        on.take(index, made, "index")
        return on.make(made, aval)
    x, index = on.placed(x, "x"), on.placed(index, "index")
    fill = regs.splat(vals.scalar_value(fill), x.dtype, index.shape)
    room = scratch.for_data(on.kernel, image.size_bytes(math.prod(x.shape), x.dtype))
    return gather.gather(x, index, fill.materialize(index.layout), room)


@registry.checks(scatter_positions_p)
def _check_scatter(op: Any, mesh: Any) -> None:
    if op.params["kind"] != "set":
        dtype = np.dtype(op.results[0].dtype)
        table.lookup(op.params["kind"]).require_combining(dtype)


@emits_and_relates(scatter_positions_p)
def _scatter(
    on: RuleContext | Node, x: Any, updates: Any, index: Any, *, kind, unique
) -> Any:
    """Index and updates have one layout, the array and the result another."""
    if isinstance(on, Node):
        bits, (aval,) = max(x.bits, 8), on.op.results
        taken = on.variable(index, "updates", moved_bits=bits)
        on.take(index, taken, "index")
        on.take(updates, taken, "updates")
        made = on.variable(x, moved_bits=bits)
        on.take(x, made, "x")
        return on.make(made, aval)
    x, updates = on.placed(x, "x"), on.placed(updates, "updates")
    index = on.placed(index, "index")
    updates = scratch.relayouted(on.kernel, updates, index.layout)
    wanted = scatter.wanted_bytes(
        math.prod(x.shape), math.prod(index.shape), x.dtype, unique
    )
    room = scratch.for_data(on.kernel, wanted)
    return scatter.scatter(kind, x, index, updates, room, unique=unique)
