# SPDX-License-Identifier: Apache-2.0
"""mbarriers: arrive and wait."""

from __future__ import annotations

from typing import Any

from pallas_gpu import expect, types
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry

barrier_arrive_p = registry.define(
    "barrier_arrive",
    "mbarrier",
    issuers=registry.ISSUERS,
    writes=("barrier",),
    atomic=True,
)
barrier_wait_p = registry.define(
    "barrier_wait", "mbarrier", issuers=registry.ISSUERS, reads=("barrier",)
)


@expect.arguments(barrier=expect.anything, predicate=expect.anything)
def barrier_arrive(barrier: types.Ref, *, predicate: Any = None) -> None:
    """Arrives on a barrier once for the whole warpgroup, or warp.

    PTX: mbarrier.arrive.release.cta. Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp: all its earlier memory
    accesses are ordered before the arrival; one elected lane arrives. The phase
    completes when all arrivals with which the barrier was declared, and all bytes of
    copies on it, have arrived.

    Args:
      barrier: one barrier, or an array of one; index a larger one with
        `barrier.at[i]`.
      predicate: scalar bool, uniform in the warpgroup or warp; False skips the
        arrival.

    Raises:
      MemorySpaceError: the operand is not a barrier.
      ShapeError: the operand is an array of several barriers.
    """
    who = "barrier_arrive"
    one = ops.one_barrier(barrier, who)
    if predicate is not None:
        predicate = ops.require_scalar_bool(predicate, who)
    ops.bind(barrier_arrive_p, {"barrier": one, "predicate": predicate}, **_orders(one))


@expect.arguments(barrier=expect.anything)
def barrier_wait(barrier: types.Ref) -> None:
    """Waits until the barrier's next phase is complete.

    PTX: mbarrier.try_wait.parity.acquire.cta in a loop. Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp. Each keeps the parity of the
    phase it waits for in a register and flips it here, so it must wait for every phase,
    in order; and a barrier is waited for either by warpgroups or by warps, not by both.

    Args:
      barrier: one barrier, or an array of one; index a larger one with
        `barrier.at[i]`.

    Raises:
      MemorySpaceError: the operand is not a barrier.
      ShapeError: the operand is an array of several barriers.
    """
    one = ops.one_barrier(barrier, "barrier_wait")
    ops.bind(barrier_wait_p, {"barrier": one}, **_orders(one))


def wait_for_cluster(barrier: types.Ref) -> None:
    """`barrier_wait` for an arrival that releases stores of another CTA to this one.

    PTX: mbarrier.try_wait.parity.acquire.cluster in a loop. Since: sm_90.
    """
    one = ops.one_barrier(barrier, "barrier_wait")
    ops.bind(barrier_wait_p, {"barrier": one}, memory_scope="cluster", **_orders(one))


def _orders(one: ops.RefOperand) -> dict[str, bool]:
    """Returns the parameter that says whether tcgen05 operations are ordered, too."""
    return {"orders_tensor_core": types.base_aval(one.ref).barrier.orders_tensor_core}
