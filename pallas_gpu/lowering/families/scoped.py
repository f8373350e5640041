# SPDX-License-Identifier: Apache-2.0
"""Scopes: SMEM arrays as planned, barriers initialised once in the prologue."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir.dialects import nvvm

from pallas_gpu import resources, types
from pallas_gpu.emitters import addressing, mbarrier
from pallas_gpu.emitters.smem import SmemView
from pallas_gpu.emitters.tensor_cores.tmem import TmemView
from pallas_gpu.layouts.window import Window
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering import workspace
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.families.tensor_cores import wgmma
from pallas_gpu.lowering.inference.collect import Node
from pallas_gpu.lowering.rules import emits, emits_and_relates, relates
from pallas_gpu.primitives.scoped import get_global_p, run_scoped_p


@emits(run_scoped_p)
def _run_scoped(ctx: RuleContext, *captured: Any) -> list[Any]:
    kernel, eqn = ctx.kernel, ctx.eqn
    own = _owner(ctx)
    tops, outer_columns = kernel.smem_top_bytes, kernel.tmem_top_columns
    outer_top = tops[own]
    refs = resources.scope_refs(eqn)
    placed, tops[own] = resources.place(types.SMEM, refs, outer_top)
    in_tmem, kernel.tmem_top_columns = resources.place(types.TMEM, refs, outer_columns)
    handles = [
        _handle(ctx, i, var, smem or columns)
        for i, (var, smem, columns) in enumerate(
            zip(refs, placed, in_tmem, strict=True)
        )
    ]
    scopes = resources.scopes(kernel.params.jaxpr)
    is_only = [site.eqn for site in scopes if not site.enclosing] == [eqn]
    # A previous scope may use the same bytes, also in another warpgroup.
    shares_bytes = outer_top > 0 or not is_only
    collective = bool(eqn.params["collective_axes"])
    if kernel.params.mesh.warpgroups > 1 and own == "block":
        if collective and shares_bytes:
            nvvm.barrier()
    elif eqn in kernel.traits.meets:
        mbarrier.synchronize()
    results = ctx.run(0, [*captured, *handles])
    tops[own], kernel.tmem_top_columns = outer_top, outer_columns
    for handle in handles:
        if isinstance(handle, vals.AccumulatorHandle):
            del kernel.state[handle.key]
    return results


@relates(run_scoped_p)
def _relate_scope(node: Node, *captured: Any) -> list[Any]:
    declared = [
        _declared(node, i, var)
        for i, var in enumerate(resources.scope_refs(node.op.equation))
    ]
    return node.run(0, [*captured, *declared])


def _declared(node: Node, i: int, var: Any) -> Any:
    """Returns what stands for a reference that a scope declares."""
    aval = var.aval
    if not isinstance(aval, types.KernelRef):
        return aval
    free = bool(aval.transforms) or var in node.network.free
    row_major = aval.storage.overlay is not None and not free
    return node.declare(i, var, row_major=row_major)


@emits_and_relates(get_global_p)
def _get_global(on: RuleContext | Node) -> list[Any]:
    (var,) = on.op.equation.outvars
    if isinstance(on, Node):
        return [on.declare(0, var)]
    return [workspace.handle(on.kernel, var)]


def _handle(ctx: RuleContext, i: int, var: Any, allocation: Any) -> Any:
    kernel, aval = ctx.kernel, var.aval
    if aval.memory_space.gmem_array(aval) is not None:
        return workspace.handle(ctx.kernel, var)
    match aval:
        case types.BarrierRef():
            return _barrier(ctx, i, aval)
        case types.AccumulatorRef():
            return wgmma.new_accumulator(ctx, i, aval)
        case _ if aval.memory_space is types.TMEM:
            layout, dtype = aval.storage.layout, vals.numpy_dtype(aval)
            whole = Window.whole(aval.shape)
            return TmemView(kernel.tmem, allocation.offset, layout, dtype, whole)
        case _:
            offset, distance, own = allocation.offset, None, _owner(ctx)
            if own != "block":
                part = kernel.plan.own(own)
                offset += part.offset_bytes
                distance = addressing.Distance(own, part.bytes_each)
            pointer = addressing.own_smem_pointer(offset, distance)
            layout = kernel.layouts.smem(ctx, i, aval)
            whole, internal = Window.whole(layout.shape), aval.storage.internal
            dtype = vals.numpy_dtype(aval)
            return SmemView(pointer, layout, dtype, whole, internal)


def _owner(ctx: RuleContext) -> resources.Owner:
    """Returns who has the arrays in SMEM of the scope."""
    return resources.owner(
        ctx.eqn,
        in_warp=ctx.builder.issuer == "warp",
        warpgroups=ctx.kernel.params.mesh.warpgroups,
    )


def _barrier(ctx: RuleContext, i: int, aval: types.BarrierRef) -> vals.BarrierHandle:
    in_warp = ctx.builder.issuer == "warp"
    key = resources.BarrierKey(ctx.eqn, i, in_warp)
    slot = ctx.kernel.plan.barrier_slots[key]
    offset = ctx.kernel.plan.barrier_offset_bytes + types.BARRIER_BYTES * slot
    size_bytes = types.BARRIER_BYTES * aval.barrier.size
    distance = addressing.Distance("warp", size_bytes) if in_warp else None
    return vals.BarrierHandle(offset, aval.barrier, slot, distance)
