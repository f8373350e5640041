# SPDX-License-Identifier: Apache-2.0
"""Reductions over axes of an array."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from pallas_gpu.emitters.elements import dtypes, table
from pallas_gpu.emitters.moves import reductions
from pallas_gpu.lowering import scratch
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.families.elementwise import convert_operand as convert
from pallas_gpu.lowering.families.elementwise import related_convert
from pallas_gpu.lowering.inference import relations
from pallas_gpu.lowering.inference.collect import Node, Symbol
from pallas_gpu.lowering.rules import emits, find_primitive, relates
from pallas_gpu.primitives import _registry as registry

# lax's primitives, and the operations that combine the elements.
KINDS: dict[str, reductions.Kind] = {
    "reduce_sum": "add",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "mul",
    "reduce_and": "and",
    "reduce_or": "or",
    "reduce_xor": "xor",
}


def _make(kind: reductions.Kind):
    def rule(ctx: RuleContext, x: Any) -> Any:
        axes = tuple(ctx.eqn.params["axes"])
        if not axes:
            return x
        wide = convert(ctx, x, dtypes.combining(x.dtype), "widened")
        if len(axes) < len(wide.shape):
            source = ctx.kernel.layouts.linear(ctx, wide, "reduced")
        else:
            source = ctx.placed(wide, "reduced")
        room = scratch.for_reduction(ctx.kernel, source, axes)
        result = reductions.reduce(kind, source, axes, room)
        result = ctx.result(result, "reduced")
        return convert(ctx, result, x.dtype, "narrowed")

    return rule


def _relate(node: Node, x: Symbol) -> Symbol:
    axes = tuple(node.params["axes"])
    return related_wide(node, x, relations.Reduce(axes), "reduced") if axes else x


def related_wide(
    node: Node, x: Symbol, relation: relations.Relation, slot: str
) -> Symbol:
    """A combination of elements, in the type in which they are combined."""
    (aval,), dtype = node.op.results, dtypes.combining(x.dtype)
    wide = related_convert(node, x, dtype, "widened")
    made = jax.ShapeDtypeStruct(aval.shape, dtype)
    result = node.related(wide, made, relation, slot, splat=True)
    return related_convert(node, result, np.dtype(aval.dtype), "narrowed")


def _make_check(kind: reductions.Kind):
    def check(op: Any, mesh: Any) -> None:
        dtype = np.dtype(op.inputs[0].dtype)
        if dtype != dtypes.BOOL:
            table.lookup(kind).require_combining(dtype)

    return check


for _name, _kind in KINDS.items():
    registry.checks(find_primitive(_name))(_make_check(_kind))
    emits(_name)(_make(_kind))
    relates(_name)(_relate)
