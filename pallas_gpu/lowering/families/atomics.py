# SPDX-License-Identifier: Apache-2.0
"""Atomic operations: indices, mask and values have one layout, as in `indexed.py`."""

from __future__ import annotations

from typing import Any

from pallas_gpu.lowering import scratch
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.families import indexed
from pallas_gpu.lowering.inference.collect import Node, Symbol
from pallas_gpu.lowering.rules import emits, relates
from pallas_gpu.mosaic import atomics
from pallas_gpu.primitives.atomics import PRIMITIVES


def _values(name: str) -> tuple[str, ...]:
    return ("compare", "value") if name == "atomic_cas" else ("value",)


def _update(
    kernel: Any,
    elements: Any,
    placement: Any,
    name: str,
    values: Any,
    returns: bool,
    order: atomics.Order,
) -> Any:
    needed = atomics.scratch_bytes(placement, elements.dtype) if returns else 0
    shape = () if placement is None else placement.shape
    room = scratch.of_bytes(
        kernel, needed, "an atomic operation", f"{elements.dtype}{list(shape)}"
    )
    return atomics.update(elements, placement, name, values, returns, room, order)


def _make(name: str):
    def rule(ctx: RuleContext, *invals: Any) -> Any:
        found, placement = indexed.placed_access(ctx, invals, "ref", *_values(name))
        with ctx.in_order():
            elements = indexed.elements_of(ctx, found)
            order = atomics.Order(ctx.eqn.params["sem"], ctx.eqn.params["scope"])
            returns = ctx.result_is_read
            return _update(
                ctx.kernel, elements, placement, name, found.extra, returns, order
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
