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
from pallas_gpu.lockstep.registers import assembles
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
        self._barrier.receive(self.smem, self.memory.data[self.gmem])


# In front of the mbarriers' unit, whose prefix is in one of the names.
@assembles(_LOAD, _STORE, "cp.reduce.async.bulk.global.", first=True)
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
                found = _Copy(strand, lane, second, first, size)
                tma.StoreWork(
                    found.cta, found.row, found.thread, found.smem,
                    (found.memory, found.gmem, ...), "a bulk copy", reduction,
                )  # fmt: skip

    return guarded(inputs, statement, copy)


@assembles(_PREFETCH, first=True)
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
