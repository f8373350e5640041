# SPDX-License-Identifier: Apache-2.0
"""tcgen05: products with an accumulator in TMEM, and their commits."""

from __future__ import annotations

from typing import Any

from pallas_gpu.emitters.tensor_cores import tcgen05
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.families.mbarrier import barrier_pointer
from pallas_gpu.lowering.inference.collect import Node
from pallas_gpu.lowering.references import index_value
from pallas_gpu.lowering.rules import emits, relates
from pallas_gpu.primitives.tensor_cores import tcgen05 as primitives

_HALF_ROWS = 64
# The operands in memory, and their names in messages.
_ROLES = {
    "acc": "accumulator",
    "a": "left operand",
    "b": "right operand",
    "a_scale": "scales of the left operand",
    "b_scale": "scales of the right operand",
    "a_sparse_metadata": "metadata",
}


@emits(primitives.tcgen05_mma_p)
def _mma(ctx: RuleContext, *invals: Any) -> None:
    operands = ctx.operands(invals)
    views: list[Any] = [
        None if operands[name] is None else ctx.view(operands[name]) for name in _ROLES
    ]
    acc, a, b, a_scale, b_scale, metadata = views
    accumulate = index_value(operands["accumulate"])
    if not isinstance(accumulate, bool):
        accumulate = vals.scalar_value(accumulate)
    scaled = None if a_scale is None else (a_scale, b_scale)
    collective = _is_collective(ctx)
    tcgen05.mma(acc, a, b, accumulate, scaled, metadata, collective=collective)
    if operands["barrier"] is not None:
        _commit(ctx, operands["barrier"])


@relates(primitives.tcgen05_mma_p)
def _relate(node: Node, *_: Any, collective_axis: Any) -> None:
    operands = node.operands
    half = operands["acc"].window.sizes[-2] == _HALF_ROWS
    pieces = {"b": 2} if half and collective_axis is None else {}
    for name, role in _ROLES.items():
        if operands[name] is not None:
            part = node.part(operands[name])
            node.use(part, "mma", role=role, pieces=pieces.get(name, 1))


@emits(primitives.tcgen05_commit_arrive_p)
def _commit(ctx: RuleContext, barrier: Any) -> None:
    pointer = barrier_pointer(ctx, barrier)
    tcgen05.commit_arrive(pointer, collective=_is_collective(ctx))


def _is_collective(ctx: RuleContext) -> bool:
    """Whether the operation is one of a pair of CTAs."""
    return ctx.eqn.params["collective_axis"] is not None
