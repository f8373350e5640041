# SPDX-License-Identifier: Apache-2.0
"""The machine: warpgroups, CTAs, clusters, and what they share.

CTAs run one after another in row-major order, those of a cluster together. The unit of
execution is a warpgroup, the author's thread; inside of `warp_map` it is a warp.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pallas_gpu import errors, types
from pallas_gpu.emulator.engine import ordering, scheduler
from pallas_gpu.emulator.engine.memory import Memory, Region, poison

_ORDER = (
    "order the {} with a barrier: arrive after the first access, wait before the second"
)


class Machine:
    """What one launch shares.

    Attributes:
      params: parameters of the emulator.
      mesh: shape of the launch.
      rng: all choices come from here.
      in_flight: asynchronous work of the cluster that runs.
      steps: effects and loop turns so far.
      threads: warpgroups of the cluster that runs, and warps while they run by
        themselves.
    """

    def __init__(self, params: types.InterpretParams, mesh: types.Mesh):
        self.params = params
        self.mesh = mesh
        self.rng = random.Random(params.seed)
        self.in_flight = scheduler.InFlight(params.asynchrony, self.rng)
        self.steps = 0
        self.threads: list[Warpgroup] = []
        self._actors = itertools.count()
        self._ctas = itertools.count()

    def new_actor(self) -> int:
        """Returns a number for something that moves on its own."""
        return next(self._actors)

    def new_cta(self) -> int:
        """Returns a number for a CTA."""
        return next(self._ctas)

    def tick(self) -> None:
        """Counts a step.

        Raises:
          LivelockError: the budget is spent.
        """
        self.steps += 1
        if self.steps > self.params.max_steps:
            raise errors.LivelockError(
                f"the kernel still runs after {self.params.max_steps} steps",
                expected="an end within the step budget",
                got=scheduler.positions(self.threads),
                hint="look for a loop whose condition never changes, or raise "
                "InterpretParams(max_steps=...)",
            )

    def clusters(self, batch: Sequence[int]) -> Iterator[list[Cta]]:
        """Yields the CTAs of one cluster after the other."""
        for position in itertools.product(*(range(n) for n in batch)):
            for block in itertools.product(*(range(n) for n in self.mesh.grid)):
                ctas = [
                    Cta(self, position, dict(self._axes(block, rank)), rank)
                    for rank in itertools.product(
                        *(range(n) for n in self.mesh.cluster)
                    )
                ]
                for cta in ctas:
                    cta.cluster = ctas
                yield ctas

    def _axes(self, block: Sequence[int], rank: Sequence[int]):
        yield from zip(self.mesh.grid_names, block, strict=True)
        yield from zip(self.mesh.cluster_names, rank, strict=True)

    def run(self, ctas: Sequence[Cta]) -> None:
        """Runs the CTAs of one cluster to their end.

        Raises:
          BarrierError: a barrier that other CTAs arrive on ends within a phase.
        """
        self.threads = [t for cta in ctas for t in cta.warpgroups]
        scheduler.run(self.threads, self.in_flight, self.rng)
        self.in_flight.drain()
        if len(ctas) > 1:
            # Only now have all arrivals from other CTAs come.
            for cta in ctas:
                for barriers in cta.barriers.values():
                    barriers.require_quiet()


class Cta:
    """One CTA.

    Attributes:
      number: counts CTAs in the order in which they run.
      batch: position on the unnamed axes that `jax.vmap` added.
      axes: position on the named grid and cluster axes.
      rank: position in the cluster.
      cluster: the CTAs of the cluster, this one included.
      memories: SMEM that is allocated now.
      scopes: scopes that warpgroups are entering or in, by visit.
      left: how often each scope has been left.
      left_at: the time of each warpgroup when it last left a scope.
      barriers: of the scopes entered so far.
      multicasts: copies that some CTAs along an axis have issued and some have not,
        kept with the first of these CTAs.
      multicast_counts: how many of them this CTA has issued, by destination.
      registers: how many each warpgroup has asked for.
    """

    def __init__(
        self,
        machine: Machine,
        batch: tuple[int, ...],
        axes: dict[str, int],
        rank: tuple[int, ...] = (),
    ):
        self.machine = machine
        self.rank = rank
        self.cluster: list[Cta] = [self]
        self.left: dict[Any, int] = {}
        self.left_at: ordering.Clock = {}
        self.multicasts: dict[Any, Any] = {}
        self.multicast_counts: dict[Any, int] = {}
        self.registers: dict[int, int] = {}
        self.number = machine.new_cta()
        self.batch = batch
        self.axes = axes
        self.memories: list[Memory] = []
        self.scopes: dict[Any, Any] = {}
        self.barriers: dict[Any, Any] = {}
        self.allocations = itertools.count()
        self.warpgroups = [Warpgroup(self, i) for i in range(machine.mesh.warpgroups)]

    @property
    def name(self) -> str:
        """The position, for messages."""
        parts = [f"vmap index {i}" for i in self.batch]
        parts += [f"{name}={i}" for name, i in self.axes.items()]
        return f"CTA ({', '.join(parts)})" if parts else "the only CTA"

    @property
    def suffix(self) -> str:
        """Tells this CTA's memory from that of others in the cluster, for messages."""
        return f" of {self.name}" if len(self.cluster) > 1 else ""

    @property
    def ended(self) -> bool:
        """True when all warpgroups have ended."""
        return all(wg.done for wg in self.warpgroups)

    def along(self, axes: Sequence[str]) -> list[Cta]:
        """Returns the CTAs along cluster axes, this one included, by rank."""
        names = self.machine.mesh.cluster_names
        fixed = [i for i, name in enumerate(names) if name not in axes]
        return [
            cta
            for cta in self.cluster
            if all(cta.rank[i] == self.rank[i] for i in fixed)
        ]


class Warpgroup:
    """128 CUDA threads that run the body together: the author's thread.

    Attributes:
      index: position in the CTA.
      clock: what this warpgroup knows of others' work.
      actor: its own number in clocks.
      generator, wait, done: for the scheduler.
      location: the equation that runs now.
      waits: phases waited for, by barrier.
      visits: how often each scope was entered.
      sole: no other warpgroup shares memory with it while it runs.
      kind: of the unit, for messages.
      warps: its warps, once it has let them run by themselves.
    """

    kind = "warpgroup"

    def __init__(self, cta: Cta, index: int):
        machine = cta.machine
        self.cta = cta
        self.machine = machine
        self.index = index
        self.actor = machine.new_actor()
        self.clock: ordering.Clock = {self.actor: 1}
        self.generator: Iterator[Any] = iter(())
        self.wait: scheduler.Wait | None = None
        self.done = False
        self.location: Any = None
        self.waits: dict[Any, int] = {}
        self.visits: dict[Any, int] = {}
        mesh = machine.mesh
        self.sole = mesh.warpgroups * math.prod(mesh.cluster) == 1
        # Streams of asynchronous work, made by their families.
        self.stores: Any = None
        self.mmas: Any = None
        self.warps: list[Warp] = []

    @property
    def label(self) -> str:
        """The position in the CTA, for messages."""
        return f"warpgroup {self.index}"

    @property
    def name(self) -> str:
        """The position, for messages."""
        return f"{self.label} of {self.cta.name}"

    def where(self) -> str | None:
        """Returns the kernel's line that runs now."""
        return self.location.where if self.location is not None else None

    def axis_index(self, name: str) -> int:
        """Returns the position on a named axis."""
        if name == self.machine.mesh.thread_name:
            return self.index
        if name in self.cta.axes:
            return self.cta.axes[name]
        raise errors.AxisNameError(
            f"no axis is called {name!r}",
            expected=[axis for axis, _ in self.machine.mesh.axes],
            got=name,
        )

    # --- accesses --------------------------------------------------------------------

    def release(self) -> ordering.Clock:
        """Returns what others learn from an arrival; later work is not part of it."""
        known = dict(self.clock)
        self.clock[self.actor] += 1
        return known

    def access(
        self,
        region: Region,
        *,
        writes: bool,
        what: str | None = None,
        by: tuple[int, int] | None = None,
        hint: str | None = None,
    ) -> None:
        """Checks an access against earlier ones and records it.

        Args:
          region: what is accessed.
          writes: a write.
          what: who accesses; default: this warpgroup or warp.
          by: (actor, time) of an asynchronous copy that this warpgroup issues.
          hint: what makes the access known to others; default: a barrier.

        Raises:
          RaceError: an earlier access conflicts and is not ordered before.
        """
        memory = region.memory
        history = memory.history
        if memory.owners is not None:
            _require_one_cta(region, self.cta.number, writes)
        if memory.read_only or (by is None and self.sole and not history.records):
            return
        actor, time = by or (self.actor, self.clock[self.actor])
        new = ordering.Access(
            region.box(), writes, actor, time, by is not None,
            what or self.label, self.where(), hint or _ORDER.format(f"{self.kind}s"),
        )  # fmt: skip
        history.check(new, self.clock, memory.name, self.machine.params.detect_races)
        if by is not None or not self.sole:
            everyone = [t.clock for t in self.machine.threads]
            history.add(new, self.clock, everyone)

    def read(self, region: Region) -> Any:
        """Returns the elements of a region as the threads see them.

        Raises:
          OutOfBoundsError, RaceError, UninitializedReadError.
        """
        lenient = self.machine.params.out_of_bounds_reads == "uninitialized"
        if not lenient:
            region.require_inside("read")
        self.access(region, writes=False)
        region.require_written()
        if lenient:
            return region.load_clipped(poison(region.dtype))
        return region.load()

    def write(self, region: Region, value: Any) -> None:
        """Stores values as the threads do.

        Raises:
          OutOfBoundsError, RaceError.
          KernelError: the array is an input.
        """
        region.require_inside("written")
        memory = region.memory
        require_writable(memory)
        self.access(region, writes=True)
        region.store(value)
        if memory.space is types.SMEM:
            note = (self.where(), self.label)
            memory.unfenced[self.actor, region.box()] = note


class Warp(Warpgroup):
    """One warp of a warpgroup, while it runs by itself.

    What it knows between two regions is kept: the phases it has waited for, and its
    copies to GMEM.

    Attributes:
      number: position in the warpgroup.
      warpgroup: whose warp it is.
    """

    kind = "warp"

    def __init__(self, warpgroup: Warpgroup, number: int):
        super().__init__(warpgroup.cta, warpgroup.index)
        self.number = number
        self.warpgroup = warpgroup
        self.sole = False

    @property
    def label(self) -> str:
        """The position in the CTA, for messages."""
        return f"warp {self.number} of {self.warpgroup.label}"

    def start(self, known: ordering.Clock, run: Iterator[Any], location: Any) -> None:
        """Begins a run that comes after everything in `known`."""
        ordering.join(self.clock, known)
        self.generator, self.location = run, location
        self.wait, self.done = None, False


def require_writable(memory: Memory) -> None:
    """Raises KernelError for an input of the kernel."""
    if memory.read_only:
        raise errors.KernelError(
            f"{memory.name} is written, and it is an input",
            expected="stores to output references and scratch memory",
            got="a store to an input reference",
            hint="add an output for the result",
        )


def _require_one_cta(region: Region, cta: int, writes: bool) -> None:
    """Raises RaceError when another CTA wrote a part of a result; notes the writer."""
    owners, box = region.memory.owners, region.box()
    part = owners[tuple(slice(low, max(low, high)) for low, high in box)]
    foreign = (part >= 0) & (part != cta)
    if foreign.any():
        first = np.unravel_index(int(np.argmax(foreign)), part.shape)
        element = [int(i) + low for i, (low, _) in zip(first, box, strict=True)]
        raise errors.RaceError(
            f"{region.memory.name} is {'written' if writes else 'read'} by one CTA and "
            "written by another",
            expected="each element of a result to belong to one CTA: CTAs run in any "
            "order, also at the same time",
            got=f"element {element}, written by CTA number {part[first]} in row-major "
            f"order and used by number {cta}",
            hint="give each CTA its own part of the result",
        )
    if writes:
        part[...] = cta
