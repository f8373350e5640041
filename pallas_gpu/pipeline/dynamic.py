# SPDX-License-Identifier: Apache-2.0
"""`dynamic_scheduling_loop`: clusters take the next position of the grid when free."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax

from pallas_gpu import _jax, arch, errors, expect, types
from pallas_gpu.checks.jax_operations import require_axis_name
from pallas_gpu.entry import assumed_target, control, scope
from pallas_gpu.entry.control import while_loop
from pallas_gpu.entry.scoped import scoped
from pallas_gpu.pipeline.loops import NDLoopInfo, unravel
from pallas_gpu.pipeline.specialized.ring import Ring
from pallas_gpu.pipeline.specialized.roles import Roles
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
    *,
    roles: Roles | None = None,
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
      roles: of the warpgroups: each role then has a loop of its own, with the role's
        registers. The function also gets `is_producer=`, a Python bool, and there is no
        carry.

    Returns:
      The carry after the last step.

    Raises:
      ArgumentError: axes of the kernel are missing; a carry beside roles.
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
    if roles is not None:
        _check_roles(roles, mesh, init_carry)
    source = (_Launch if cancels else _Counter)(mesh, grid_names)
    # All of them count as one.
    axes: Any = (tuple(mesh.cluster_names),) if source.is_clustered else ()
    declared = Ring.of(source.memory, consumers=mesh.warpgroups, collective_axes=axes)

    def run(body: Callable[..., Any]) -> Any:
        expect.function(body, f"{_WHO}: the body")
        return scoped(
            lambda ring: source.run(ring, body, init_carry, roles),
            (declared,),
            {},
            thread_axis or (),
            [f"{what} of {_WHO}" for what in ("positions", "free", "full")],
        )

    return scope.decorator(_WHO, run)


@dataclasses.dataclass(frozen=True)
class _Counter:
    """Positions from a counter in GMEM; the launch has the clusters that are resident.

    Another source of a cluster's next position is a subclass.
    """

    mesh: types.Mesh
    grid_names: Sequence[str]

    # Declares SMEM for the positions of all slots.
    memory: ClassVar[Any] = types.SMEM((_SLOTS,), jnp.int32)
    # Whether threads of the cluster write a position there.
    by_threads: ClassVar[bool] = True

    def run(
        self, ring: Ring, body: Callable[..., Any], init_carry: Any, roles: Roles | None
    ) -> Any:
        """Calls the body for one position after the other; returns the last carry."""
        if roles is None:
            return self.loop(ring, body, init_carry, self.is_last_warpgroup)

        def run_role(is_producer: bool) -> None:
            own = functools.partial(body, is_producer=is_producer)
            self.loop(ring, own, None, is_producer)

        wg = lax.axis_index(self.mesh.thread_name)
        roles.run(wg, lambda: run_role(True), lambda: run_role(False))
        return None

    def loop(
        self, ring: Ring, body: Callable[..., Any], init_carry: Any, claims: Any
    ) -> Any:
        """The loop of a role, or of all warpgroups.

        Args:
          claims: whether the warpgroup claims positions.
        """
        own = tuple(lax.axis_index(name) for name in self.grid_names)
        by_threads = self.is_clustered and self.by_threads
        wait = mbarrier.wait_for_cluster if by_threads else mbarrier.barrier_wait

        def step(state: Any) -> Any:
            _, index, number, carry = state
            slot = ring.slot(number)
            mbarrier.barrier_wait(slot.empty)
            finish = self.start(slot.buffers, slot.full, claims)
            info = NDLoopInfo(index, number, None)
            named = {} if init_carry is None else {"carry": carry}
            carry = scope.call(_WHO, body, info, **named)
            finish()
            wait(slot.full)
            more, index = self.read(slot.buffers)
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

    @property
    def is_clustered(self) -> bool:
        return math.prod(self.mesh.cluster) > 1

    @property
    def is_last_warpgroup(self) -> Any:
        if self.mesh.thread_name is None:
            return jnp.bool_(True)
        return lax.axis_index(self.mesh.thread_name) == self.mesh.warpgroups - 1

    def start(self, place: Any, full: Any, claims: Any) -> Callable[[], None]:
        """Asks for a position; what it returns is called after the step's work."""
        if claims is False:
            return lambda: None
        # The last warpgroup of the cluster's first CTA claims.
        for name in self.mesh.cluster_names:
            claims = (lax.axis_index(name) == 0) & claims
        if self.mesh.warpgroups == 1:
            # Nobody waits for it before, and by then the counter has answered.
            following = scheduling.claim(claims)
            return lambda: scheduling.publish(following, place, full, claims)

        # As late as the copies allow: clusters with adjacent positions, which may read
        # the same, then begin at the same time.
        return lambda: scheduling.publish(scheduling.claim(claims), place, full, claims)

    def read(self, place: Any) -> tuple[Any, tuple[Any, ...]]:
        """Returns whether there is a position, and its indices."""
        sizes = [lax.axis_size(name) for name in self.grid_names]
        position = place[...]
        return position < math.prod(sizes), tuple(unravel(position, sizes))


class _Launch(_Counter):
    """Positions of clusters that have not started: cluster launch control."""

    memory = launch_control.TryClusterCancelResult(_SLOTS)
    by_threads = False

    def start(self, place: Any, full: Any, claims: Any) -> Callable[[], None]:
        @control.when(claims)
        def _() -> None:
            axes = tuple(self.mesh.cluster_names)
            launch_control.request(place, full, axes, until_refused=True)

        return lambda: None

    def read(self, place: Any) -> tuple[Any, tuple[Any, ...]]:
        names = tuple(self.grid_names)
        index, granted = launch_control.query_cluster_cancel(place, names)
        return granted, index


def _check_roles(roles: Roles, mesh: types.Mesh, init_carry: Any) -> None:
    if init_carry is not None:
        raise errors.ArgumentError(
            f"{_WHO}: a carry beside roles",
            expected="init_carry=None, as each role has a loop of its own",
            got="an init_carry",
            hint="keep what a role accumulates in SMEM, or leave roles out",
        )
    if roles.num_threads != mesh.warpgroups:
        raise errors.ArgumentError(
            f"{_WHO}: a warpgroup has no role",
            expected=f"num_threads={roles.num_threads}, as roles has "
            f"{roles.consumers} consumers",
            got=f"num_threads={mesh.warpgroups}",
            hint="pass num_threads=roles.num_threads to plgpu.kernel",
        )


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
