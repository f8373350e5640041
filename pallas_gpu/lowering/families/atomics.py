# SPDX-License-Identifier: Apache-2.0
"""Atomic operations: indices, mask and values have one layout, as in `indexed.py`."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

from pallas_gpu.lowering import scratch
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.expansion.walk import Expansion
from pallas_gpu.lowering.families import indexed
from pallas_gpu.lowering.inference.collect import Node, Symbol
from pallas_gpu.lowering.inference.network import Key, Network
from pallas_gpu.lowering.rules import expands, infers, lane, relates, warpgroup
from pallas_gpu.mosaic import atomics
from pallas_gpu.primitives.atomics import PRIMITIVES

# Attributes: `atomic_add` and the like; sem and scope, absent where it is None.
_NAME, _SEM, _SCOPE = "name", "sem", "scope"


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


def _make_lane(name: str):
    def rule(ctx: RuleContext, *invals: Any) -> Any:
        found, placement = indexed.lane_access(ctx, invals, "ref", *_values(name))
        with ctx.in_order():
            elements = indexed.lane_elements(ctx, found)
            order = atomics.Order(ctx.eqn.params["sem"], ctx.eqn.params["scope"])
            returns = ctx.result_is_read
            return _update(
                ctx.kernel, elements, placement, name, found.extra, returns, order
            )

    return rule


def _make_warpgroup(name: str):
    def rule(ctx: RuleContext, *invals: Any) -> Any:
        found = indexed.access(ctx, invals, "ref", *_values(name))
        result = found.dtype if ctx.result_is_read else None
        with ctx.in_order():
            types, operands, attributes = indexed.operation(ctx, found, result)
            attributes[_NAME] = ir.StringAttr.get(name)
            for key in (_SEM, _SCOPE):
                if (value := ctx.eqn.params[key]) is not None:
                    attributes[key] = ir.StringAttr.get(value)
            op = ir.Operation.create("pallas_gpu.atomic", types, operands, attributes)
        if result is None:
            return None
        return indexed.result_of(op, found.dtype, found.shape)

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
    lane(_primitive)(_make_lane(_name))
    relates(_primitive)(_make_relation(_name))
    warpgroup(_primitive)(_make_warpgroup(_name))


@infers("pallas_gpu.atomic")
def _infer(network: Network, op: ir.Operation, key: Key) -> None:
    indexed.infer_access(network, op, key, "indexed")


@expands("pallas_gpu.atomic")
def _expand(expansion: Expansion, op: Any) -> None:
    elements, placement, values = indexed.expanded(expansion, op)
    name = ir.StringAttr(op.operation.attributes[_NAME]).value
    returns = len(op.operation.results) > 0
    given = {
        key: ir.StringAttr(op.operation.attributes[key]).value
        for key in (_SEM, _SCOPE)
        if key in op.operation.attributes
    }
    result = _update(
        expansion.kernel,
        elements,
        placement,
        name,
        values,
        returns,
        atomics.Order(**given),
    )
    indexed.finish(expansion, op, result)
