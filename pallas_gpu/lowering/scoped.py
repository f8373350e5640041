# SPDX-License-Identifier: Apache-2.0
"""Scopes: SMEM arrays by the plan, barriers initialised once in the prologue."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir.dialects import nvvm

from pallas_gpu import resources, types
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext, lower_jaxpr
from pallas_gpu.lowering.rules import lane
from pallas_gpu.primitives.scoped import run_scoped_p


@lane(run_scoped_p)
def _run_scoped(ctx: RuleContext, *captured: Any) -> list[Any]:
    kernel, eqn = ctx.kernel, ctx.eqn
    outer_top = kernel.smem_top_bytes
    placed, kernel.smem_top_bytes = resources.place_arrays(eqn, outer_top)
    handles = [
        _barrier(ctx, i, var.aval)
        if isinstance(var.aval, types.BarrierRef)
        else _array(ctx, allocation, var.aval)
        for i, (var, allocation) in enumerate(
            zip(resources.scope_refs(eqn), placed, strict=True)
        )
    ]
    # The scope before this one may have used the same bytes, in another warpgroup too.
    shares_bytes = outer_top > 0 or not kernel_is_one_scope(ctx)
    if kernel.params.mesh.warpgroups > 1 and shares_bytes:
        nvvm.barrier()
    results = lower_jaxpr(kernel, eqn.params["jaxpr"], [*captured, *handles])
    kernel.smem_top_bytes = outer_top
    return results


def kernel_is_one_scope(ctx: RuleContext) -> bool:
    """True when this scope is the only one at the top of the kernel's body."""
    body = ctx.kernel.params.jaxpr
    scopes = [eqn for eqn in body.eqns if eqn.primitive is run_scoped_p]
    return scopes == [ctx.eqn]


def _array(ctx: RuleContext, allocation: Any, aval: Any) -> vals.SmemHandle:
    layout = types.smem_layout(aval.shape, aval.dtype, aval.transforms)
    pointer = ctx.builder.smem_pointer(allocation.offset_bytes)
    return vals.SmemHandle(pointer, layout, vals.numpy_dtype(aval))


def _barrier(ctx: RuleContext, i: int, aval: types.BarrierRef) -> vals.BarrierHandle:
    slot = ctx.kernel.plan.barrier_slots[id(ctx.eqn), i]
    offset = ctx.kernel.plan.barrier_offset_bytes + resources.BARRIER_BYTES * slot
    return vals.BarrierHandle(offset, aval.barrier, slot)
