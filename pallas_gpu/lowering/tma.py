# SPDX-License-Identifier: Apache-2.0
"""TMA copies, their groups and fences."""

from __future__ import annotations

from typing import Any

from pallas_gpu import arch
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.mbarrier import (
    barrier_index,
    barrier_pointer,
    cluster_group,
    when,
)
from pallas_gpu.lowering.memory import memory_view
from pallas_gpu.lowering.rules import lane, uniform
from pallas_gpu.mosaic import mbarrier, tma
from pallas_gpu.primitives import tma as primitives


@lane(primitives.copy_gmem_to_smem_p)
def _copy_gmem_to_smem(ctx: RuleContext, *invals: Any) -> list[Any]:
    ctx.kernel.target.require(arch.Feature.TMA, "copy_gmem_to_smem")
    operands = ctx.operands(invals)
    src, dst, barrier = operands["src"], operands["dst"], operands["barrier"]
    index = barrier_index(barrier.ref, barrier.transforms)
    axes = ctx.eqn.params["collective_axes"]
    with when(operands["predicate"]):
        tma.copy_gmem_to_smem(
            ctx.builder,
            memory_view(ctx, src.ref, src.transforms),
            memory_view(ctx, dst.ref, dst.transforms),
            barrier_pointer(ctx, barrier.ref, index),
            multicast=cluster_group(ctx, axes) if axes else None,
        )
    return []


@lane(primitives.copy_smem_to_gmem_p)
def _copy_smem_to_gmem(ctx: RuleContext, *invals: Any) -> list[Any]:
    ctx.kernel.target.require(arch.Feature.TMA, "copy_smem_to_gmem")
    operands = ctx.operands(invals)
    src, dst = operands["src"], operands["dst"]
    with when(operands["predicate"]):
        tma.copy_smem_to_gmem(
            ctx.builder,
            memory_view(ctx, src.ref, src.transforms),
            memory_view(ctx, dst.ref, dst.transforms),
            commit=False,
        )
    # Every thread commits, so that a skipped copy leaves an empty group and the
    # numbers that wait_smem_to_gmem counts stay the same.
    if ctx.eqn.params["commit_group"]:
        tma.commit_group()
    return []


@uniform(primitives.commit_group_p)
def _commit_group(ctx: RuleContext) -> list[Any]:
    tma.commit_group()
    return []


@uniform(primitives.wait_smem_to_gmem_p)
def _wait_smem_to_gmem(ctx: RuleContext) -> list[Any]:
    params = ctx.eqn.params
    tma.wait_group(params["n"], params["wait_read_only"])
    return []


@uniform(primitives.commit_smem_p)
def _commit_smem(ctx: RuleContext) -> list[Any]:
    tma.fence_proxy_async()
    mbarrier.meet()
    return []
