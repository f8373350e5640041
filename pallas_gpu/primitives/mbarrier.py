# SPDX-License-Identifier: Apache-2.0
"""mbarriers: arrive, expect bytes, wait and test."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import _jax, errors, expect, types
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry

__all__ = [
    "barrier_arrive",
    "barrier_arrive_and_wait",
    "barrier_expect",
    "barrier_test",
    "barrier_wait",
]

barrier_arrive_p = registry.define(
    "barrier_arrive", "mbarrier", releases=True, writes=("barrier",), atomic=True
)
barrier_wait_p = registry.define(
    "barrier_wait", "mbarrier", reads=("barrier",), waits=True
)
barrier_test_p = registry.define(
    "barrier_test",
    "mbarrier",
    reads=("barrier",),
    result=lambda operands, **params: _jax.ShapedArray((), jnp.dtype(bool)),
)
barrier_expect_p = registry.define(
    "barrier_expect", "mbarrier", writes=("barrier",), atomic=True
)


@expect.arguments(num_arrivals=expect.integer(1, types.MAX_ARRIVALS, unit="arrivals"))
def barrier_arrive(
    barrier: types.Ref, *, predicate: ops.Predicate = None, num_arrivals: int = 1
) -> None:
    """Arrives on a barrier once for the whole warpgroup, or warp.

    PTX: mbarrier.arrive.release.cta; on another CTA's barrier, mapa and
    mbarrier.arrive.release.{cta,cluster}.shared::cluster. Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp: all its earlier memory
    accesses are ordered before the arrival; one elected lane arrives. The phase
    completes when all arrivals with which the barrier was declared, and all bytes of
    copies on it, have arrived.

    Args:
      barrier: one barrier, or an array of one; index a larger one with
        `barrier.at[i]`. On `cluster_ref(barrier, ...)` it arrives in that CTA alone,
        also if it is a `ClusterBarrier`.
      predicate: scalar bool, uniform in the warpgroup or warp; False skips the
        arrival.
      num_arrivals: how many arrivals it counts as, 1 to 2**20 - 1, in each CTA that
        it reaches.

    Raises:
      MemorySpaceError: the operand is not a barrier.
      ShapeError: the operand is an array of several barriers.
      BarrierError: a phase has fewer arrivals.
      AxisNameError, OutOfBoundsError: the cluster has no such axis, or no such CTA.
    """
    who = "barrier_arrive"
    ops.require_ref(barrier, who, "the barrier")
    own, axes, cta = ops.split_cta(barrier)
    one = ops.one_barrier(own, who)
    ops.bind(
        barrier_arrive_p,
        {"barrier": one, "predicate": predicate, "cta": cta},
        num_arrivals=num_arrivals,
        cta_axes=axes,
        **_orders(one),
    )


@expect.arguments(num_bytes=expect.integer(0, types.MAX_PENDING_BYTES, unit="bytes"))
def barrier_expect(
    barrier: types.Ref, num_bytes: int, *, predicate: ops.Predicate = None
) -> None:
    """Adds bytes to those that the current phase of a barrier waits for.

    PTX: mbarrier.expect_tx.relaxed.cta. Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp: one elected lane adds them.
    It is no arrival. The phase then also waits for as many bytes of asynchronous stores
    that complete on the barrier without announcing them. A copy announces its own.

    Args:
      barrier: one barrier of this CTA, or an array of one.
      num_bytes: 0 to 2**20 - 1.
      predicate: scalar bool, uniform in the warpgroup or warp; False adds nothing.

    Raises:
      MemorySpaceError: the operand is not a barrier.
      ShapeError: the operand is an array of several barriers.
    """
    who = "barrier_expect"
    one = ops.one_barrier(barrier, who)
    operands = {"barrier": one, "predicate": predicate}
    ops.bind(barrier_expect_p, operands, num_bytes=num_bytes)


@expect.arguments()
def barrier_wait(barrier: types.Ref) -> None:
    """Waits until the barrier's next phase is complete.

    PTX: mbarrier.try_wait.parity.acquire.cta in a loop. Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp. Each keeps the parity of the
    phase it waits for in a register and flips it here, so it must wait for every phase,
    in order. A wait of all four warps of a warpgroup is one of the warpgroup, too.

    Args:
      barrier: one barrier, or an array of one; index a larger one with
        `barrier.at[i]`.

    Raises:
      MemorySpaceError: the operand is not a barrier.
      ShapeError: the operand is an array of several barriers.
    """
    one = ops.one_barrier(barrier, "barrier_wait")
    ops.bind(barrier_wait_p, {"barrier": one}, **_orders(one))


@expect.arguments()
def barrier_arrive_and_wait(barrier: types.Ref) -> None:
    """Arrives on a barrier, then waits until its next phase is complete.

    PTX: as `barrier_arrive` and `barrier_wait`. Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp: those that arrive on the
    barrier meet there.

    Args:
      barrier: one barrier, or an array of one.

    Raises:
      MemorySpaceError: the operand is not a barrier.
      ShapeError: the operand is an array of several barriers.
    """
    barrier_arrive(barrier)
    barrier_wait(barrier)


@expect.arguments()
def barrier_test(barrier: types.Ref) -> jax.Array:
    """Tests whether the barrier's next phase is complete, and does not wait for it.

    PTX: mbarrier.test_wait.parity.acquire.cta, and barrier.red.and or vote.sync.all.
    Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp: all its threads get the same
    result. True is a successful `barrier_wait`: it makes the same visible, and the next
    wait or test is for the phase after it. After False the phase has yet to be waited
    for.

    Args:
      barrier: one barrier, or an array of one.

    Returns:
      A scalar bool.

    Raises:
      MemorySpaceError: the operand is not a barrier.
      ShapeError: the operand is an array of several barriers.

    Example:
      >>> done = plgpu.barrier_test(barrier)
      >>> plgpu.when(~done)(lambda: plgpu.barrier_wait(barrier))
    """
    one = ops.one_barrier(barrier, "barrier_test")
    return ops.bind(barrier_test_p, {"barrier": one}, **_orders(one))


def wait_for_cluster(barrier: types.Ref) -> None:
    """`barrier_wait` for an arrival that releases stores of another CTA to this one.

    PTX: mbarrier.try_wait.parity.acquire.cluster in a loop. Since: sm_90.
    """
    one = ops.one_barrier(barrier, "barrier_wait")
    ops.bind(barrier_wait_p, {"barrier": one}, memory_scope="cluster", **_orders(one))


def _orders(one: ops.RefOperand) -> dict[str, bool]:
    """Returns the parameter that says whether tcgen05 operations are ordered, too."""
    return {"orders_tensor_core": types.base_aval(one.ref).barrier.orders_tensor_core}


@registry.checks(barrier_arrive_p)
def _check_arrival(op: Any, mesh: types.Mesh) -> None:
    arrivals = op.operands["barrier"].buffer.aval.barrier.phase_arrivals(mesh)
    if op.params["num_arrivals"] > arrivals:
        raise errors.BarrierError(
            "barrier_arrive: a phase of the barrier has fewer arrivals",
            expected=f"num_arrivals of 1 to {arrivals}",
            got=f"num_arrivals={op.params['num_arrivals']}",
            hint="declare the barrier with more arrivals: "
            "plgpu.Barrier(num_arrivals=...)",
        )
