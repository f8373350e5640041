# SPDX-License-Identifier: Apache-2.0
"""Reductions over axes of an array."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from pallas_gpu.emitters import registers as regs
from pallas_gpu.emitters.elements import dtypes, table
from pallas_gpu.emitters.moves import reductions
from pallas_gpu.lowering import scratch
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.families.elementwise import converted
from pallas_gpu.lowering.inference import relations
from pallas_gpu.lowering.inference.collect import Node
from pallas_gpu.lowering.rules import emits_and_relates, find_primitive
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


# From the operation that combines elements, the context and an array: the array of the
# results, and the relation of the parameters; None: the result is the operand.
Combine = Callable[
    [Any, RuleContext, regs.RegisterArray], regs.RegisterArray | regs.Splat
]
Related = Callable[[Mapping[str, Any]], relations.Relation | None]


def enter_rules(
    kinds: Mapping[str, Any], slot: str, related: Related, combine: Combine
) -> None:
    """Registers the rules of operations that combine elements of an array.

    They do so in the type in which partial results are held.

    Args:
      kinds: lax's primitives, and what combines two elements.
      slot: names the operand and the result in that type.
    """

    def check(kind: Any, op: Any, mesh: Any) -> None:
        dtype = np.dtype(op.inputs[0].dtype)
        if dtype != dtypes.BOOL:
            table.lookup(kind).require_combining(dtype)

    def rule(kind: Any, on: RuleContext | Node, x: Any) -> Any:
        relation, (aval,) = related(on.op.params), on.op.results
        if relation is None:
            return x
        dtype = dtypes.combining(x.dtype)
        wide = converted(on, x, dtype, "widened")
        if isinstance(on, Node):
            made = jax.ShapeDtypeStruct(aval.shape, dtype)
            result = on.related(wide, made, relation, slot, splat=True)
        else:
            place = on.kernel.layouts.linear if aval.shape else on.kernel.layouts.placed
            source = place(on, wide, slot)
            result = on.result(combine(kind, on, source), slot)
        return converted(on, result, np.dtype(aval.dtype), "narrowed")

    for name, kind in kinds.items():
        registry.checks(find_primitive(name))(functools.partial(check, kind))
        emits_and_relates(name)(lambda on, x, kind=kind: rule(kind, on, x))


def _related(params: Mapping[str, Any]) -> relations.Relation | None:
    return relations.Reduce(tuple(params["axes"])) if params["axes"] else None


def _reduce(
    kind: reductions.Kind, ctx: RuleContext, x: regs.RegisterArray
) -> regs.RegisterArray | regs.Splat:
    axes = tuple(ctx.op.params["axes"])
    return reductions.reduce(kind, x, axes, scratch.for_reduction(ctx.kernel, x, axes))


enter_rules(KINDS, "reduced", _related, _reduce)
