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
from pallas_gpu.types import CopyPartition, OOBFillMode


@emits(primitives.copy_gmem_to_smem_p)
def _copy_gmem_to_smem(ctx: RuleContext, *invals: Any) -> list[Any]:
    operands = ctx.operands(invals)
    src, dst, barrier = operands["src"], operands["dst"], operands["barrier"]
    axes = ctx.eqn.params["collective_axes"]
    tma.copy_gmem_to_smem(
        ctx.builder,
        ctx.view(src),
        ctx.view(dst),
        barrier_pointer(ctx, barrier),
        **_shared_by(
            cluster_group(ctx, axes) if axes else None, ctx.eqn.params["leader_tracked"]
        ),
        predicate=predicate_value(operands["predicate"]),
        cache_hint=ctx.eqn.params["cache_hint"],
        oob_mode=ctx.eqn.params["oob_mode"],
    )
    return []


def _shared_by(group: Group | None, partition: CopyPartition | None) -> dict[str, Any]:
    """Returns how the CTAs along collective_axes share a copy."""
    if partition is None:
        return {"multicast": group}
    # The source of a partitioned copy is the part of this CTA.
    multicast = None if isinstance(partition, CopyPartition.PARTITIONED) else group
    return {"multicast": multicast, "pair": group}


@emits(primitives.copy_smem_to_gmem_p)
def _copy_smem_to_gmem(ctx: RuleContext, *invals: Any) -> list[Any]:
    operands = ctx.operands(invals)
    src, dst = operands["src"], operands["dst"]
    with predicated(predicate_value(operands["predicate"])):
        tma.copy_smem_to_gmem(
            ctx.builder,
            ctx.view(src),
            ctx.view(dst),
            reduction=ctx.eqn.params["reduction_op"],
            commit=False,
            cache_hint=ctx.eqn.params["cache_hint"],
        )
    # Every thread commits, so that a skipped copy leaves an empty group and the
    # numbers that wait_smem_to_gmem counts stay the same.
    if ctx.eqn.params["commit_group"]:
        tma.commit_group()
    return []


@relates(primitives.copy_gmem_to_smem_p)
def _relate_load(node: Node, *_: Any) -> list[Any]:
    params, operands = node.params, node.operands
    axes = params["collective_axes"]
    pieces = 1
    if not isinstance(params["leader_tracked"], CopyPartition.PARTITIONED):
        pieces = math.prod(node.network.sizes[axis] for axis in axes or ())
    node.use(
        node.part(operands["dst"]),
        "copy",
        other=node.part(operands["src"]),
        pieces=pieces,
        allow_line=not axes,
        in_bounds=params["oob_mode"] is OOBFillMode.PROMISE_IN_BOUNDS,
    )
    return []


@relates(primitives.copy_smem_to_gmem_p)
def _relate_store(node: Node, *_: Any) -> list[Any]:
    operands = node.operands
    source, target = node.part(operands["src"]), node.part(operands["dst"])
    node.use(source, "copy", other=target, allow_line=True)
    return []


# --- groups and fences ----------------------------------------------------------------


@emits(primitives.commit_group_p)
def _commit_group(ctx: RuleContext) -> list[Any]:
    tma.commit_group()
    return []


@emits(primitives.wait_smem_to_gmem_p)
def _wait_smem_to_gmem(ctx: RuleContext) -> list[Any]:
    params = ctx.eqn.params
    tma.wait_group(params["n"], params["wait_read_only"])
    return []


@emits(primitives.commit_smem_p)
def _commit_smem(ctx: RuleContext) -> list[Any]:
    tma.fence_proxy_async()
    mbarrier.synchronize()
    return []


@emits(primitives.fence_smem_p)
def _fence_smem(ctx: RuleContext) -> list[Any]:
    # What follows synchronizes the threads before it signals to others.
    tma.fence_proxy_async(of_cluster=ctx.eqn.params["remote"])
    return []


@emits(primitives.commit_gmem_p)
def _commit_gmem(ctx: RuleContext) -> list[Any]:
    tma.fence_proxy_async_global()
    mbarrier.synchronize()
    return []
