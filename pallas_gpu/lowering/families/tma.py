# SPDX-License-Identifier: Apache-2.0
"""TMA copies, their groups and fences."""

from __future__ import annotations

import math
from typing import Any

from pallas_gpu.emitters import mbarrier, tma
from pallas_gpu.emitters.cluster import Group
from pallas_gpu.emitters.smem import predicated
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.families.mbarrier import (
    barrier_pointer,
    cluster_group,
    predicate_value,
)
from pallas_gpu.lowering.inference.collect import Node
from pallas_gpu.lowering.rules import emits, relates
from pallas_gpu.primitives import tma as primitives
from pallas_gpu.program.nodes import Access
from pallas_gpu.types import CopyPartition, OOBFillMode


@emits(primitives.copy_gmem_to_smem_p)
def _copy_gmem_to_smem(
    ctx: RuleContext, src, dst, barrier, predicate, *,
    collective_axes, leader_tracked, cache_hint, oob_mode,
) -> None:  # fmt: skip
    group = cluster_group(ctx, collective_axes) if collective_axes else None
    tma.copy_gmem_to_smem(
        ctx.builder,
        ctx.view(src),
        ctx.view(dst),
        barrier_pointer(ctx, barrier),
        **_shared_by(group, leader_tracked),
        predicate=predicate_value(predicate),
        cache_hint=cache_hint,
        oob_mode=oob_mode,
    )


def _shared_by(group: Group | None, partition: CopyPartition | None) -> dict[str, Any]:
    """Returns how the CTAs along collective_axes share a copy."""
    if partition is None:
        return {"multicast": group}
    # The source of a partitioned copy is the part of this CTA.
    multicast = None if isinstance(partition, CopyPartition.PARTITIONED) else group
    return {"multicast": multicast, "pair": group}


@emits(primitives.copy_smem_to_gmem_p)
def _copy_smem_to_gmem(
    ctx: RuleContext, src, dst, predicate, *, reduction_op, cache_hint, commit_group
) -> None:
    with predicated(predicate_value(predicate)):
        tma.copy_smem_to_gmem(
            ctx.builder,
            ctx.view(src),
            ctx.view(dst),
            reduction=reduction_op,
            commit=False,
            cache_hint=cache_hint,
        )
    # Every thread commits, so that a skipped copy leaves an empty group and the
    # numbers that wait_smem_to_gmem counts stay the same.
    if commit_group:
        tma.commit_group()


@relates(primitives.copy_gmem_to_smem_p)
def _relate_load(
    node: Node, src, dst, *, collective_axes, leader_tracked, oob_mode
) -> None:
    pieces = 1
    if not isinstance(leader_tracked, CopyPartition.PARTITIONED):
        pieces = math.prod(node.network.sizes[axis] for axis in collective_axes or ())
    node.use(
        node.part(dst),
        "copy",
        other=node.part(src),
        pieces=pieces,
        allow_line=not collective_axes,
        in_bounds=oob_mode is OOBFillMode.PROMISE_IN_BOUNDS,
    )


@relates(primitives.copy_smem_to_gmem_p)
def _relate_store(node: Node, src: Access, dst: Access) -> None:
    node.use(node.part(src), "copy", other=node.part(dst), allow_line=True)


# --- groups and fences ----------------------------------------------------------------


@emits(primitives.commit_group_p)
def _commit_group(ctx: RuleContext) -> None:
    tma.commit_group()


@emits(primitives.wait_smem_to_gmem_p)
def _wait_smem_to_gmem(ctx: RuleContext, *, n: int, wait_read_only: bool) -> None:
    tma.wait_group(n, wait_read_only)


@emits(primitives.commit_smem_p)
def _commit_smem(ctx: RuleContext) -> None:
    tma.fence_proxy_async()
    mbarrier.synchronize()


@emits(primitives.fence_smem_p)
def _fence_smem(ctx: RuleContext, *, remote: bool) -> None:
    # What follows synchronizes the threads before it signals to others.
    tma.fence_proxy_async(of_cluster=remote)


@emits(primitives.commit_gmem_p)
def _commit_gmem(ctx: RuleContext) -> None:
    tma.fence_proxy_async_global()
    mbarrier.synchronize()
