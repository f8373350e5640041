# SPDX-License-Identifier: Apache-2.0
"""TMA copies, their groups and fences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import builtin

from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.expansion.memory import barrier_pointer as pointer_of
from pallas_gpu.lowering.expansion.memory import gmem_view, smem_view
from pallas_gpu.lowering.expansion.walk import Expansion
from pallas_gpu.lowering.families.mbarrier import (
    barrier_index,
    barrier_pointer,
    cluster_group,
    predicate_value,
)
from pallas_gpu.lowering.inference.collect import Node
from pallas_gpu.lowering.inference.constraints import array_of
from pallas_gpu.lowering.inference.network import Key, Network, Use
from pallas_gpu.lowering.rules import expands, infers, lane, relates, uniform, warpgroup
from pallas_gpu.mosaic import cluster, dialect, logical, mbarrier, tma
from pallas_gpu.mosaic.cluster import Group
from pallas_gpu.mosaic.smem import predicated
from pallas_gpu.primitives import tma as primitives
from pallas_gpu.types import CopyPartition, OOBFillMode

# On a copy of two CTAs that a leader tracks: what each loads. The dialect's own
# attribute means that the operation divides the source; here it is divided already.
_PARTITION = "pallas_gpu.partition"
_CACHE_HINT = "pallas_gpu.cache_hint"
_OOB_MODE = "pallas_gpu.oob_mode"
_PARTITIONS = {
    "partitioned": CopyPartition.PARTITIONED(0),
    "replicated": CopyPartition.REPLICATED,
}


@lane(primitives.copy_gmem_to_smem_p)
def _copy_gmem_to_smem_lane(ctx: RuleContext, *invals: Any) -> list[Any]:
    operands = ctx.operands(invals)
    src, dst, barrier = operands["src"], operands["dst"], operands["barrier"]
    index = barrier_index(barrier.ref, barrier.transforms)
    axes = ctx.eqn.params["collective_axes"]
    tma.copy_gmem_to_smem(
        ctx.builder,
        ctx.part(src),
        ctx.part(dst),
        barrier_pointer(ctx, barrier.ref, index),
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


@warpgroup(primitives.copy_gmem_to_smem_p)
def _copy_gmem_to_smem_warpgroup(ctx: RuleContext, *invals: Any) -> list[Any]:
    operands = ctx.operands(invals)
    src, dst, barrier = operands["src"], operands["dst"], operands["barrier"]
    index = barrier_index(barrier.ref, barrier.transforms)
    source = ctx.part(src)
    copy = dialect.ops.async_load(
        source,
        ctx.part(dst),
        *everything(ctx, source),
        cluster_axes(ctx, ctx.eqn.params["collective_axes"]),
        barrier=_barrier(barrier_pointer(ctx, barrier.ref, index)),
        predicate=predicate_value(operands["predicate"]),
    )
    partition = ctx.eqn.params["leader_tracked"]
    if partition is not None:
        name = next(n for n, p in _PARTITIONS.items() if type(p) is type(partition))
        copy.operation.attributes[_PARTITION] = ir.StringAttr.get(name)
    mode = ctx.eqn.params["oob_mode"]
    if mode is not None:
        copy.operation.attributes[_OOB_MODE] = ir.StringAttr.get(mode.value)
    _mark_hint(ctx, copy)
    return []


@expands("mosaic_gpu.async_load")
def _expand_load(expansion: Expansion, op: Any) -> None:
    kernel = expansion.kernel
    axes = [ir.IntegerAttr(a).value for a in op.collective]
    group = cluster.group(tuple(kernel.params.mesh.cluster), axes) if axes else None
    tma.copy_gmem_to_smem(
        kernel.builder,
        gmem_view(expansion, op.source),
        smem_view(expansion, op.destination),
        pointer_of(op.barrier),
        **_shared_by(group, _partition(op)),
        predicate=op.predicate,
        cache_hint=_hint(op),
        oob_mode=_oob_mode(op),
    )
    expansion.dead.append(op.operation)


def _mark_hint(ctx: RuleContext, copy: Any) -> None:
    """Leaves a copy's hint to the L2 cache on its operation."""
    hint = ctx.eqn.params["cache_hint"]
    if hint is not None:
        copy.operation.attributes[_CACHE_HINT] = ir.StringAttr.get(hint)


def _hint(op: Any) -> str | None:
    """Returns the hint on an operation."""
    return _text(op, _CACHE_HINT)


def _oob_mode(op: Any) -> OOBFillMode | None:
    """Returns what an operation says about elements outside of the array."""
    mode = _text(op, _OOB_MODE)
    return None if mode is None else OOBFillMode(mode)


def _text(op: Any, name: str) -> str | None:
    attributes = op.operation.attributes
    return ir.StringAttr(attributes[name]).value if name in attributes else None


def _partition(op: Any) -> CopyPartition | None:
    """Returns what the CTAs of an operation load, if a leader tracks it."""
    name = _text(op, _PARTITION)
    return None if name is None else _PARTITIONS[name]


@lane(primitives.copy_smem_to_gmem_p)
def _copy_smem_to_gmem_lane(ctx: RuleContext, *invals: Any) -> list[Any]:
    operands = ctx.operands(invals)
    src, dst = operands["src"], operands["dst"]
    with predicated(predicate_value(operands["predicate"])):
        tma.copy_smem_to_gmem(
            ctx.builder,
            ctx.part(src),
            ctx.part(dst),
            reduction=ctx.eqn.params["reduction_op"],
            commit=False,
            cache_hint=ctx.eqn.params["cache_hint"],
        )
    # Every thread commits, so that a skipped copy leaves an empty group and the
    # numbers that wait_smem_to_gmem counts stay the same.
    if ctx.eqn.params["commit_group"]:
        tma.commit_group()
    return []


@warpgroup(primitives.copy_smem_to_gmem_p)
def _copy_smem_to_gmem_warpgroup(ctx: RuleContext, *invals: Any) -> list[Any]:
    operands = ctx.operands(invals)
    src, dst = operands["src"], operands["dst"]
    target = ctx.part(dst)
    copy = dialect.ops.async_store(
        ctx.part(src),
        target,
        *everything(ctx, target),
        predicate=predicate_value(operands["predicate"]),
        commit_group=False,
        reduction_op=dialect.reduction_attribute(ctx.eqn.params["reduction_op"]),
    )
    _mark_hint(ctx, copy)
    # Every thread commits, so that a skipped copy leaves an empty group and the
    # numbers that wait_smem_to_gmem counts stay the same.
    if ctx.eqn.params["commit_group"]:
        tma.commit_group()
    return []


@expands("mosaic_gpu.async_store")
def _expand_store(expansion: Expansion, op: Any) -> None:
    with predicated(op.predicate):
        tma.copy_smem_to_gmem(
            expansion.kernel.builder,
            smem_view(expansion, op.source),
            gmem_view(expansion, op.destination),
            reduction=dialect.reduction_from_attribute(op.reduction_op),
            commit=False,
            cache_hint=_hint(op),
        )
    expansion.dead.append(op.operation)


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


@infers("mosaic_gpu.async_load", "mosaic_gpu.async_store")
def _infer_copy(network: Network, op: ir.Operation, key: Key) -> None:
    from_gmem = op.name == "mosaic_gpu.async_load"
    gmem = array_of(network, op, 0 if from_gmem else 1)
    smem = array_of(network, op, 1 if from_gmem else 0)
    pieces, axes = 1, list[int]()
    if from_gmem:
        collective = ir.ArrayAttr(op.attributes["collective"])
        axes = [ir.IntegerAttr(a).value for a in collective]
    if network.cluster and not isinstance(_partition(op), CopyPartition.PARTITIONED):
        pieces = math.prod(network.cluster[a] for a in axes)
    use = Use(
        op,
        "copy",
        smem,
        network.weight,
        other=gmem,
        pieces=pieces,
        allow_line=not axes,
        in_bounds=_oob_mode(op) is OOBFillMode.PROMISE_IN_BOUNDS,
    )
    network.use_memory(use)


def everything(ctx: RuleContext, part: ir.Value) -> tuple[list[ir.Value], list[int]]:
    """Returns indices and lengths of a slice of the whole memref, already a subview."""
    shape = list(part.type.shape)
    return [ctx.builder.i32(0)] * len(shape), shape


def cluster_axes(ctx: RuleContext, axes: Sequence[str]) -> ir.ArrayAttr:
    """Returns the numbers of cluster axes."""
    names = list(ctx.kernel.params.mesh.cluster_names)
    i32 = ir.IntegerType.get_signless(32)
    return ir.ArrayAttr.get([ir.IntegerAttr.get(i32, names.index(a)) for a in axes])


def _barrier(pointer: ir.Value) -> ir.Value:
    kind = ir.Type.parse(f"memref<!mosaic_gpu.barrier, {logical.SMEM_SPACE}>")
    return builtin.unrealized_conversion_cast([kind], [pointer])


# --- groups and fences ----------------------------------------------------------------


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
    mbarrier.synchronize()
    return []


@uniform(primitives.fence_smem_p)
def _fence_smem(ctx: RuleContext) -> list[Any]:
    # What follows synchronizes the threads before it signals to others.
    tma.fence_proxy_async(of_cluster=ctx.eqn.params["remote"])
    return []


@uniform(primitives.commit_gmem_p)
def _commit_gmem(ctx: RuleContext) -> list[Any]:
    tma.fence_proxy_async_global()
    mbarrier.synchronize()
    return []
