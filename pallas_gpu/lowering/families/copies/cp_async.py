# SPDX-License-Identifier: Apache-2.0
"""Copies by threads between GMEM and SMEM, and waits for them."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

from pallas_gpu import _jax
from pallas_gpu.emitters import tma
from pallas_gpu.emitters.copies import cp_async
from pallas_gpu.lowering import slow
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.families.mbarrier import barrier_pointer, predicate_value
from pallas_gpu.lowering.rules import emits, relates, used
from pallas_gpu.primitives import cp_async as primitives


def barrier_of(ctx: RuleContext, barrier: Any) -> ir.Value | None:
    """Returns the address of the barrier operand; None if there is none."""
    if barrier is None:
        return None
    return barrier_pointer(ctx, barrier)


@emits(primitives.cp_async_p)
def _load(ctx: RuleContext, *invals: Any) -> list[Any]:
    operands = ctx.operands(invals)
    source = ctx.view(operands["src"])
    plan = cp_async.copy_gmem_to_smem(
        source,
        ctx.view(operands["dst"]),
        barrier_of(ctx, operands["barrier"]),
        predicate_value(operands["predicate"]),
    )
    slow.copied_by_threads(plan, source, lambda: _jax.where(ctx.eqn))
    return []


@emits(primitives.store_by_threads_p)
def _store(ctx: RuleContext, *invals: Any) -> list[Any]:
    operands = ctx.operands(invals)
    target = ctx.view(operands["dst"])
    plan = cp_async.copy_smem_to_gmem(
        ctx.view(operands["src"]), target, predicate_value(operands["predicate"])
    )
    slow.copied_by_threads(plan, target, lambda: _jax.where(ctx.eqn))
    close_group(ctx)
    return []


def close_group(ctx: RuleContext) -> None:
    """Ends a group of TMA's, if asked to, so that wait_smem_to_gmem counts the copy."""
    if ctx.eqn.params["commit_group"]:
        tma.commit_group()


# Threads access SMEM in any layout.
relates(primitives.cp_async_p)(lambda node, *_: used(node, dst="indexed"))
relates(primitives.store_by_threads_p)(lambda node, *_: used(node, src="indexed"))


@emits(primitives.wait_gmem_to_smem_p)
def _wait_gmem_to_smem(ctx: RuleContext) -> list[Any]:
    cp_async.wait_group(ctx.eqn.params["n"])
    return []
