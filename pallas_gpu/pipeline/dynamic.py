# SPDX-License-Identifier: Apache-2.0
"""`dynamic_scheduling_loop`: clusters take the next position of the grid when free."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_gpu import _jax, errors, expect, types
from pallas_gpu.entry import check, scope
from pallas_gpu.entry.control import loop, while_loop
from pallas_gpu.entry.scoped import scoped
from pallas_gpu.pipeline.loops import NDLoopInfo, unravel
from pallas_gpu.primitives import mbarrier
from pallas_gpu.primitives.grids import scheduling
from pallas_gpu.types import values

_WHO = "dynamic_scheduling_loop"
# While some warpgroups read one position, the next can be published.
_SLOTS = 2


@expect.arguments(
    grid_names=expect.names,
    thread_axis=expect.optional(expect.string),
    cluster_axes=expect.names,
    init_carry=values.values,
)
def dynamic_scheduling_loop(
    grid_names: str | Sequence[str],
    *,
    thread_axis: str | None = None,
    cluster_axes: str | Sequence[str] = (),
    init_carry: Any = None,
) -> Callable[[Callable[..., Any]], Any]:
    """Runs the decorated function for positions of the grid until none is left.

    The grid is that of all the work. The launch starts as many clusters (CTAs, without
    clusters) as the GPU holds at once. Each first works on its own position, then on
    the next one that none has claimed: clusters whose work is short take more of it.
    Only these clusters exist, so that what is written for each position is in the loop.

    PTX: atom.relaxed.gpu.global.add, one in each step, by one thread of the cluster.
    Since: sm_90. Issued by all warpgroups of all CTAs of a cluster. The counter starts
    at zero in each call. Under `vmap` the launch starts all clusters; each then has its
    own position alone.

    Args:
      grid_names: names of all axes of the grid, most significant first.
      thread_axis: the kernel's thread axis, if it has several warpgroups. The last
        warpgroup claims the positions, which takes about a microsecond, as soon as it
        begins a step; let it be the one that copies.
      cluster_axes: names of all cluster axes, if there are any.
      init_carry: pytree of values passed from step to step as `carry=`.

    Returns:
      The carry after the last step.

    Raises:
      ArgumentError: axes of the kernel are missing.
      AxisNameError: the kernel has no such axis.
      UnsupportedError: a second loop in a kernel: the first has taken all positions.

    Example:
      >>> @plgpu.dynamic_scheduling_loop(("m", "n"), thread_axis="wg")
      ... def _(loop_info):
      ...     mi, ni = loop_info.index
    """
    mesh = scope.current_mesh(_WHO)
    _check_axes(mesh, grid_names, thread_axis, cluster_axes)
    clustered = math.prod(mesh.cluster) > 1
    free = (
        types.ClusterBarrier(
            collective_axes=(tuple(mesh.cluster_names),),
            num_arrivals=mesh.warpgroups,
            num_barriers=_SLOTS,
        )
        if clustered
        else types.Barrier(num_arrivals=mesh.warpgroups, num_barriers=_SLOTS)
    )
    declarations = (
        types.SMEM((_SLOTS,), jnp.int32),
        types.Barrier(num_barriers=_SLOTS),
        free,
    )

    def run(body: Callable[..., Any]) -> Any:
        expect.function(body, f"{_WHO}: the body")
        return scoped(
            lambda *memory: _all_steps(mesh, grid_names, memory, body, init_carry),
            declarations,
            {},
            thread_axis or (),
            [f"{what} of {_WHO}" for what in ("positions", "full", "free")],
        )

    return run


def _all_steps(
    mesh: types.Mesh,
    grid_names: Sequence[str],
    memory: Sequence[Any],
    body: Callable[..., Any],
    init_carry: Any,
) -> Any:
    positions, full, free = memory
    sizes = [lax.axis_size(name) for name in grid_names]
    claims = _claims(mesh)
    wait = mbarrier.barrier_wait
    if math.prod(mesh.cluster) > 1:
        wait = mbarrier.wait_for_cluster

    def step(state: Any) -> Any:
        position, number, carry = state
        slot = lax.rem(number, jnp.int32(_SLOTS))
        mbarrier.barrier_wait(free.at[slot])
        following = scheduling.claim(claims)
        if mesh.warpgroups > 1:
            scheduling.publish(following, positions.at[slot], full.at[slot], claims)
        info = NDLoopInfo(unravel(position, sizes), number, None)
        named = {} if init_carry is None else {"carry": carry}
        carry = scope.call(_WHO, body, info, **named)
        if mesh.warpgroups == 1:
            # Nobody waits for it before, and by now the counter has answered.
            scheduling.publish(following, positions.at[slot], full.at[slot], claims)
        wait(full.at[slot])
        position = positions[slot]
        mbarrier.barrier_arrive(free.at[slot])
        return position, number + 1, carry

    for slot in range(_SLOTS):
        # Also says that this CTA has left earlier scopes, which may use that SMEM.
        mbarrier.barrier_arrive(free.at[slot])
    own = jnp.int32(0)
    for name, size in zip(grid_names, sizes, strict=True):
        own = own * size + lax.axis_index(name)
    with _jax.trace_without_ref_rules():
        end = math.prod(sizes)
        first = own, jnp.int32(0), init_carry
        _, _, carry = while_loop(lambda state: state[0] < end, step, first)
        loop(0, _SLOTS)(lambda slot: mbarrier.barrier_wait(free.at[slot]))
    return carry


def _claims(mesh: types.Mesh) -> Any:
    """Whether this warpgroup claims: the last one of the cluster's first CTA."""
    claims = jnp.bool_(True)
    if mesh.thread_name is not None:
        claims = lax.axis_index(mesh.thread_name) == mesh.warpgroups - 1
    for name in mesh.cluster_names:
        claims = claims & (lax.axis_index(name) == 0)
    return claims


def _check_axes(
    mesh: types.Mesh,
    grid_names: Sequence[str],
    thread_axis: str | None,
    cluster_axes: Sequence[str],
) -> None:
    threads = () if thread_axis is None else (thread_axis,)
    for axis in (*grid_names, *threads, *cluster_axes):
        check.require_axis_name(axis, mesh, _jax.where_now())
    own_threads = () if mesh.thread_name is None else (mesh.thread_name,)
    for what, given, own in (
        ("grid_names", grid_names, mesh.grid_names),
        ("thread_axis", threads, own_threads),
        ("cluster_axes", cluster_axes, mesh.cluster_names),
    ):
        if tuple(given) != tuple(own):
            raise errors.ArgumentError(
                f"{_WHO}: {what} does not name all axes of the kernel, in its order",
                expected=f"{list(own)}",
                got=f"{list(given)}",
                hint="pass the same names as to the kernel",
                where=_jax.where_now(),
            )
