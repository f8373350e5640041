# SPDX-License-Identifier: Apache-2.0
"""Prefetches to the L2 cache."""

from __future__ import annotations

from typing import Any

from pallas_gpu.emitters.copies.prefetch import prefetch
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.families.mbarrier import cluster_group, predicate_value
from pallas_gpu.lowering.rules import emits
from pallas_gpu.primitives.copies.prefetch import async_prefetch_p


@emits(async_prefetch_p, ref=None)
def _async_prefetch(
    ctx: RuleContext, ref: Any, predicate: Any, *, collective_axes: Any
) -> None:
    prefetch(
        ctx.builder,
        ctx.view(ref),
        shared_by=cluster_group(ctx, collective_axes) if collective_axes else None,
        predicate=predicate_value(predicate),
    )
