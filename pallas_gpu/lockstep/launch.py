# SPDX-License-Identifier: Apache-2.0
"""A launch on one device or several: the blocks that run together."""

from __future__ import annotations

import dataclasses
import math
import random
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pallas_gpu.errors import PtxError
from pallas_gpu.lockstep import (  # noqa: F401, the units register themselves
    accesses,
    elements,
    memrefs,
    multimem,
    predication,
    printing,
    registers,
    values,
    votes,
)
from pallas_gpu.lockstep.clocks import Clocks
from pallas_gpu.lockstep.copies import (  # noqa: F401, the units register themselves
    async_stores,
    bulk,
    cp_async,
    descriptors,
    tma,
)
from pallas_gpu.lockstep.engine import (
    LANES,
    Scheduler,
    SplitWarps,
    Strand,
)
from pallas_gpu.lockstep.grids import (  # noqa: F401, the units register themselves
    griddepcontrol,
    launch_control,
)
from pallas_gpu.lockstep.memory import Memory
from pallas_gpu.lockstep.not_modelled import NotModelled
from pallas_gpu.lockstep.program import Program
from pallas_gpu.lockstep.sync import (  # noqa: F401, the units register themselves
    atomics,
    control,
    mbarrier,
    strong,
    timers,
)
from pallas_gpu.lockstep.sync.control import Barrier
from pallas_gpu.lockstep.tensor_cores import (  # noqa: F401, the units register themselves
    mma,
    tcgen05,
    tmem,
    wgmma,
)

WARPGROUP_WARPS = 4
# Multimem addresses have numbers of buffers above this one.
MULTIMEM = 1 << 20


@dataclasses.dataclass(frozen=True)
class Shape:
    """How a kernel is launched."""

    grid: tuple[int, int, int]
    cluster: tuple[int, int, int]
    block: tuple[int, int, int]
    smem_bytes: int

    @property
    def threads(self) -> int:
        """The threads of a block."""
        return math.prod(self.block)


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array in GMEM.

    Attributes:
      data: its bytes.
      name: what to call it in reports.
      device: the number of its device.
      number: among those of its device, from 1; 0 for what is not the kernel's.
      is_input: whether no kernel writes it.
      is_kept: whether it outlives the launch.
    """

    data: np.ndarray
    name: str
    device: int
    number: int
    is_input: bool
    is_kept: bool = False


@dataclasses.dataclass(frozen=True)
class Part:
    """A launch on one device, ready to run.

    Attributes:
      launch: the launch.
      program: the kernel's body.
      shape: how it is launched.
      arguments: values by slot that the kernel gets.
    """

    launch: Launch
    program: Program
    shape: Shape
    arguments: dict[int, np.ndarray]


class Launch:
    """One launch of a kernel on a device.

    Attributes:
      tensor_maps: those that the host has encoded, by number.
      globals: addresses of the module's memory, by name.
      device: its number; None for the only one.
      scheduler: of the running clusters.
      is_early: whether the grids before it may still run.
      ticks: what clocks show.
    """

    def __init__(
        self,
        buffers: Sequence[Buffer],
        tensor_maps: Sequence[tma.TensorMap],
        is_early: bool,
        seed: int = 0,
        device: int | None = None,
        addresses: Mapping[str, int] = types.MappingProxyType({}),
    ) -> None:
        self._seed = seed
        self._buffers = buffers
        self.device = device
        self._memories: dict[int, Memory] = {}
        self.tensor_maps = tensor_maps
        self.globals = addresses
        self.scheduler = Scheduler()
        self.is_early = is_early
        self._pending: list[tuple[int, ...]] = []
        self._random = random.Random(seed)
        self.ticks = 0

    def buffer(self, number: int) -> Memory:
        """The memory of a buffer, counted from 1."""
        if number not in self._memories:
            if number > MULTIMEM:
                raise NotModelled("this access through a multimem address")
            raise PtxError(f"an access to GMEM through no buffer's pointer ({number})")
        return self._memories[number]

    @property
    def memories(self) -> Iterable[Memory]:
        """Those of all buffers."""
        return self._memories.values()

    def everywhere(self, number: int) -> list[Memory]:
        """The memory of each device for a multimem address's buffer."""
        if number <= MULTIMEM:
            raise PtxError("a multimem access through the address of one device")
        return [
            self._memories[i]
            for i, buffer in enumerate(self._buffers, start=1)
            if buffer.number == number - MULTIMEM
        ]

    def run(self, parts: Sequence[Part]) -> None:
        """Runs the clusters of the grid, one after the other if none waits for others.

        Args:
          parts: on all devices, of which this is the first.
        """
        before = [x.data.copy() for x in self._buffers]
        together = WARPGROUP_WARPS
        with np.errstate(all="ignore"):
            try:
                self._all(parts, together)
            except SplitWarps:
                # Warps go ways of their own: again, with a strand for each.
                for buffer, old in zip(self._buffers, before, strict=True):
                    buffer.data[...] = old
                self._all(parts, 1)

    def _all(self, parts: Sequence[Part], together: int) -> None:
        shape = parts[0].shape
        counts = [g // c for g, c in zip(shape.grid, shape.cluster, strict=True)]
        # x is the fastest, of clusters and of blocks in a cluster.
        places = [
            tuple(i * c for i, c in zip((x, y, z), shape.cluster, strict=True))
            for z, y, x in np.ndindex(*counts[::-1])
        ]
        if parts[0].program.polls or len(parts) > 1:
            self._resident(parts, places, together)
            return
        self._pending = places
        while self._pending:
            first = self._pending.pop(0)
            self._resident(parts, [first], together)

    def cancel(self) -> tuple[int, ...] | None:
        """Takes a cluster that has not started out of the launch, if there is one.

        Some requests fail although there is one, so that several clusters start.
        """
        if not self._pending or self._random.random() < 0.25:
            return None
        return self._pending.pop(0)

    def _resident(self, parts: Sequence[Part], places, together: int):
        """Runs clusters at the same time, those whose first blocks are given."""
        self.scheduler = Scheduler(seed=self._seed + sum(places[0]))
        shape = parts[0].shape
        warps = shape.threads // LANES
        each = int(np.prod(shape.cluster)) * warps
        clocks = Clocks(each * len(places) * len(parts))
        launched = [(part, first) for part in parts for first in places]
        clusters = [
            (part, Cluster(part.launch, shape, first, clocks, i * each))
            for i, (part, first) in enumerate(launched)
        ]
        for i, buffer in enumerate(self._buffers):
            watched = None if buffer.is_input and not self.is_early else clocks
            memory = Memory(buffer.data, buffer.name, watched, proxy=1)
            self._memories[i + 1] = memory
            if self.is_early:
                memory.written_by(clocks.agent(griddepcontrol.EARLIER))
        for part in parts[1:]:
            part.launch._memories = self._memories
            part.launch.scheduler = self.scheduler
        ctas = [(part, cta) for part, cluster in clusters for cta in cluster.ctas]
        running: list[tuple[Strand, Any]] = []
        try:
            self._execute(running, ctas, warps, together)
            if len(parts) > 1:
                self._end(clocks, ctas)
        finally:
            # In cycles their memory would stay until Python's collector finds them.
            for strand, _ in running:
                strand.env.clear()
            for _, cta in ctas:
                vars(cta).clear()

    def _end(self, clocks: Clocks, ctas: Sequence[tuple[Part, Cta]]) -> None:
        """Checks what other devices may still access."""
        for memory, buffer in zip(self._memories.values(), self._buffers, strict=True):
            if buffer.is_kept:
                continue
            own = [x for part, x in ctas if part.launch.device == buffer.device]
            others = [x.name for part, x in ctas if x not in own]
            rows = [x.first_row + np.arange(x.threads // LANES) for x in own]
            memory.check_end(np.concatenate(rows), clocks.agents_of(others))

    def _execute(self, running, ctas, warps, together) -> None:
        for part, cta in ctas:
            program = part.program
            for start in range(0, warps, together):
                strand = Strand(cta, range(start, start + together), program.size)
                for slot, value in (program.constants | part.arguments).items():
                    strand.env[slot] = value
                running.append((strand, _run(strand, program)))
        self.scheduler.run(running)
        for strand, _ in running:
            if strand.wgmma is not None and (strand.wgmma.open or strand.wgmma.groups):
                raise PtxError(f"{strand.name} ends without waiting for its wgmma")
        for _, cta in ctas:
            tma.finish(cta)
            tcgen05.finish(cta)
            tmem.finish(cta)


def _run(strand: Strand, program: Program) -> Any:
    strand.cta.running += 1
    yield from program.body.run_blocking(strand)
    strand.cta.running -= 1


class Cluster:
    """The blocks of a cluster.

    Attributes:
      ctas: in the order of their ranks.
      clocks: those of its threads, and of the clusters that run at the same time.
      first_row: the row of its first warp in them.
      barrier: the cluster's own; `waiting`: warps that have arrived at it, with the
        generation that they wait for.
    """

    def __init__(
        self,
        launch: Launch,
        shape: Shape,
        first: tuple[int, ...],
        clocks: Clocks | None = None,
        first_row: int = 0,
    ) -> None:
        self.launch = launch
        count = int(np.prod(shape.cluster))
        self.threads = count * shape.threads
        self.clocks = clocks or Clocks(self.threads // LANES)
        self.first_row = first_row
        self.barrier = Barrier()
        self.waiting: dict[int, int] = {}
        self.ctas = []
        for rank, (z, y, x) in enumerate(np.ndindex(*shape.cluster[::-1])):
            position = tuple(a + b for a, b in zip(first, (x, y, z), strict=True))
            self.ctas.append(Cta(self, shape, position, rank))


class Cta:
    """A block of threads and its SMEM, which holds anything at first.

    Attributes:
      name: what no other block has, of any device; for reports.
    """

    def __init__(
        self, cluster: Cluster, shape: Shape, position: tuple[int, ...], rank: int
    ) -> None:
        self.cluster = cluster
        self.shape = shape
        self.clocks = cluster.clocks
        x, y, z = position
        number = x + shape.grid[0] * (y + shape.grid[1] * z)
        device = cluster.launch.device
        self.name = f"CTA {number}" + ("" if device is None else f" of device {device}")
        self.rank = rank
        self.position = position
        self.threads = shape.threads
        # Strands that have not ended.
        self.running = 0
        self.first_row = cluster.first_row + rank * shape.threads // LANES
        self.registers = control.registers(self)
        poison = np.full(shape.smem_bytes, 0xA5, np.uint8)
        self.smem = Memory(poison, f"the SMEM of {self.name}", self.clocks)
        self.mbarriers: dict[int, mbarrier.Mbarrier] = {}
        self.barriers: dict[int, Barrier] = {}
        self.bulk: dict[int, tma.BulkGroups] = {}
        # Copies by cp.async, for each thread that has issued some.
        self.cp_async: dict[int, cp_async.ThreadCopies] = {}
        self.tmem: tmem.Cells | None = None
        # Loads and stores in flight, by kind and warp; the tcgen05 work of threads.
        self.tmem_pending: dict[tuple[str, int], tmem.Pending] = {}
        self.tensor_threads: dict[int, tcgen05.Thread] = {}
        # An answer of cluster launch control has granted nothing.
        self.refused = False
