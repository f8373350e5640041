# SPDX-License-Identifier: Apache-2.0
"""`dynamic_scheduling_loop`: clusters take the next position of the grid when free."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax.numpy as jnp
from jax import lax

from pallas_gpu import _jax, arch, errors, expect, types
from pallas_gpu.checks.jax_operations import require_axis_name
from pallas_gpu.entry import assumed_target, control, scope
from pallas_gpu.entry.control import while_loop
from pallas_gpu.entry.scoped import scoped
from pallas_gpu.pipeline.loops import NDLoopInfo, unravel
from pallas_gpu.pipeline.specialized.ring import Ring
from pallas_gpu.primitives import mbarrier
from pallas_gpu.primitives.grids import launch_control, scheduling
from pallas_gpu.types import values

_WHO = "dynamic_scheduling_loop"
# While some warpgroups read one position, the next can be published.
_SLOTS = 2


@expect.arguments()
def dynamic_scheduling_loop(
    grid_names: str | Sequence[str],
    thread_axis: str | None = None,
    cluster_axes: str | Sequence[str] = (),
    init_carry: values.Values = None,
) -> Callable[[Callable[..., Any]], Any]:
    """Runs the decorated function for positions of the grid until none is left.

    The grid is that of all the work. The launch starts as many clusters (CTAs, without
    clusters) as the GPU holds at once. Each first works on its own position, then on
    the next one that none has claimed: clusters whose work is short take more of it.
    Only these clusters exist, so that what is written for each position is in the loop.

    PTX: clusterlaunchcontrol.try_cancel.async on sm_100a, by which a cluster takes over
    the work of one that has not started; elsewhere atom.relaxed.gpu.global.add, of a
    counter that starts at zero in each call. One in each step, by one thread of the
    cluster. Since: sm_90. Issued by all warpgroups of all CTAs of a cluster. Under
    `vmap` the launch starts all clusters; each then has its own position alone.

    Args:
      grid_names: names of all axes of the grid, most significant first.
      thread_axis: the kernel's thread axis, if it has several warpgroups. The last
        warpgroup claims the positions, which takes about a microsecond, when it has
        done its part of a step; let it be the one that copies, which is ahead.
      cluster_axes: names of all cluster axes, which is the default.
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
    cancels = assumed_target.of_kernel().has(arch.Feature.CLUSTER_LAUNCH_CONTROL)
    source: _Source = (_Launch if cancels else _Counter)(mesh, grid_names)
    # All of them count as one.
    axes: Any = (tuple(mesh.cluster_names),) if _is_clustered(mesh) else ()
    declared = Ring.of(source.memory, consumers=mesh.warpgroups, collective_axes=axes)

    def run(body: Callable[..., Any]) -> Any:
        expect.function(body, f"{_WHO}: the body")
        return scoped(
            lambda ring: _all_steps(mesh, grid_names, source, ring, body, init_carry),
            (declared,),
            {},
            thread_axis or (),
            [f"{what} of {_WHO}" for what in ("positions", "free", "full")],
        )

    return scope.decorator(_WHO, run)


def _is_clustered(mesh: types.Mesh) -> bool:
    return math.prod(mesh.cluster) > 1


def _all_steps(
    mesh: types.Mesh,
    grid_names: Sequence[str],
    source: _Source,
    ring: Ring,
    body: Callable[..., Any],
    init_carry: Any,
) -> Any:
    own = tuple(lax.axis_index(name) for name in grid_names)
    by_threads = _is_clustered(mesh) and source.by_threads
    wait = mbarrier.wait_for_cluster if by_threads else mbarrier.barrier_wait

    def step(state: Any) -> Any:
        _, index, number, carry = state
        slot = ring.slot(number)
        mbarrier.barrier_wait(slot.empty)
        finish = source.start(slot.buffers, slot.full)
        info = NDLoopInfo(index, number, None)
        named = {} if init_carry is None else {"carry": carry}
        carry = scope.call(_WHO, body, info, **named)
        finish()
        wait(slot.full)
        more, index = source.read(slot.buffers)
        mbarrier.barrier_arrive(slot.empty)
        return more, index, number + 1, carry

    for number in range(_SLOTS):
        # Also says that this CTA has left earlier scopes, which may use that SMEM.
        ring.release(number)
    with _jax.trace_without_ref_rules():
        first = jnp.bool_(True), own, jnp.int32(0), init_carry
        *_, carry = while_loop(lambda state: state[0], step, first)
        ring.drain(_SLOTS)
    return carry


class _Source(Protocol):
    """Where a cluster's next position comes from.

    Attributes:
      memory: declares SMEM for the positions of all slots.
      by_threads: whether threads of the cluster write it there.
    """

    @property
    def memory(self) -> Any: ...
    @property
    def by_threads(self) -> bool: ...

    def start(self, place: Any, full: Any) -> Callable[[], None]:
        """Asks for a position; what it returns is called after the step's work."""

    def read(self, place: Any) -> tuple[Any, tuple[Any, ...]]:
        """Returns whether there is a position, and its indices."""


@dataclasses.dataclass(frozen=True)
class _Counter:
    """A counter in GMEM; the launch starts as many clusters as the GPU holds."""

    mesh: types.Mesh
    grid_names: Sequence[str]

    by_threads = True

    @property
    def memory(self) -> Any:
        return types.SMEM((_SLOTS,), jnp.int32)

    def start(self, place: Any, full: Any) -> Callable[[], None]:
        claims = _claims(self.mesh)
        if self.mesh.warpgroups == 1:
            # Nobody waits for it before, and by then the counter has answered.
            following = scheduling.claim(claims)
            return lambda: scheduling.publish(following, place, full, claims)

        def finish() -> None:
            # As late as the copies allow: clusters with adjacent positions, which may
            # read the same, then begin at the same time.
            scheduling.publish(scheduling.claim(claims), place, full, claims)

        return finish

    def read(self, place: Any) -> tuple[Any, tuple[Any, ...]]:
        sizes = [lax.axis_size(name) for name in self.grid_names]
        position = place[...]
        return position < math.prod(sizes), tuple(unravel(position, sizes))


@dataclasses.dataclass(frozen=True)
class _Launch:
    """Cluster launch control: work of clusters that have not started."""

    mesh: types.Mesh
    grid_names: Sequence[str]

    by_threads = False

    @property
    def memory(self) -> Any:
        return launch_control.TryClusterCancelResult(_SLOTS)

    def start(self, place: Any, full: Any) -> Callable[[], None]:
        @control.when(_is_last_warpgroup(self.mesh))
        def _() -> None:
            axes = tuple(self.mesh.cluster_names)
            launch_control.request(place, full, axes, until_refused=True)

        return lambda: None

    def read(self, place: Any) -> tuple[Any, tuple[Any, ...]]:
        index, granted = launch_control.query_cluster_cancel(
            place, tuple(self.grid_names)
        )
        return granted, index


def _is_last_warpgroup(mesh: types.Mesh) -> Any:
    if mesh.thread_name is None:
        return jnp.bool_(True)
    return lax.axis_index(mesh.thread_name) == mesh.warpgroups - 1


def _claims(mesh: types.Mesh) -> Any:
    """Whether this warpgroup claims: the last one of the cluster's first CTA."""
    claims = _is_last_warpgroup(mesh)
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
        require_axis_name(axis, mesh)
    own_threads = () if mesh.thread_name is None else (mesh.thread_name,)
    for what, given, own in (
        ("grid_names", grid_names, mesh.grid_names),
        ("thread_axis", threads, own_threads),
        ("cluster_axes", cluster_axes or mesh.cluster_names, mesh.cluster_names),
    ):
        if tuple(given) != tuple(own):
            raise errors.ArgumentError(
                f"{_WHO}: {what} does not name all axes of the kernel, in its order",
                expected=f"{list(own)}",
                got=f"{list(given)}",
                hint="pass the same names as to the kernel",
            )
