# SPDX-License-Identifier: Apache-2.0
"""Concatenations, reversals and padding."""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_gpu.layouts.moves import rearrange as plans
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.families.moves.rearrange import moved
from pallas_gpu.lowering.inference import relations
from pallas_gpu.lowering.inference.collect import Node
from pallas_gpu.lowering.rules import emits_and_relates


@emits_and_relates("concatenate")
def _concatenate(on: RuleContext | Node, *operands: Any, dimension: int) -> Any:
    if len(operands) == 1:
        return operands[0]
    (aval,), sizes = on.op.results, [x.shape for x in operands]
    renames: list[relations.Relation] = []
    if len(set(sizes)) == 1:
        starts = np.cumsum([0, *(shape[dimension] for shape in sizes[:-1])]).tolist()
        renames = [
            relations.Join(
                sizes[0],
                tuple(aval.shape),
                tuple(start * (a == dimension) for a in range(len(sizes[0]))),
            )
            for start in starts
        ]
    plan = plans.concatenation(sizes, dimension)
    return moved(on, plan, operands, aval, renames=renames)


@emits_and_relates("rev")
def _rev(on: RuleContext | Node, x: Any, *, dimensions: Any) -> Any:
    if on.is_splat(x):
        return x
    return moved(on, plans.reversal(x.shape, dimensions), [x], on.op.results[0])


@emits_and_relates("pad")
def _pad(on: RuleContext | Node, x: Any, value: Any, *, padding_config: Any) -> Any:
    if not x.shape:
        return x
    plan = plans.padding(x.shape, padding_config)
    other = None if plan.is_total else value
    return moved(on, plan, [x], on.op.results[0], other=other)
