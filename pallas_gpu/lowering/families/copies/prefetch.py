# SPDX-License-Identifier: Apache-2.0
"""Prefetches to the L2 cache."""

from __future__ import annotations

from typing import Any

from pallas_gpu.emitters.copies.prefetch import prefetch
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.families.mbarrier import cluster_group, predicate_value
from pallas_gpu.lowering.rules import emits, relates, used
from pallas_gpu.primitives.copies.prefetch import async_prefetch_p


@emits(async_prefetch_p)
def _async_prefetch(ctx: RuleContext, *invals: Any) -> list[Any]:
    operands, axes = ctx.operands(invals), ctx.eqn.params["collective_axes"]
    prefetch(
        ctx.builder,
        ctx.view(operands["ref"]),
        shared_by=cluster_group(ctx, axes) if axes else None,
        predicate=predicate_value(operands["predicate"]),
    )
    return []


# It reads GMEM, whose layout is given.
relates(async_prefetch_p)(lambda node, *_: used(node))
