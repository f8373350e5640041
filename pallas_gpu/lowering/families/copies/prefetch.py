# SPDX-License-Identifier: Apache-2.0
"""Prefetches to the L2 cache."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.expansion.memory import gmem_view
from pallas_gpu.lowering.expansion.walk import Expansion
from pallas_gpu.lowering.families import tma
from pallas_gpu.lowering.families.mbarrier import cluster_group, predicate_value
from pallas_gpu.lowering.inference.collect import Node
from pallas_gpu.lowering.inference.network import Key, Network
from pallas_gpu.lowering.rules import expands, infers, lane, relates, warpgroup
from pallas_gpu.mosaic import cluster, dialect
from pallas_gpu.mosaic.copies.prefetch import prefetch
from pallas_gpu.primitives.copies.prefetch import async_prefetch_p


@lane(async_prefetch_p)
def _async_prefetch_lane(ctx: RuleContext, *invals: Any) -> list[Any]:
    operands, axes = ctx.operands(invals), ctx.eqn.params["collective_axes"]
    prefetch(
        ctx.builder,
        ctx.part(operands["ref"]),
        shared_by=cluster_group(ctx, axes) if axes else None,
        predicate=predicate_value(operands["predicate"]),
    )
    return []


@warpgroup(async_prefetch_p)
def _async_prefetch_warpgroup(ctx: RuleContext, *invals: Any) -> list[Any]:
    operands = ctx.operands(invals)
    part = ctx.part(operands["ref"])
    dialect.ops.async_prefetch(
        part,
        *tma.everything(ctx, part),
        tma.cluster_axes(ctx, ctx.eqn.params["collective_axes"]),
        predicate=predicate_value(operands["predicate"]),
    )
    return []


@relates(async_prefetch_p)
def _relate(node: Node, *_: Any) -> list[Any]:
    """It reads GMEM, whose layout is given."""
    return []


@infers("mosaic_gpu.async_prefetch")
def _infer_prefetch(network: Network, op: ir.Operation, key: Key) -> None:
    """It reads GMEM, whose layout is given."""


@expands("mosaic_gpu.async_prefetch")
def _expand_prefetch(expansion: Expansion, op: Any) -> None:
    kernel = expansion.kernel
    axes = [ir.IntegerAttr(a).value for a in op.collective]
    group = cluster.group(tuple(kernel.params.mesh.cluster), axes) if axes else None
    prefetch(
        kernel.builder,
        gmem_view(expansion, op.source),
        shared_by=group,
        predicate=op.predicate,
    )
    expansion.dead.append(op.operation)
