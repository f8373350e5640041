# SPDX-License-Identifier: Apache-2.0
"""tcgen05: products with an accumulator in TMEM, and their commits."""

from __future__ import annotations

from typing import Any

from pallas_gpu.emitters.tensor_cores import tcgen05
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.inference.collect import Node
from pallas_gpu.lowering.references import index_value
from pallas_gpu.lowering.rules import emits_and_relates
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


@emits_and_relates(primitives.tcgen05_mma_p)
def _mma(on: RuleContext | Node, *invals: Any, collective_axis: Any) -> None:
    if isinstance(on, Node):
        half = on.operands["acc"].window.sizes[-2] == _HALF_ROWS
        pieces = {"b": 2} if half and collective_axis is None else {}
        for name, role in _ROLES.items():
            if (x := on.operands[name]) is not None:
                on.use(on.part(x), "mma", role=role, pieces=pieces.get(name, 1))
        return
    operands = on.operands(invals)
    views = [on.argument(operands[name]) for name in _ROLES]
    acc, a, b, a_scale, b_scale, metadata = views
    accumulate = index_value(operands["accumulate"])
    if not isinstance(accumulate, bool):
        accumulate = vals.scalar_value(accumulate)
    scaled = None if a_scale is None else (a_scale, b_scale)
    tcgen05.mma(acc, a, b, accumulate, scaled, metadata, collective=on.collective)
    if operands["barrier"] is not None:
        barrier = on.view(operands["barrier"])
        tcgen05.commit_arrive(barrier, collective=on.collective)
