# SPDX-License-Identifier: Apache-2.0
"""Copies of rows that an array of indices names."""

from __future__ import annotations

from typing import Any

from pallas_gpu.emitters.copies import rows
from pallas_gpu.lowering import notes
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.families.copies import cp_async
from pallas_gpu.lowering.families.mbarrier import predicate_value
from pallas_gpu.lowering.inference.collect import Node
from pallas_gpu.lowering.rules import emits, relates
from pallas_gpu.primitives import rows as primitives


@emits(primitives.gather_rows_p)
def _gather(ctx: RuleContext, *invals: Any) -> list[Any]:
    operands = ctx.operands(invals)
    source, target = ctx.view(operands["src"]), ctx.view(operands["dst"])
    plan = rows.gather(
        source,
        ctx.operand(operands["rows"], "rows"),
        target,
        cp_async.barrier_of(ctx, operands["barrier"]),
        predicate_value(operands["predicate"]),
    )
    if plan is not None:
        notes.take(lambda: notes.copy(plan, source, target.shape[0]))
    return []


@emits(primitives.scatter_rows_p)
def _scatter(ctx: RuleContext, *invals: Any) -> list[Any]:
    operands = ctx.operands(invals)
    rows.scatter(
        ctx.view(operands["src"]),
        ctx.view(operands["dst"]),
        ctx.operand(operands["rows"], "rows"),
        predicate_value(operands["predicate"]),
    )
    # All threads have copies of their own, and each closes its group.
    cp_async.close_group(ctx)
    return []


@relates(primitives.gather_rows_p)
def _relate_gather(node: Node, *_: Any) -> list[Any]:
    return _related(node, "dst")


@relates(primitives.scatter_rows_p)
def _relate_scatter(node: Node, *_: Any) -> list[Any]:
    return _related(node, "src")


def _related(node: Node, smem: str) -> list[Any]:
    """Indices and SMEM are taken in any layout."""
    operands = node.operands
    node.use(node.part(operands[smem]), "indexed")
    rows_ = operands["rows"]
    node.take(rows_, node.variable(rows_), "rows")
    return []
