# SPDX-License-Identifier: Apache-2.0
"""Atomic operations: indices, mask and values have one layout, as in `indexed.py`."""

from __future__ import annotations

from typing import Any

from pallas_gpu.emitters import atomics
from pallas_gpu.lowering import scratch
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.families import indexed
from pallas_gpu.lowering.inference.collect import Node, Symbol
from pallas_gpu.lowering.rules import emits, relates
from pallas_gpu.primitives.atomics import PRIMITIVES


def _values(name: str) -> tuple[str, ...]:
    return ("compare", "value") if name == "atomic_cas" else ("value",)


def _make(name: str):
    def rule(ctx: RuleContext, *invals: Any, sem: Any, scope: Any, shape: Any) -> Any:
        elements, values, placement = indexed.placed_access(
            ctx, invals, "ref", *_values(name)
        )
        with ctx.in_order():
            order, returns = atomics.Order(sem, scope), ctx.result_is_read
            needed = atomics.scratch_bytes(placement, elements.dtype) if returns else 0
            got = f"{elements.dtype}{list(shape)}"
            room = scratch.of_bytes(ctx.kernel, needed, "an atomic operation", got)
            return atomics.update(
                elements, placement, name, values, returns, room, order
            )

    return rule


def _make_relation(name: str):
    def relate(node: Node, *_: Any) -> Symbol:
        (aval,) = node.op.results
        variable = indexed.related_access(node, "ref", *_values(name))
        if variable is None:
            return node.scalar(aval)
        return node.make(variable, aval)

    return relate


for _name, _primitive in PRIMITIVES.items():
    emits(_primitive)(_make(_name))
    relates(_primitive)(_make_relation(_name))
