# SPDX-License-Identifier: Apache-2.0
"""cp.async: copies by threads, their groups, and mbarriers that track them.

PTX ISA, "Data Movement and Conversion Instructions: Non-bulk copy". The copies are weak
operations of the generic proxy: they need no fence before them, and what they have
written needs one before the async proxy reads it.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.errors import PtxError
from pallas_gpu.lockstep import accesses, values
from pallas_gpu.lockstep.assembly import parse
from pallas_gpu.lockstep.engine import LANES, Groups
from pallas_gpu.lockstep.not_modelled import NotModelled
from pallas_gpu.lockstep.predication import guarded
from pallas_gpu.lockstep.program import Program, Step
from pallas_gpu.lockstep.registers import assembles
from pallas_gpu.lockstep.sync import mbarrier

_COPY = re.compile(r"cp\.async\.(ca|cg)\.shared\.global")


class ThreadCopy:
    """One thread's copy in flight."""

    def __init__(self, strand: Any, lane: int, size: int, inside: int, to, source):
        self.strand = strand
        self.row = int(strand.row_of_lane[lane])
        self.lane = int(strand.threads[lane]) % LANES
        self._memory, self._places = source
        self._inside = inside
        self._to = to + np.arange(size)
        self.done = False
        clocks = strand.cta.clocks
        self._epoch = int(clocks.epoch[self.row])
        self._fences = int(clocks.fences[0, self.row])
        strand.cta.smem.begin_write(self.row, self._to, "cp.async", fenced=False)

    def complete(self) -> None:
        """The data arrives: read only now, as late as the waits allow."""
        if self.done:
            return
        self.done = True
        data = np.zeros(len(self._to), np.uint8)
        if self._inside:
            data[: self._inside] = self._memory.data[self._places]
        smem = self.strand.cta.smem
        smem.end_write_by_thread(
            self._to, data, self.row * LANES + self.lane, self._epoch, self._fences
        )


class ThreadCopies(Groups[ThreadCopy]):
    """The copies of one thread."""

    def wait(self, pending: int) -> None:
        """`cp.async.wait_group`."""
        for copy in itertools.chain(*self.take(pending)):
            copy.complete()

    @property
    def all(self) -> list[ThreadCopy]:
        """All copies that are not known to be complete."""
        return [c for group in (*self.groups, self.open) for c in group if not c.done]


def _copies(strand: Any, lane: int) -> ThreadCopies:
    found = strand.cta.cp_async
    return found.setdefault(int(strand.threads[lane]), ThreadCopies())


def _active(strand: Any) -> list[int]:
    return [int(lane) for lane in np.flatnonzero(strand.active())]


# In front of the mbarriers' unit, whose prefix is in one of the names.
@assembles(
    *("cp.async.ca", "cp.async.cg", "cp.async.commit_group", "cp.async.wait_group"),
    "cp.async.mbarrier",
    first=True,
)
def _unit(program: Program, op: ir.Operation, text: str) -> Step:
    (statement,) = parse(text)
    inputs = program.inputs(op)
    if "~{memory}" not in ir.StringAttr(op.attributes["constraints"]).value:
        raise NotModelled(f"llvm.inline_asm {text[:60]}")
    match statement.opcode:
        case "cp.async.commit_group":
            return _each(lambda copies: copies.commit())
        case "cp.async.wait_group":
            pending = int(statement.operands[0])
            return _each(lambda copies: copies.wait(pending))
        case "cp.async.mbarrier.arrive.shared::cta.b64":
            return _arrive(inputs[0])
    if _COPY.fullmatch(statement.opcode) is None:
        raise NotModelled(f"llvm.inline_asm {text[:60]}")
    return _copy(inputs, statement)


def _each(action: Any) -> Step:
    def step(strand: Any) -> None:
        for lane in _active(strand):
            action(_copies(strand, lane))

    return step


def _copy(inputs: list[int], statement: Any) -> Step:
    target, source, number, *rest = statement.operands
    size = int(number)
    if size not in ((16,) if ".cg." in statement.opcode else (4, 8, 16)):
        raise PtxError(f"{statement.opcode} of {size} bytes")
    if (target, source) != ("[$0]", "[$1]"):
        raise NotModelled(f"operands {statement.operands}")
    inside = inputs[int(rest[0][1:])] if rest else None

    def start(strand: Any) -> None:
        env = strand.env
        each = [strand.per_lane(values.forced(env[i])) for i in inputs[:2]]
        sizes = None if inside is None else strand.per_lane(values.forced(env[inside]))
        for lane in _active(strand):
            count = size if sizes is None else int(sizes[lane])
            if count > size:
                raise PtxError(f"cp.async of {count} of {size} bytes")
            to, place = int(each[0][lane]), int(each[1][lane])
            if to % size or (place % size and count):
                raise PtxError(f"cp.async of {size} bytes is not aligned to that")
            found = _source(strand, lane, place, count)
            to -= accesses.SMEM_BASE
            made = ThreadCopy(strand, lane, size, count, to, found)
            _copies(strand, lane).open.append(made)

    return guarded(inputs, statement, start)


def _source(strand: Any, lane: int, place: int, count: int):
    """The memory that a thread reads, and the bytes; it may read them now."""
    if not count:
        return None, np.arange(0)
    launch = strand.cta.cluster.launch
    memory = launch.buffer(place >> accesses.BUFFER_SHIFT)
    places = (place & (1 << accesses.BUFFER_SHIFT) - 1) + np.arange(count)
    alone = np.zeros(strand.lanes, bool)
    alone[lane] = True
    with strand.where(alone):
        memory.load(strand, places[None])
    return memory, places


def _arrive(pointer: int) -> Step:
    """`cp.async.mbarrier.arrive` without `.noinc`: one arrival more, and it comes."""

    def arrive(strand: Any) -> None:
        addresses = strand.per_lane(values.forced(strand.env[pointer]))
        for lane in _active(strand):
            barrier = mbarrier.find(strand.cta, int(addresses[lane]))
            row = int(strand.row_of_lane[lane])
            barrier.check_known(row, "an arrival")
            barrier.pending += 1
            work = _Arrival(barrier, _copies(strand, lane).all)
            strand.cta.cluster.launch.scheduler.in_flight.append(work)

    return arrive


class _Arrival:
    """A thread's arrival, which comes when the copies before it are complete."""

    def __init__(self, barrier: Any, copies: list[ThreadCopy]) -> None:
        self._barrier = barrier
        self._copies = copies

    def complete(self) -> None:
        """Completes the copies, and arrives."""
        for copy in self._copies:
            copy.complete()
        self._barrier.arrive(1, None)
