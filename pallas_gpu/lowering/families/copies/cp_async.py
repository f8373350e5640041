# SPDX-License-Identifier: Apache-2.0
"""Copies by threads between GMEM and SMEM, and waits for them."""

from __future__ import annotations

from typing import Any

from pallas_gpu import _jax
from pallas_gpu.emitters import tma
from pallas_gpu.emitters.copies import cp_async
from pallas_gpu.lowering import slow
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.rules import emits
from pallas_gpu.primitives import cp_async as primitives


# Threads access SMEM in any layout.
@emits(primitives.cp_async_p, dst="indexed")
def _load(ctx: RuleContext, src: Any, dst: Any, barrier: Any, predicate: Any) -> None:
    source, pointer = ctx.view(src), ctx.argument(barrier)
    plan = cp_async.copy_gmem_to_smem(
        source, ctx.view(dst), pointer, ctx.argument(predicate)
    )
    slow.copied_by_threads(plan, source, lambda: _jax.where(ctx.eqn))


@emits(primitives.store_by_threads_p, src="indexed")
def _store(ctx: RuleContext, src: Any, dst: Any, predicate: Any) -> None:
    target = ctx.view(dst)
    plan = cp_async.copy_smem_to_gmem(ctx.view(src), target, ctx.argument(predicate))
    slow.copied_by_threads(plan, target, lambda: _jax.where(ctx.eqn))
    close_group(ctx)


def close_group(ctx: RuleContext) -> None:
    """Ends a group of TMA's, if asked to, so that wait_smem_to_gmem counts the copy."""
    if ctx.eqn.params["commit_group"]:
        tma.commit_group()
