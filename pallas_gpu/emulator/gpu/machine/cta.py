# SPDX-License-Identifier: Apache-2.0
"""Clusters, their CTAs, and the warpgroups and warps of those.

The unit of execution is a warpgroup, a thread of the kernel's author; in the body of
`warp_map` it is a warp. A cluster starts and ends as a whole; without clusters each CTA
is a cluster of one.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from pallas_gpu import errors, types
from pallas_gpu.emulator.engine import ordering
from pallas_gpu.emulator.engine.operations.elements import known
from pallas_gpu.emulator.engine.steps import Location
from pallas_gpu.emulator.engine.tables import State
from pallas_gpu.emulator.engine.threads import Group, Thread
from pallas_gpu.emulator.engine.waits import Run
from pallas_gpu.emulator.gpu.gmem import GlobalArray
from pallas_gpu.emulator.gpu.machine.device import Device


class Cluster(Group):
    """The CTAs of one cluster on a device.

    Args:
      device: the device that runs it.
      mesh: shape of the launch.
      batch: position on the unnamed axes that `jax.vmap` added.
      block: position on the grid axes.
      positions: of the grid that no cluster has claimed, in row-major order.

    Attributes:
      ctas: in row-major order.
      around: position of the launch on the axes that enclose it.
      take_over: takes a cluster that has not started out of the launch, and returns its
        position in the grid's row-major order; None if all have started.
      lasting: the body of the scope whose memory exists until the cluster ends; None
        for none.
      inferred_members: the members of unions whose layout the compiler chooses.
    """

    def __init__(
        self,
        device: Device,
        mesh: types.Mesh,
        batch: tuple[int, ...] = (),
        block: tuple[int, ...] = (),
        positions: Iterable[int] = (),
    ):
        super().__init__(device.execution)
        self.device = device
        self.mesh = mesh
        self.batch = batch
        self.block = block
        self.positions = iter(positions)
        self.around: dict[Any, int] = dict(device.axes)
        self.take_over: Callable[[], int | None] = lambda: None
        self.lasting: Any = None
        self.inferred_members: frozenset[Hashable] = frozenset()
        ranks = itertools.product(*(range(n) for n in mesh.cluster))
        self.ctas = [Cta(self, rank) for rank in ranks]
        self.threads += [wg for cta in self.ctas for wg in cta.warpgroups]
        for thread in self.threads:
            ordering.join(thread.clock, device.known_at_start)

    @property
    def name(self) -> str:
        """The position, for messages."""
        first = self.ctas[0].name
        return first if len(self.ctas) == 1 else f"the cluster of {first}"

    def finish(self) -> None:
        """Checks for unfinished work of the CTAs, once all have ended."""
        for cta in self.ctas:
            for check in cta.at_end:
                check()
        if self.device.everywhere is not None:
            for thread in self.threads:
                ordering.join(self.device.known, thread.clock)

    def dissolve(self) -> None:
        """Drops the CTAs with their memory, and the threads."""
        for cta in self.ctas:
            cta.dissolve()
        self.ctas.clear()
        super().dissolve()


class Cta:
    """One CTA.

    Attributes:
      rank: position in the cluster.
      axes: position on the named grid and cluster axes.
      position: the same with those of `jax.vmap`, as findings have it.
      state: state of families.
      work: the arrays in GMEM that the launch adds, as this CTA accesses them.
      at_end: checks to run when all CTAs of the cluster have ended.
    """

    def __init__(self, cluster: Cluster, rank: tuple[int, ...]):
        mesh = cluster.mesh
        self.cluster = cluster
        self.device = cluster.device
        self.mesh = mesh
        self.rank = rank
        self.axes = dict(
            [
                *zip(mesh.grid_names, cluster.block, strict=True),
                *zip(mesh.cluster_names, rank, strict=True),
            ]
        )
        batch = {f"vmap {i}": at for i, at in enumerate(cluster.batch)}
        self.position = batch | self.axes
        self.state: State = {}
        self.work: dict[Hashable, GlobalArray] = {}
        self.at_end: list[Callable[[], None]] = []
        self._along: dict[tuple[str, ...], list[Cta]] = {}
        self.warpgroups = [Warpgroup(self, i) for i in range(mesh.warpgroups)]

    @functools.cached_property
    def name(self) -> str:
        """The position, for messages."""
        return self.name_on_device + self.device.suffix

    @functools.cached_property
    def name_on_device(self) -> str:
        """The position on the device, for messages."""
        parts = [f"vmap index {i}" for i in self.cluster.batch]
        parts += [f"{name}={i}" for name, i in self.axes.items()]
        return f"CTA ({', '.join(parts)})" if parts else "the only CTA"

    @property
    def suffix(self) -> str:
        """Distinguishes the memory of this CTA in messages."""
        return f" of {self.name}" if len(self.cluster.ctas) > 1 else ""

    @property
    def ended(self) -> bool:
        """True when all warpgroups have ended."""
        return all(wg.done for wg in self.warpgroups)

    def dissolve(self) -> None:
        """Drops all that refers to this CTA; see `Group.dissolve`."""
        for wg in self.warpgroups:
            for warp in wg.warps:
                warp.state.clear()
                warp.handover = None
            wg.warps.clear()
        self.warpgroups.clear()
        self.state.clear()
        self.at_end.clear()
        self._along.clear()

    def at(self, axes: Sequence[str], positions: Sequence[Any]) -> Cta:
        """Returns the CTA at a position on some axes; else it is that of this one.

        Raises:
          OutOfBoundsError: the cluster has no such CTA.
          UninitializedReadError: a position has no value.
        """
        sizes = dict(zip(self.mesh.cluster_names, self.mesh.cluster, strict=True))
        place = dict(zip(sizes, self.rank, strict=True))
        for axis, position in zip(axes, positions, strict=True):
            place[axis] = int(known(position))
            if not 0 <= place[axis] < sizes[axis]:
                raise errors.OutOfBoundsError(
                    "cluster_ref refers to a CTA outside of the cluster",
                    expected=f"0 to {sizes[axis] - 1} along {axis!r}",
                    got=place[axis],
                    hint="compute the position modulo the size of the axis",
                )
        wanted = tuple(place.values())
        return next(other for other in self.cluster.ctas if other.rank == wanted)

    def along(self, axes: tuple[str, ...]) -> list[Cta]:
        """Returns the CTAs along cluster axes, this one included, by rank."""
        if axes not in self._along:
            self._along[axes] = self._find_along(axes)
        return self._along[axes]

    def _find_along(self, axes: tuple[str, ...]) -> list[Cta]:
        names = self.mesh.cluster_names
        fixed = [i for i, name in enumerate(names) if name not in axes]
        return [
            cta
            for cta in self.cluster.ctas
            if all(cta.rank[i] == self.rank[i] for i in fixed)
        ]


class Warpgroup(Thread):
    """128 CUDA threads that execute the body together: a thread to the author.

    Attributes:
      index: position in the CTA.
      warps: its warps, after the first `warp_map`.
    """

    kind = "warpgroup"

    def __init__(self, cta: Cta, index: int):
        mesh = cta.mesh
        threads = mesh.warpgroups * math.prod(mesh.cluster)
        super().__init__(cta.cluster, alone=threads == 1)
        self.cta = cta
        self.index = index
        self.warps: list[Warp] = []
        self.position = {
            "device": cta.device.number,
            "cta": cta.position,
            "warpgroup": index,
        }

    @property
    def label(self) -> str:
        """The position in the CTA, for messages."""
        return f"warpgroup {self.index}"

    @property
    def place(self) -> tuple[int, ...]:
        """The position in the CTA."""
        return (self.index,)

    @property
    def name(self) -> str:
        """The position, for messages."""
        return f"{self.label} of {self.cta.name}"

    @property
    def name_in_group(self) -> str:
        """The position in the cluster, for messages."""
        return self.label + self.cta.suffix

    def counted(self, other: Thread) -> str:
        """Returns how an arrival of another thread counts where this one waits."""
        if isinstance(other, Warpgroup) and other.cta is not self.cta:
            return "declare the barrier as a ClusterBarrier"
        return super().counted(other)

    def reach(self, scope: str | None) -> ordering.Reach:
        """Returns whom a scope of the PTX ISA includes; None: all."""
        groups = {
            "cta": self.cta.name,
            "cluster": self.cta.cluster.name,
            "gpu": f"device {self.cta.device.number}",
        }
        return ordering.Reach(groups.get(scope or ""), tuple(groups.values()))

    def axis_index(self, name: str) -> int:
        """Returns the position on a named axis."""
        mesh = self.cta.mesh
        if name == mesh.thread_name:
            return self.index
        if name in self.cta.axes:
            return self.cta.axes[name]
        if name in self.cta.cluster.around:
            return self.cta.cluster.around[name]
        raise errors.AxisNameError(
            f"no axis is named {name!r}",
            expected=[axis for axis, _ in mesh.axes],
            got=name,
        )


class Warp(Warpgroup):
    """One warp of a warpgroup, in the body of `warp_map`.

    Its state persists between two regions: the phases it has waited for, and its copies
    to GMEM.

    Attributes:
      number: position in the warpgroup.
      axis_name: the name of the axis of warps in the current region, None without one.
    """

    kind = "warp"

    def __init__(self, warpgroup: Warpgroup, number: int):
        super().__init__(warpgroup.cta, warpgroup.index)
        self.number = number
        self.warpgroup = warpgroup
        self.position = warpgroup.position | {"warp": number}
        self.axis_name: str | None = None
        self.alone = False

    @property
    def label(self) -> str:
        """The position in the CTA, for messages."""
        return f"warp {self.number} of {self.warpgroup.label}"

    @property
    def place(self) -> tuple[int, ...]:
        """The position in the CTA."""
        return (self.index, self.number)

    def axis_index(self, name: str) -> int:
        """Returns the position on a named axis, that of the warps included."""
        return self.number if name == self.axis_name else super().axis_index(name)

    def start(self, known: ordering.Clock, run: Run, location: Location | None) -> None:
        """Starts a run that happens after everything in `known`."""
        ordering.join(self.clock, known)
        self.generator, self.location = run, location
        self.wait, self.done = None, False
