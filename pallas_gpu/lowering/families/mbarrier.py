# SPDX-License-Identifier: Apache-2.0
"""mbarriers: addresses, arrivals and expected bytes, waits and tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu import types
from pallas_gpu.emitters import cluster, elementwise, mbarrier, tma
from pallas_gpu.emitters.control import predicated
from pallas_gpu.lowering import parities
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.families.indexed import rank_of
from pallas_gpu.lowering.references import Reference, index_value
from pallas_gpu.lowering.rules import emits
from pallas_gpu.primitives.mbarrier import (
    barrier_arrive_p,
    barrier_test_p,
    barrier_wait_p,
)


@emits(barrier_arrive_p)
def _arrive(
    ctx: RuleContext, barrier: Reference, predicate: Any, cta: Any, *,
    orders_tensor_core: bool, num_arrivals: int,
) -> None:  # fmt: skip
    pointer = ctx.view(barrier)
    with predicated(ctx.argument(predicate)):
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


def _reached(
    ctx: RuleContext, barrier: types.Barrier, cta: Sequence[Any] | None
) -> list[cluster.Group]:
    """Returns the CTAs in which an arrival counts, also that at `cta`; or none."""
    if cta is not None:
        other = rank_of(ctx, ctx.eqn.params["cta_axes"], list(map(index_value, cta)))
        return [dataclasses.replace(ctx.group(()), ranks=(other,))]
    if not isinstance(barrier, types.ClusterBarrier):
        return []
    groups = [ctx.group(axes) for axes in barrier.groups]
    return [group.leader for group in groups] if barrier.leader_tracked else groups


def _arrival_scope(ctx: RuleContext, barrier: types.Barrier) -> cluster.MemoryScope:
    # The tensor core of another CTA reads SMEM that this CTA's threads have written.
    return "cluster" if barrier.orders_tensor_core else ctx.kernel.traits.arrival_scope


@emits(barrier_wait_p)
def _wait(ctx: RuleContext, barrier: Reference) -> None:
    _waited(ctx, barrier, mbarrier.wait)


@emits(barrier_test_p)
def _test(ctx: RuleContext, barrier: Reference) -> Any:
    # All threads have to continue in the same way, and each has to have seen the phase
    # complete, so that each sees what has arrived.
    def agreed(*phase: Any, **options: Any) -> ir.Value:
        return mbarrier.agree(mbarrier.test(*phase, **options))

    return elementwise.scalar(_waited(ctx, barrier, agreed), np.dtype(bool))


def _waited(
    ctx: RuleContext, barrier: Reference, emit: Callable[..., ir.Value | None]
) -> ir.Value | None:
    """Waits, or tests, for the phase of a barrier that is next; returns the result.

    Args:
      emit: of a barrier's address, a parity, and the scope of the memory that is
        acquired, None for a barrier of the CTA; returns whether the phase is complete,
        None if it waits for that.
    """
    handle, index, traits = barrier.handle, barrier.element(), ctx.kernel.traits
    pointer, scope = ctx.view(barrier), ctx.op.params.get("memory_scope")
    others = isinstance(handle.barrier, types.ClusterBarrier)
    if scope is None and (others or ctx.eqn in traits.waits_for_stores):
        scope = _arrival_scope(ctx, handle.barrier)
    parity = parities.parity(ctx.kernel, handle, index)
    done = emit(pointer, parity, memory_scope=scope)
    if ctx.op.params["orders_tensor_core"]:
        mbarrier.fence_after_wait()
    if traits.copies_by_threads:
        # cp.async is of the generic proxy: its data may be for wgmma, or for TMA.
        tma.fence_proxy_async()
    parities.flip(ctx.kernel, handle, index, where=done)
    return done
