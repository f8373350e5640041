# SPDX-License-Identifier: Apache-2.0
"""clusterlaunchcontrol: requests for clusters that have not started, and the answers.

PTX ISA, "clusterlaunchcontrol.try_cancel", ".query_cancel". The answer is opaque there;
here it is four words: whether it grants a cluster, and the ctaid of its first block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.errors import PtxError
from pallas_gpu.lockstep import accesses, values
from pallas_gpu.lockstep.assembly import Statement, parse
from pallas_gpu.lockstep.not_modelled import NotModelled
from pallas_gpu.lockstep.program import Program, Step
from pallas_gpu.lockstep.registers import assembles
from pallas_gpu.lockstep.sync import mbarrier

_BYTES = 16
_CANCEL = (
    "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes"
)
_MULTICAST = ".multicast::cluster::all"
_QUERY = "clusterlaunchcontrol.query_cancel"
_FIRST = [f"{_QUERY}.get_first_ctaid::{axis}.b32.b128" for axis in "xyz"]


class _Request:
    """A request in flight."""

    def __init__(self, strand: Any, row: int, place: int, barrier: int, everywhere):
        cluster = strand.cta.cluster
        self._launch = cluster.launch
        targets = cluster.ctas if everywhere else [strand.cta]
        self._barriers = [mbarrier.find(cta, barrier) for cta in targets]
        if place % _BYTES:
            raise PtxError(f"an answer at {place:#x} is not aligned to 16 bytes")
        self._places = place - accesses.SMEM_BASE + np.arange(_BYTES)
        if any(cta.refused for cta in targets):
            raise PtxError("try_cancel after an answer without a cluster")
        for target in self._barriers:
            target.check_known(row, "a request")
            target.cta.smem.begin_write(row, self._places, "the answer to try_cancel")

    def complete(self) -> None:
        """The answer arrives in every block."""
        first = self._launch.cancel()
        words = [0, 0, 0, 0] if first is None else [1, *first]
        data = np.array(words, np.uint32).view(np.uint8)
        for barrier in self._barriers:
            barrier.receive(self._places, data)


@assembles(_CANCEL, first=True)
def _cancel(program: Program, op: ir.Operation, text: str) -> Step:
    (statement,) = parse(text)
    everywhere = statement.opcode.endswith(f"{_MULTICAST}.b128")
    plain = statement.opcode.replace(_MULTICAST, "")
    if plain != f"{_CANCEL}.b128" or statement.operands != ("[$0]", "[$1]"):
        raise NotModelled(f"llvm.inline_asm {text[:80]}")
    place, barrier = program.inputs(op)

    def cancel(strand: Any) -> None:
        env = strand.env
        for lane in np.flatnonzero(strand.active()):
            where, target = (
                int(strand.per_lane(env[x])[lane]) for x in (place, barrier)
            )
            row = int(strand.row_of_lane[lane])
            if len(strand.cta.cluster.ctas) > 1 and not everywhere:
                raise PtxError("only one block of the cluster gets the answer")
            work = _Request(strand, row, where, target, everywhere)
            strand.cta.cluster.launch.scheduler.in_flight.append(work)

    return cancel


@assembles(_QUERY, first=True)
def _decode(program: Program, op: ir.Operation, text: str) -> Step:
    """`ld.shared.b128`, then what it says in registers, in the order of the text."""
    load, *rest = parse(text)
    results = [statement.operands[0] for statement in rest if statement.operands]
    held = sorted({x for x in results if x.startswith("$")})
    if (load.opcode, *load.operands) != ("ld.shared.b128", "answer", f"[${len(held)}]"):
        raise NotModelled(f"llvm.inline_asm {text[:80]}")
    (place,) = program.inputs(op)
    (out,) = program.outputs(op)

    def decode(strand: Any) -> None:
        pointer = strand.per_lane(values.forced(strand.env[place]))
        memory, offset = accesses.memory_of(strand, 3, pointer)
        raw = memory.load(strand, accesses.places_of(offset, _BYTES))
        answer = np.zeros((len(strand.threads), 4), np.uint32)
        answer[strand.active()] = raw.view(np.uint32)
        registers: dict[str, np.ndarray] = {}
        for statement in rest:
            _execute(statement, registers, answer, strand)
        if not answer[strand.active(), 0].any():
            strand.cta.refused = True
        strand.env[out] = tuple(registers[name] for name in held)

    return decode


def _execute(statement: Statement, registers, answer: np.ndarray, strand: Any) -> None:
    """Executes one statement for all lanes."""
    where = registers[statement.guard] if statement.guard else None
    target = statement.operands[0] if statement.operands else ""
    match statement.opcode:
        case "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128":
            value = answer[:, 0] != 0
        case opcode if opcode in _FIRST:
            if (answer[:, 0] == 0)[strand.active() & where].any():
                raise PtxError("get_first_ctaid of an answer without a cluster")
            value = answer[:, 1 + _FIRST.index(opcode)]
        case "selp.b32":
            a, b = (np.uint32(int(x)) for x in statement.operands[1:3])
            value = np.where(registers[statement.operands[3]], a, b)
        case "mov.b32":
            value = np.full(len(answer), int(statement.operands[1]), np.uint32)
        case "fence.proxy.async.shared::cta":
            strand.cta.clocks.fence(np.unique(strand.row_of_lane), 0)
            return
        case _:
            raise NotModelled(f"llvm.inline_asm {statement.opcode}")
    if where is not None:
        value = np.where(where, value, registers[target])
    registers[target] = value
