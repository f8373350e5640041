# SPDX-License-Identifier: Apache-2.0
"""st.async and red.async: stores of threads that are counted on an mbarrier.

PTX ISA, st.async and red.async: address and mbarrier are of one block of the cluster.
The bytes arrive as late as the waits allow.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.errors import PtxError
from pallas_gpu.lockstep import accesses, values
from pallas_gpu.lockstep.assembly import dtype_of
from pallas_gpu.lockstep.not_modelled import NotModelled
from pallas_gpu.lockstep.predication import predicated
from pallas_gpu.lockstep.program import Program, Step
from pallas_gpu.lockstep.registers import assembles, form_of
from pallas_gpu.lockstep.sync import mbarrier

_OPCODE = re.compile(
    r"(?:st\.async\.weak|red\.async\.relaxed\.cluster)\.shared::cluster"
    r"\.mbarrier::complete_tx::bytes(?:\.v([24])|\.(add|min|max|and|or|xor))?"
    r"\.([bus])(32|64)"
)
_UPDATES = {
    "add": (np.add, ("u32", "s32", "u64")),
    "min": (np.minimum, ("u32", "s32")),
    "max": (np.maximum, ("u32", "s32")),
    "and": (np.bitwise_and, ("b32",)),
    "or": (np.bitwise_or, ("b32",)),
    "xor": (np.bitwise_xor, ("b32",)),
}


@assembles("st.async.", "red.async.", first=True)
def _store(program: Program, op: ir.Operation, text: str) -> Step:
    statement, match = form_of(text, _OPCODE)
    count, operation, kind = int(match[1] or 1), match[2], match[3] + match[4]
    if (operation is not None) != statement.opcode.startswith("red"):
        raise NotModelled(f"llvm.inline_asm {text[:80]}")
    if operation is not None and kind not in _UPDATES[operation][1]:
        raise NotModelled(f"llvm.inline_asm {text[:80]}")
    names = tuple(f"${i + 1}" for i in range(count))
    if statement.operands != (
        "[$0]",
        names if count > 1 else names[0],
        f"[${count + 1}]",
    ) or statement.guard not in ("", f"${count + 2}"):
        raise NotModelled(f"llvm.inline_asm {text[:80]}")
    pointer, *rest = program.inputs(op)
    words, barrier, dtype = rest[:count], rest[count], dtype_of(kind)

    def issue(strand: Any) -> None:
        lanes = np.flatnonzero(strand.active())
        if not lanes.size:
            return
        addresses = strand.per_lane(strand.env[pointer])[lanes].astype(np.int64)
        memory, offsets = accesses.shared_of_cluster(strand, addresses)
        if (offsets % (count * dtype.itemsize)).any():
            raise PtxError("an asynchronous store to an unaligned address")
        columns = [strand.per_lane(values.forced(strand.env[i]))[lanes] for i in words]
        data = np.ascontiguousarray(np.stack(columns, axis=1)).view(dtype)
        number = int(strand.per_lane(strand.env[barrier])[lanes[0]])
        cta, place = accesses.cluster_address(strand, number)
        if cta.smem is not memory:
            raise PtxError("an asynchronous store and its mbarrier in two blocks")
        target = mbarrier.find(cta, place)
        for row in strand.active_rows():
            mine = strand.row_of_lane[lanes] == row
            target.check_known(int(row), "an asynchronous store")
            work = _Work(cta, target, offsets[mine], data[mine], operation)
            work.begin(int(row))
            strand.cta.cluster.launch.scheduler.in_flight.append(work)

    return predicated(rest[count + 1] if statement.guard else None, issue)


class _Work:
    """What one warp stores."""

    def __init__(self, cta, barrier, offsets, data, operation: str | None) -> None:
        self._cta, self._barrier = cta, barrier
        self._data, self._operation = data, operation
        size = data.shape[1] * data.itemsize
        self._places = offsets[:, None] + np.arange(size)

    def begin(self, row: int) -> None:
        """Checks that the bytes may be written."""
        atomic = self._operation is not None
        what = "an asynchronous store"
        self._cta.smem.begin_write(row, self._places, what, fenced=False, atomic=atomic)

    def complete(self) -> None:
        """The bytes arrive."""
        memory, data = self._cta.smem, self._data
        if self._operation is not None:
            old = np.ascontiguousarray(memory.data[self._places]).view(data.dtype)
            data = _UPDATES[self._operation][0](old, data)
        raw = np.ascontiguousarray(data).view(np.uint8).reshape(self._places.shape)
        atomic = self._operation is not None
        self._barrier.receive(self._places, raw, atomic=atomic)
