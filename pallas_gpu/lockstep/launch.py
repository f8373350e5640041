# SPDX-License-Identifier: Apache-2.0
"""A launch: what the host functions pass, and the blocks that run together."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

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
_MULTIMEM = 1 << 20


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
      descriptors: tensor maps by address.
      device: its number; None for the only one.
      scheduler: of the running clusters.
      is_early: whether the grids before it may still run.
      ticks: what clocks show.
    """

    def __init__(
        self,
        buffers: Sequence[Buffer],
        descriptors: dict[int, Any],
        is_early: bool,
        seed: int = 0,
        device: int | None = None,
    ) -> None:
        self._seed = seed
        self._buffers = buffers
        self.device = device
        self._memories: dict[int, Memory] = {}
        self.descriptors = descriptors
        self.scheduler = Scheduler()
        self.is_early = is_early
        self._pending: list[tuple[int, ...]] = []
        self._random = random.Random(seed)
        self.ticks = 0

    def buffer(self, number: int) -> Memory:
        """The memory of a buffer, counted from 1."""
        if number not in self._memories:
            if number > _MULTIMEM:
                raise NotModelled("this access through a multimem address")
            raise PtxError(f"an access to GMEM through no buffer's pointer ({number})")
        return self._memories[number]

    def everywhere(self, number: int) -> list[Memory]:
        """The memory of each device for a multimem address's buffer."""
        if number <= _MULTIMEM:
            raise PtxError("a multimem access through the address of one device")
        return [
            self._memories[i]
            for i, buffer in enumerate(self._buffers, start=1)
            if buffer.number == number - _MULTIMEM
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


# --- the host function ----------------------------------------------------------------

_HOST_SHIFT = 56  # host memory: the number of an allocation, and a byte in it


class Host:
    """The host function of a module, run with integers for values.

    Args:
      buffers: of all devices.
      own: the numbers of those that the function gets, counted from 0.
      seed: decides the order in which copies complete.
      device: the number of the device; None for the only one.
      words: what its host tells the function of all devices, behind the buffers.
    """

    def __init__(
        self,
        buffers: Sequence[Buffer],
        own: Sequence[int],
        seed: int = 0,
        device: int | None = None,
        words: Sequence[int] = (),
    ) -> None:
        self._buffers = buffers
        self._own = own
        self._seed = seed
        self._device = device
        self._words = words
        self._parts: list[Part] = []
        self._values: dict[ir.Value, Any] = {}
        self._memory: dict[int, int] = {}
        self._descriptors: dict[int, tma.TensorMap] = {}
        self._allocations = 1
        self._is_early = False

    def run(self, module: ir.Module, programs: list[Program]) -> list[Part]:
        """Runs the function that has a body; returns its launches, which have not run.

        Args:
          module: the module.
          programs: those of the launches, added by the first device's function.
        """
        self._programs = programs
        self._is_early = "mosaic_gpu.uses_pdl" in module.operation.attributes
        (function,) = (
            op
            for op in module.body.operations
            if op.operation.name == "func.func" and len(op.regions[0].blocks)
        )
        block = function.regions[0].blocks[0]
        table = 1 << _HOST_SHIFT
        pointers = [address_of(i) for i in self._own]
        if self._words:
            self._allocations += 1
            words = self._allocations << _HOST_SHIFT
            pointers.append(words)
            for i, word in enumerate(self._words):
                self._memory[words + 8 * i] = word
        for i, pointer in enumerate(pointers):
            self._memory[table + 8 * i] = pointer
        self._values[block.arguments[0]] = 0
        self._values[block.arguments[1]] = table
        for op in block.operations:
            self._step(op.operation)
        return self._parts

    def _step(self, op: ir.Operation) -> None:
        inputs = [self._values[x] for x in op.operands]
        match op.name:
            case "func.return":
                return
            case "gpu.launch":
                return self._launch(op, inputs)
            case "func.call":
                return self._call(op, inputs)
            case "llvm.store":
                self._memory[inputs[1]] = inputs[0]
                return None
            case "scf.if":
                if inputs[0]:
                    raise PtxError("the host function refuses a tensor map")
                return None
        self._values[op.results[0]] = self._result(op, inputs)
        return None

    def _result(self, op: ir.Operation, inputs: list[Any]) -> Any:
        match op.name:
            case "arith.constant":
                constant = values.constant(op.attributes["value"], op.results[0].type)
                return constant[0].item() if constant.shape == (1,) else None
            case "builtin.unrealized_conversion_cast" | "llvm.inttoptr":
                return inputs[0]
            case "arith.cmpi" if ir.IntegerAttr(op.attributes["predicate"]).value == 1:
                return inputs[0] != inputs[1]
            case "llvm.getelementptr":
                (index,) = ir.DenseI32ArrayAttr(op.attributes["rawConstantIndices"])
                kind = str(ir.TypeAttr(op.attributes["elem_type"]).value)
                return inputs[0] + index * (1 if kind == "i8" else 8)
            case "llvm.alloca":
                self._allocations += 1
                return self._allocations << _HOST_SHIFT
            case "llvm.load" if "!llvm.array" in str(op.results[0].type):
                return inputs[0]  # the array by value: nobody writes it afterwards
            case "llvm.load":
                return self._memory[inputs[0]]
        raise NotModelled(op.name, str(op))

    def _call(self, op: ir.Operation, inputs: list[int]) -> None:
        name = str(op.attributes["callee"])
        encoders = {
            "@cuTensorMapEncodeTiled": self._encode,
            "@cuTensorMapEncodeIm2col": self._encode_windows,
        }
        if name in encoders:
            self._values[op.results[0]] = encoders[name](inputs)
            return
        if name != "@mosaic_gpu_init_tma_desc":
            raise NotModelled(f"func.call {name}")
        place, base, code, rank, sizes, strides, swizzle, box = inputs
        if place % 64:
            raise PtxError("a tensor map is not aligned to 64 bytes")
        lists = [
            [self._memory[start + 8 * i] for i in range(rank)]
            for start in (sizes, strides, box)
        ]
        self._descriptors[place] = tma.TensorMap.encode(
            base, code, lists[0], lists[1], swizzle, lists[2]
        )

    def _reader(
        self, place: int, rank: int, steps: int
    ) -> Callable[[int, int, int], list[int]]:
        """Returns what reads numbers for a tensor map, and refuses strange ones."""
        if place % 64:
            raise PtxError("a tensor map is not aligned to 64 bytes")

        def read(start: int, count: int, width: int) -> list[int]:
            return [self._memory[start + width * i] for i in range(count)]

        if read(steps, rank, 4) != [1] * rank:
            raise NotModelled("element strides of a tensor map")
        return read

    def _encode(self, inputs: list[int]) -> int:
        """cuTensorMapEncodeTiled (CUDA driver API); 0 is success."""
        place, element, rank, base, sizes, strides, box, steps, *modes = inputs
        read = self._reader(place, rank, steps)
        self._descriptors[place] = tma.TensorMap.encoded_by_driver(
            base, element, read(sizes, rank, 8), read(strides, rank - 1, 8),
            read(box, rank, 4), modes,
        )  # fmt: skip
        return 0

    def _encode_windows(self, inputs: list[int]) -> int:
        """cuTensorMapEncodeIm2col (CUDA driver API); 0 is success."""
        place, element, rank, base, sizes, strides, *rest = inputs
        lower, upper, channels, pixels, steps, *modes = rest
        read = self._reader(place, rank, steps)
        ends = [read(x, rank - 2, 4) for x in (lower, upper)]
        corners = np.array(ends, np.uint32)
        self._descriptors[place] = tma.WindowsMap.encoded(
            base, element, read(sizes, rank, 8), read(strides, rank - 1, 8),
            corners.astype(np.int32).tolist(), (channels, pixels), modes,
        )  # fmt: skip
        return 0

    def _launch(self, op: ir.Operation, inputs: list[Any]) -> None:
        groups = list(ir.DenseI32ArrayAttr(op.attributes["operandSegmentSizes"]))
        dependencies, rest = groups[0], inputs[groups[0] :]
        del dependencies
        grid, block, more = tuple(rest[:3]), tuple(rest[3:6]), rest[6:]
        cluster = (1, 1, 1)
        if groups[7]:
            cluster, more = tuple(more[:3]), more[3:]
        (smem_bytes,) = more or [0]
        shape = Shape(grid, cluster, block, smem_bytes)
        if len(self._parts) == len(self._programs):
            self._programs.append(Program(op.regions[0].blocks[0]))
        program = self._programs[len(self._parts)]
        # Values of the host that the kernel uses: pointers, and the array of tensor
        # maps, whose address stands for it.
        known = {
            program.slot(value): _of_the_host(value, number)
            for value, number in self._values.items()
        }
        launch = Launch(
            self._buffers,
            self._descriptors,
            self._is_early,
            self._seed,
            self._device,
        )
        self._parts.append(Part(launch, program, shape, known))


def address_of(buffer: int) -> int:
    """The address of a buffer in GMEM, counted from 0."""
    return (buffer + 1) << accesses.BUFFER_SHIFT


def multimem_address_of(number: int) -> int:
    """The multimem address of the buffers of a number."""
    return (_MULTIMEM + number) << accesses.BUFFER_SHIFT


def _of_the_host(value: ir.Value, number: Any) -> np.ndarray:
    """What the kernel sees of a value of the host function."""
    owner = value.owner
    if not isinstance(owner, ir.Block) and owner.name == "arith.constant":
        return values.constant(owner.attributes["value"], value.type)
    return np.array([number], np.int64)
