# SPDX-License-Identifier: Apache-2.0
"""Cluster launch control: requests for the work of other clusters, and the answers."""

from __future__ import annotations

import functools
import math
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_gpu.emitters import elementwise
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.grids import launch_control
from pallas_gpu.emitters.smem import slice_pointer
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.references import I32, Reference
from pallas_gpu.lowering.rules import emits
from pallas_gpu.primitives.grids.launch_control import (
    query_cluster_cancel_p,
    try_cluster_cancel_p,
)


def _conditions(ctx: RuleContext) -> tuple[ir.Value, ir.Value]:
    """Returns whether this warpgroup's arrival expects the answer, and whether it asks.

    Instances of `vmap` share a launch: another instance's work cannot be taken over, as
    the operands are those of this one.
    """
    kernel, mesh = ctx.kernel, ctx.kernel.params.mesh
    axes = ctx.eqn.params["collective_axes"]
    i1 = ir.IntegerType.get_signless(1)
    if kernel.params.batch:
        never = arith.constant(i1, 0)
        return never, never

    def first(names: list[str]) -> ir.Value:
        zero = ctx.builder.i32(0)
        at_zero = [
            arith.cmpi(arith.CmpIPredicate.eq, kernel.axes[name], zero)
            for name in names
        ]
        return functools.reduce(arith.andi, at_zero, arith.constant(i1, 1))

    arms = first([axis for axis in axes if axis == mesh.thread_name])
    return arms, first(list(axes))


@emits(try_cluster_cancel_p, result="store")
def _request(ctx: RuleContext, result: Reference, barrier: Reference) -> None:
    answer, pointer = slice_pointer(ctx.view(result)), ctx.view(barrier)
    arms, asks = _conditions(ctx)
    launch_control.request(
        answer, pointer, arms=arms, asks=asks, in_cluster=ctx.builder.spec.has_cluster
    )


# --- answers --------------------------------------------------------------------------


@emits(query_cluster_cancel_p, result="load")
def _decode(ctx: RuleContext, result: Reference) -> list[Any]:
    answer = slice_pointer(ctx.view(result))
    return _decoded(ctx, *launch_control.decode(answer))


def _decoded(ctx: RuleContext, granted: ir.Value, first: ir.Value) -> list[Any]:
    """Returns the results: granted, and the position on each named axis.

    `first` is the linear index of a block: the axes of the cluster vary fastest in it
    (`context.emit_axes`). Instances of `vmap` never take over work.
    """
    mesh = ctx.kernel.params.mesh
    if ctx.kernel.params.batch:
        granted = arith.constant(ir.IntegerType.get_signless(1), 0)
    positions = {}
    i32 = ctx.builder.i32
    rest = arith.divui(first, i32(math.prod(mesh.cluster)))
    for name, size in reversed(list(zip(mesh.grid_names, mesh.grid, strict=True))):
        positions[name] = arith.remui(rest, i32(size))
        rest = arith.divui(rest, i32(size))
    chosen = [positions[name] for name in ctx.eqn.params["grid_names"]]
    return [
        elementwise.scalar(granted, dtypes.BOOL),
        *(elementwise.scalar(x, I32) for x in chosen),
    ]
