# SPDX-License-Identifier: Apache-2.0
"""mbarriers: addresses, arrivals and expected bytes, waits and tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu import types
from pallas_gpu.emitters import addressing, arith, cluster, elementwise, mbarrier, tma
from pallas_gpu.emitters.smem import predicated
from pallas_gpu.lowering import parities
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.families.indexed import rank_of
from pallas_gpu.lowering.references import Reference, index_value
from pallas_gpu.lowering.rules import emits
from pallas_gpu.primitives.mbarrier import (
    barrier_arrive_p,
    barrier_expect_p,
    barrier_test_p,
    barrier_wait_p,
)


def barrier_pointer(ctx: RuleContext, barrier: Reference) -> ir.Value:
    """Returns the address of one barrier."""
    handle, index = barrier.handle, barrier.element()
    base, distance = handle.offset_bytes, handle.distance
    if isinstance(index, int):
        start = base + types.BARRIER_BYTES * index
        return addressing.own_smem_pointer(start, distance)
    offset = arith.muli(index, ctx.builder.i32(types.BARRIER_BYTES))
    start_pointer = addressing.own_smem_pointer(base, distance)
    return addressing.offset_pointer(start_pointer, offset)


@emits(barrier_arrive_p)
def _arrive(
    ctx: RuleContext, barrier: Reference, predicate: Any, cta: Any, *,
    orders_tensor_core: bool, num_arrivals: int,
) -> None:  # fmt: skip
    pointer = barrier_pointer(ctx, barrier)
    with predicated(predicate_value(predicate)):
        if reached := _reached(ctx, barrier.handle.barrier, cta):
            cluster.arrive(
                pointer,
                *reached,
                memory_scope=_arrival_scope(ctx, barrier.handle.barrier),
                orders_tensor_core=orders_tensor_core,
                count=num_arrivals,
            )
        else:
            mbarrier.arrive(
                pointer, orders_tensor_core=orders_tensor_core, count=num_arrivals
            )


@emits(barrier_expect_p)
def _expect(
    ctx: RuleContext, barrier: Reference, predicate: Any, *, num_bytes: int
) -> None:
    pointer = barrier_pointer(ctx, barrier)
    with predicated(predicate_value(predicate)):
        mbarrier.expect_tx(pointer, num_bytes)


def _reached(
    ctx: RuleContext, barrier: types.Barrier, cta: Sequence[Any] | None
) -> list[cluster.Group]:
    """Returns the CTAs in which an arrival counts, also that at `cta`; or none."""
    if cta is not None:
        other = rank_of(ctx, ctx.eqn.params["cta_axes"], list(map(index_value, cta)))
        return [dataclasses.replace(cluster_group(ctx, ()), ranks=(other,))]
    if not isinstance(barrier, types.ClusterBarrier):
        return []
    groups = [cluster_group(ctx, axes) for axes in barrier.groups]
    return [group.leader for group in groups] if barrier.leader_tracked else groups


def _arrival_scope(ctx: RuleContext, barrier: types.Barrier) -> cluster.MemoryScope:
    # The tensor core of another CTA reads SMEM that this CTA's threads have written.
    return "cluster" if barrier.orders_tensor_core else ctx.kernel.traits.arrival_scope


def cluster_group(ctx: RuleContext, axes: Sequence[str]) -> cluster.Group:
    """Returns the CTAs along some cluster axes, this one among them."""
    mesh = ctx.kernel.params.mesh
    names = list(mesh.cluster_names)
    return cluster.group(tuple(mesh.cluster), [names.index(a) for a in axes])


def predicate_value(predicate: Any) -> ir.Value | None:
    """Returns the predicate operand of an operation as an i1; None means always."""
    return None if predicate is None else vals.scalar_value(predicate)


@emits(barrier_wait_p)
def _wait(ctx: RuleContext, barrier: Reference, *, orders_tensor_core: bool) -> None:
    waited = _Waited.of(ctx, barrier)
    if waited.scope is not None:
        cluster.wait(waited.pointer, waited.parity, waited.scope)
    else:
        mbarrier.wait(waited.pointer, waited.parity)
    if orders_tensor_core:
        mbarrier.fence_after_wait()
    _fence_copies(ctx)
    parities.flip(ctx.kernel, waited.handle, waited.index)


@emits(barrier_test_p)
def _test(ctx: RuleContext, barrier: Reference, *, orders_tensor_core: bool) -> Any:
    waited = _Waited.of(ctx, barrier)
    if waited.scope is not None:
        done = cluster.test(waited.pointer, waited.parity, waited.scope)
    else:
        done = mbarrier.test(waited.pointer, waited.parity)
    # All threads have to continue in the same way, and each has to have seen the phase
    # complete, so that each sees what has arrived.
    done = mbarrier.agree(done)
    if orders_tensor_core:
        mbarrier.fence_after_wait()
    _fence_copies(ctx)
    parities.flip(ctx.kernel, waited.handle, waited.index, where=done)
    return elementwise.scalar(done, np.dtype(bool))


def _fence_copies(ctx: RuleContext) -> None:
    if ctx.kernel.traits.copies_by_threads:
        # cp.async is of the generic proxy: its data may be for wgmma, or for TMA.
        tma.fence_proxy_async()


@dataclasses.dataclass(frozen=True)
class _Waited:
    """The barrier that an equation waits for.

    Attributes:
      handle: its declaration.
      index: its index there.
      pointer: its address.
      parity: that of the phase.
      scope: of the memory that the wait acquires; None for a barrier of the CTA.
    """

    handle: vals.BarrierHandle
    index: int | ir.Value
    pointer: ir.Value
    parity: ir.Value
    scope: cluster.MemoryScope | None

    @classmethod
    def of(cls, ctx: RuleContext, barrier: Reference) -> _Waited:
        handle: vals.BarrierHandle = barrier.handle
        index = barrier.element()
        pointer = barrier_pointer(ctx, barrier)
        scope = ctx.eqn.params.get("memory_scope")
        others = isinstance(handle.barrier, types.ClusterBarrier)
        if scope is None and (others or ctx.eqn in ctx.kernel.traits.waits_for_stores):
            scope = _arrival_scope(ctx, handle.barrier)
        parity = parities.parity(ctx.kernel, handle, index)
        return cls(handle, index, pointer, parity, scope)
