# SPDX-License-Identifier: Apache-2.0
"""Copies of rows that an array of indices names."""

from __future__ import annotations

from pallas_gpu import _jax, types
from pallas_gpu.emitters.copies import rows as emitter
from pallas_gpu.lowering import slow
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.families.copies import cp_async
from pallas_gpu.lowering.inference.collect import Node, Symbol
from pallas_gpu.lowering.rules import emits, relates
from pallas_gpu.primitives import rows as primitives
from pallas_gpu.program.nodes import Access


@emits(primitives.gather_rows_p)
def _gather(ctx: RuleContext, src, dst, rows, barrier, predicate) -> None:
    source, target = ctx.view(src), ctx.view(dst)
    plan = emitter.gather(
        source,
        ctx.operand(rows, "rows"),
        target,
        ctx.argument(barrier),
        ctx.argument(predicate),
    )
    if plan is not None:
        slow.copied_by_threads(
            plan, source, lambda: _jax.where(ctx.eqn), target.shape[0]
        )


@emits(primitives.scatter_rows_p)
def _scatter(ctx: RuleContext, src, dst, rows, predicate) -> None:
    held = ctx.operand(rows, "rows")
    emitter.scatter(ctx.view(src), ctx.view(dst), held, ctx.argument(predicate))
    # All threads have copies of their own, and each closes its group.
    cp_async.close_group(ctx)


@relates(primitives.gather_rows_p, primitives.scatter_rows_p)
def _relate(node: Node, src: Access, dst: Access, rows: Symbol) -> None:
    """Indices and SMEM are taken in any layout."""
    node.use(node.part(dst if src.space is types.GMEM else src), "indexed")
    node.take(rows, node.variable(rows), "rows")
