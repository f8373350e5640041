# SPDX-License-Identifier: Apache-2.0
"""cp.async.bulk: copies of adjacent bytes (PTX ISA, cp.async.bulk)."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.errors import PtxError
from pallas_gpu.lockstep import accesses, values
from pallas_gpu.lockstep.assembly import parse
from pallas_gpu.lockstep.copies import reductions, tma
from pallas_gpu.lockstep.engine import OutOfBoundsError
from pallas_gpu.lockstep.not_modelled import NotModelled
from pallas_gpu.lockstep.predication import guarded
from pallas_gpu.lockstep.program import Program, Step
from pallas_gpu.lockstep.registers import ASSEMBLY, AssemblyUnit
from pallas_gpu.lockstep.sync import mbarrier

_UNIT = 16  # of sizes and of addresses
_LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
_HINT = ".L2::cache_hint"
_PREFETCH = "cp.async.bulk.prefetch.L2.global"
_STORE = "cp.async.bulk.global.shared::cta.bulk_group"
_REDUCE = re.compile(
    r"cp\.reduce\.async\.bulk\.global\.shared::cta\.bulk_group(\.L2::cache_hint)?"
    r"\.(\w+?)(\.noftz)?\.(\w+)"
)


class _Copy:
    """One thread's copy: its places in both memories."""

    def __init__(self, strand: Any, lane: int, smem: int, gmem: int, size: int):
        if smem % _UNIT or gmem % _UNIT or size % _UNIT or not size:
            raise PtxError(
                f"cp.async.bulk of {size} bytes at {gmem:#x} and {smem:#x}: not "
                f"multiples of {_UNIT}"
            )
        self.cta = strand.cta
        self.row = int(strand.row_of_lane[lane])
        self.thread = int(strand.threads[lane])
        span = np.arange(size)
        self.smem = smem - accesses.SMEM_BASE + span
        self.memory = strand.cta.cluster.launch.buffer(gmem >> accesses.BUFFER_SHIFT)
        self.gmem = (gmem & (1 << accesses.BUFFER_SHIFT) - 1) + span
        if not 0 <= self.gmem[0] <= self.gmem[-1] < self.memory.data.size:
            raise OutOfBoundsError(f"a bulk copy out of bounds of {self.memory.name}")


class _Load(_Copy):
    """A copy to SMEM that counts its bytes on an mbarrier."""

    def __init__(self, strand, lane, smem, gmem, size, barrier: int):
        super().__init__(strand, lane, smem, gmem, size)
        self._barrier = mbarrier.find(strand.cta, barrier)
        self._barrier.check_known(self.row, "a copy")
        self.cta.smem.begin_write(self.row, self.smem, "a bulk copy")
        rows = np.array([self.row])
        self.memory.check_visible(rows, self.gmem, "a bulk copy reads")
        strand.cta.cluster.launch.scheduler.in_flight.append(self)

    def complete(self) -> None:
        """The bytes arrive."""
        barrier = self._barrier
        agent, epoch = self.cta.clocks.agent(barrier.agent_key), barrier.phase + 1
        self.cta.smem.end_write(self.smem, self.memory.data[self.gmem], agent, epoch)
        barrier.complete_tx(len(self.smem), agent, epoch)


class _Store(_Copy):
    """A copy to GMEM, in the thread's bulk group; it may combine elements.

    Args:
      reduction: the operation and its element type.
    """

    def __init__(self, strand, lane, smem, gmem, size, reduction=None):
        self._reduction = reduction
        super().__init__(strand, lane, smem, gmem, size)
        rows = np.array([self.row])
        self.cta.smem.begin_read(rows, self.smem, "a bulk copy")
        self.memory.check_visible(rows, self.gmem, "a bulk copy overwrites")
        self._data: np.ndarray | None = None
        self._done = False
        groups = self.cta.bulk.setdefault(self.thread, tma.BulkGroups())
        self._epoch = groups.committed + 1
        groups.open.append(self)

    def read(self) -> None:
        """Reads the SMEM."""
        if self._data is None:
            self._data = self.cta.smem.data[self.smem]
            agent = self.cta.clocks.agent(("bulk", self.cta.name, self.thread))
            self.cta.smem.end_read(self.smem, agent, self._epoch)

    def complete(self) -> None:
        """Writes the GMEM."""
        if not self._done:
            self._done = True
            self.read()
            data = self._data
            if self._reduction is not None:
                operation, dtype = self._reduction
                old, new = (
                    np.ascontiguousarray(x).view(dtype)
                    for x in (self.memory.data[self.gmem], data)
                )
                data = reductions.apply(operation, old, new).view(np.uint8)
            self.memory.data[self.gmem] = data


def _unit(program: Program, op: ir.Operation, text: str) -> Step:
    (statement,) = parse(text)
    inputs = program.inputs(op)
    hinted = _HINT in statement.opcode
    opcode, reduction = statement.opcode.removesuffix(_HINT), None
    match = _REDUCE.fullmatch(opcode)
    if match is not None:
        dtype = reductions.of_bytes(match[2], match[3] is not None, match[4])
        opcode, reduction = _STORE, (match[2], dtype)
    load = opcode == _LOAD
    places = ["[$0]", "[$1]", "$2", *(["[$3]"] if load else [])]
    if hinted:
        places.append(f"${len(places)}")
    known = statement.operands == tuple(places) and opcode in (_LOAD, _STORE)
    if not known:
        raise NotModelled(f"llvm.inline_asm {text[:80]}")
    operands = inputs[: len(places)]
    policy = operands.pop() if hinted else None

    def copy(strand: Any) -> None:
        tma.check_policy(strand, policy)
        each = [strand.per_lane(values.forced(strand.env[i])) for i in operands]
        for lane in map(int, np.flatnonzero(strand.active())):
            first, second, size, *barrier = (int(x[lane]) for x in each)
            if load:
                _Load(strand, lane, first, second, size, *barrier)
            else:
                _Store(strand, lane, second, first, size, reduction)

    return guarded(inputs, statement, copy)


def _prefetch(program: Program, op: ir.Operation, text: str) -> Step:
    """A hint: its bytes have to be those of a buffer."""
    (statement,) = parse(text)
    known = (statement.opcode, statement.operands) == (_PREFETCH, ("[$0]", "$1"))
    if not known or statement.guard:
        raise NotModelled(f"llvm.inline_asm {text[:80]}")
    inputs = program.inputs(op)

    def prefetch(strand: Any) -> None:
        each = [strand.per_lane(values.forced(strand.env[i])) for i in inputs]
        for lane in map(int, np.flatnonzero(strand.active())):
            place, size = (int(x[lane]) for x in each)
            _Copy(strand, lane, accesses.SMEM_BASE, place, size)

    return prefetch


ASSEMBLY.insert(0, AssemblyUnit(_PREFETCH, _prefetch))
for _name in (_LOAD, _STORE, "cp.reduce.async.bulk.global."):
    # In front of the mbarriers' unit, whose prefix is in one of the names.
    ASSEMBLY.insert(0, AssemblyUnit(_name, _unit))
