# SPDX-License-Identifier: Apache-2.0
"""TMA copies between memrefs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import builtin

from pallas_gpu import arch
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering import warp
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.mbarrier import barrier_index, barrier_pointer
from pallas_gpu.lowering.rules import warpgroup
from pallas_gpu.lowering.warpgroup import memory
from pallas_gpu.mosaic import dialect, logical, tma
from pallas_gpu.primitives import tma as primitives


@warpgroup(primitives.copy_gmem_to_smem_p)
def _copy_gmem_to_smem(ctx: RuleContext, *invals: Any) -> list[Any]:
    ctx.kernel.target.require(arch.Feature.TMA, "copy_gmem_to_smem")
    operands = ctx.operands(invals)
    src, dst, barrier = operands["src"], operands["dst"], operands["barrier"]
    index = barrier_index(barrier.ref, barrier.transforms)
    source = memory.part(src.ref, src.transforms)
    copy = dialect.ops.async_load(
        source,
        memory.part(dst.ref, dst.transforms),
        *_everything(ctx, source),
        _cluster_axes(ctx, ctx.eqn.params["collective_axes"]),
        barrier=_barrier(barrier_pointer(ctx, barrier.ref, index)),
        predicate=_predicate(operands["predicate"]),
    )
    warp.mark_scope(ctx, copy)
    return []


@warpgroup(primitives.copy_smem_to_gmem_p)
def _copy_smem_to_gmem(ctx: RuleContext, *invals: Any) -> list[Any]:
    ctx.kernel.target.require(arch.Feature.TMA, "copy_smem_to_gmem")
    operands = ctx.operands(invals)
    src, dst = operands["src"], operands["dst"]
    target = memory.part(dst.ref, dst.transforms)
    copy = dialect.ops.async_store(
        memory.part(src.ref, src.transforms),
        target,
        *_everything(ctx, target),
        predicate=_predicate(operands["predicate"]),
        commit_group=False,
    )
    warp.mark_scope(ctx, copy)
    # Every thread commits, so that a skipped copy leaves an empty group and the
    # numbers that wait_smem_to_gmem counts stay the same.
    if ctx.eqn.params["commit_group"]:
        tma.commit_group()
    return []


def _everything(ctx: RuleContext, part: ir.Value) -> tuple[list[ir.Value], list[int]]:
    """Indices and lengths of a slice that is the whole memref: it is one already."""
    shape = list(part.type.shape)
    return [ctx.builder.i32(0)] * len(shape), shape


def _cluster_axes(ctx: RuleContext, axes: Sequence[str]) -> ir.ArrayAttr:
    names = list(ctx.kernel.params.mesh.cluster_names)
    i32 = ir.IntegerType.get_signless(32)
    return ir.ArrayAttr.get([ir.IntegerAttr.get(i32, names.index(a)) for a in axes])


def _barrier(pointer: ir.Value) -> ir.Value:
    kind = ir.Type.parse(f"memref<!mosaic_gpu.barrier, {logical.SMEM_SPACE}>")
    return builtin.unrealized_conversion_cast([kind], [pointer])


def _predicate(condition: Any) -> ir.Value | None:
    if condition is None:
        return None
    if isinstance(condition, bool):
        condition = vals.constant(condition, "bool")
    return vals.scalar_value(condition)
