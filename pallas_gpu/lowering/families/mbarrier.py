# SPDX-License-Identifier: Apache-2.0
"""mbarriers: addresses, parities as register state, arrive and wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_gpu import types
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import I32, RuleContext, add_indices, starts
from pallas_gpu.lowering.rules import uniform
from pallas_gpu.mosaic import addressing, cluster, elementwise, mbarrier, module, tma
from pallas_gpu.mosaic.smem import predicated
from pallas_gpu.primitives.mbarrier import barrier_arrive_p, barrier_wait_p


def barrier_index(handle: vals.BarrierHandle, transforms: Any) -> int | ir.Value:
    """Returns the row-major index of one barrier of a declaration."""
    window = types.resolve(handle.ref_shape, transforms)
    index: Any = 0
    for start, size in zip(starts(window), handle.ref_shape, strict=True):
        if isinstance(index, int) and isinstance(start, int):
            index = index * size + start
            continue
        scaled = index * size if isinstance(index, int) else _scaled(index, size)
        index = start if scaled == 0 else add_indices(scaled, start)
    return index


def _scaled(value: ir.Value, factor: int) -> ir.Value:
    return arith.muli(value, module.current().i32(factor))


def barrier_pointer(
    ctx: RuleContext, handle: vals.BarrierHandle, index: int | ir.Value
) -> ir.Value:
    """Returns the address of one barrier."""
    base = handle.offset_bytes
    if isinstance(index, int):
        return ctx.builder.smem_pointer(base + types.BARRIER_BYTES * index)
    offset = arith.muli(index, ctx.builder.i32(types.BARRIER_BYTES))
    return addressing.offset_pointer(ctx.builder.smem_pointer(base), offset)


@uniform(barrier_arrive_p)
def _arrive(ctx: RuleContext, *invals: Any) -> list[Any]:
    operands = ctx.operands(invals)
    barrier, predicate = operands["barrier"], operands["predicate"]
    index = barrier_index(barrier.ref, barrier.transforms)
    pointer = barrier_pointer(ctx, barrier.ref, index)
    with predicated(predicate_value(predicate)):
        orders = ctx.eqn.params["orders_tensor_core"]
        if isinstance(barrier.ref.barrier, types.ClusterBarrier):
            cluster.arrive(
                pointer,
                *_reached(ctx, barrier.ref.barrier),
                memory_scope=_arrival_scope(ctx, barrier.ref.barrier),
                orders_tensor_core=orders,
            )
        else:
            mbarrier.arrive(pointer, orders_tensor_core=orders)
    return []


def _reached(ctx: RuleContext, barrier: types.ClusterBarrier) -> list[cluster.Group]:
    """Returns the CTAs in which an arrival on a barrier counts."""
    groups = [cluster_group(ctx, axes) for axes in barrier.groups]
    return [group.leader for group in groups] if barrier.leader_tracked else groups


def _arrival_scope(
    ctx: RuleContext, barrier: types.ClusterBarrier
) -> cluster.MemoryScope:
    # The tensor core of another CTA reads SMEM that this CTA's threads have written.
    return "cluster" if barrier.orders_tensor_core else ctx.kernel.arrival_scope


def cluster_group(ctx: RuleContext, axes: Sequence[str]) -> cluster.Group:
    """Returns the CTAs along some cluster axes, this one among them."""
    mesh = ctx.kernel.params.mesh
    names = list(mesh.cluster_names)
    return cluster.group(tuple(mesh.cluster), [names.index(a) for a in axes])


def predicate_value(predicate: Any) -> ir.Value | None:
    """Returns the predicate operand of an operation as an i1; None means always."""
    if predicate is None:
        return None
    if isinstance(predicate, bool):
        predicate = vals.constant(predicate, "bool")
    return vals.scalar_value(predicate)


@uniform(barrier_wait_p)
def _wait(ctx: RuleContext, *invals: Any) -> list[Any]:
    barrier = ctx.operands(invals)["barrier"]
    handle: vals.BarrierHandle = barrier.ref
    index = barrier_index(handle, barrier.transforms)
    pointer = barrier_pointer(ctx, handle, index)
    builder, state = ctx.builder, ctx.kernel.state
    bits = vals.scalar_value(state[handle.key])
    one = builder.i32(1)
    if isinstance(index, int):
        shift, mask = builder.i32(index), builder.i32(_signed(1 << index))
    else:
        shift, mask = index, arith.shli(one, index)
    parity = arith.andi(arith.shrui(bits, shift), one)
    scope = ctx.eqn.params.get("memory_scope")
    if scope is None and isinstance(handle.barrier, types.ClusterBarrier):
        scope = _arrival_scope(ctx, handle.barrier)
    if scope is not None:
        cluster.wait(pointer, parity, scope)
    else:
        mbarrier.wait(pointer, parity)
    if ctx.eqn.params["orders_tensor_core"]:
        mbarrier.fence_after_wait()
    state[handle.key] = elementwise.scalar(arith.xori(bits, mask), I32)
    if ctx.kernel.copies_by_threads:
        # cp.async is of the generic proxy: its data may be for wgmma, or for TMA.
        tma.fence_proxy_async()
    return []


def _signed(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value
