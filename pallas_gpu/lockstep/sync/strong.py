# SPDX-License-Identifier: Apache-2.0
"""Strong operations on GMEM that release and acquire, and loops that poll it.

PTX ISA, Memory Consistency Model: a release makes known what happened before it to an
acquire that observes it, also by way of atomic operations of others in between. A
relaxed operation after a fence of the same thread releases, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.errors import PtxError
from pallas_gpu.lockstep import values
from pallas_gpu.lockstep.accesses import BUFFER_SHIFT
from pallas_gpu.lockstep.assembly import Statement, dtype_of, parse
from pallas_gpu.lockstep.engine import LANES, Wait
from pallas_gpu.lockstep.memory import Memory
from pallas_gpu.lockstep.not_modelled import NotModelled
from pallas_gpu.lockstep.program import Program, Step, without_waits
from pallas_gpu.lockstep.registers import assembles
from pallas_gpu.lockstep.sync.atomics import require_scope

_ACCESS = re.compile(
    r"(ld|red|atom)\.(relaxed|acquire|release|acq_rel)\.(gpu|sys)\.global"
    r"(?:\.(add|cas))?\.([sub])32"
)
_FENCE = re.compile(r"fence\.acq_rel\.(gpu|sys)")
_COMPARE = {"lt": np.less, "ge": np.greater_equal, "ne": np.not_equal, "eq": np.equal}


class _Thread:
    """One thread that runs a text.

    Attributes:
      registers: words by name; operands are `$n`.
      watched: the memory, the byte and the word of the latest load.
    """

    def __init__(self, strand: Any, lane: int, registers: dict[str, Any]) -> None:
        self.strand = strand
        self.row = int(strand.row_of_lane[lane])
        self.lane = lane % LANES
        self.registers = registers
        self.watched: tuple[Memory, int, np.uint32] | None = None

    def step(self, statement: Statement) -> str | None:
        """Runs a statement; gives the label where it goes on, if it branches."""
        if statement.guard:
            negated = statement.guard.startswith("!")
            if bool(self._word(statement.guard.lstrip("!"))) == negated:
                return None
        code, operands = statement.opcode, statement.operands
        if (access := _ACCESS.fullmatch(code)) is not None:
            self._access(access, operands)
        elif _FENCE.fullmatch(code):
            clocks = self.strand.cta.clocks
            clocks.fenced[self.row, self.lane] = clocks.released(self.row, self.lane)
        elif code.startswith("setp."):
            _, relation, kind = code.split(".")
            left, right = (self._word(x, kind) for x in operands[1:])
            self.registers[operands[0]] = _COMPARE[relation](left, right)
        elif code == "sub.s32":
            left, right = map(self._word, operands[1:])
            self.registers[operands[0]] = np.subtract(left, right, dtype=np.uint32)
        elif code == "bra":
            return operands[0]
        else:
            raise NotModelled(f"llvm.inline_asm {code}")
        return None

    def _word(self, name: Any, kind: str = "u32") -> Any:
        word = np.asarray(self.registers[name])
        return word if word.dtype == bool else word.view(dtype_of(kind))

    def _access(self, form: re.Match[str], operands: Any) -> None:
        name, order, scope, operation, _ = form.groups()
        place = operands[0] if name == "red" else operands[1]
        number, offset = divmod(int(self.registers[place[1:-1]]), 1 << BUFFER_SHIFT)
        if offset % 4:
            raise PtxError("a strong operation at an unaligned address")
        memory = self.strand.cta.cluster.launch.buffer(number)
        if memory.clocks is None:
            raise PtxError(f"a strong operation on {memory.name}, an input")
        require_scope(memory, offset, scope, self.strand.cta)
        places = np.arange(offset, offset + 4)[None]
        word = memory.data[offset : offset + 4].view(np.uint32)
        before = word[0]
        if name == "ld":
            memory.observe(self.row, places)
            self.watched = memory, offset, before
        else:
            with self.strand.where(self._only()):
                memory.update(self.strand, places)
            inputs = [self._word(x) for x in operands[1 if name == "red" else 2 :]]
            self._release(memory, offset, order)
            with np.errstate(all="ignore"):
                if operation == "add":
                    word[0] = before + inputs[0]
                elif before == inputs[0]:
                    word[0] = inputs[1]
        if order in ("acquire", "acq_rel"):
            clocks = self.strand.cta.clocks
            clocks.acquire(np.array([self.row]), memory.released.get(offset))
        if name != "red":
            self.registers[operands[0]] = before

    def _only(self) -> np.ndarray:
        lanes = self.strand.threads % LANES == self.lane
        return lanes & (self.strand.row_of_lane == self.row)

    def _release(self, memory: Memory, offset: int, order: str) -> None:
        clocks = self.strand.cta.clocks
        known = clocks.fenced.get((self.row, self.lane))
        if order in ("release", "acq_rel"):
            known = clocks.released(self.row, self.lane)
        memory.release(offset, known)


# Before the unit of atomic operations, which does not know of loops and of fences.
@assembles(
    *("ld.acquire.", "ld.relaxed.", "fence.acq_rel."),
    "red.relaxed.sys.global.add.u32 [",
    first=True,
)
def _text(program: Program, op: ir.Operation, text: str) -> Step:
    statements = parse(text)
    inputs = program.inputs(op)
    results = program.outputs(op)
    constraints = ir.StringAttr(op.attributes["constraints"]).value.split(",")
    given = [c for c in constraints if c[0] not in "=~"]
    labels = {s.label: i for i, s in enumerate(statements) if s.label}

    def start(strand: Any, lane: int) -> _Thread:
        registers: dict[str, Any] = {}
        for i, (slot, constraint) in enumerate(zip(inputs, given, strict=True)):
            held = np.ascontiguousarray(values.forced(strand.env[slot]))
            word = strand.per_lane(held)[lane]
            # A tied operand is the result before the first statement.
            tied = constraint.isdigit()
            name = f"${constraint}" if tied else f"${len(results) + i}"
            if word.dtype.itemsize == 4:
                word = word.view(np.uint32)
            registers[name] = word
        return _Thread(strand, lane, registers)

    def run(strand: Any) -> Iterator[Wait]:
        out = np.zeros(strand.lanes, np.uint32)
        for lane in np.flatnonzero(strand.active()):
            thread, at = start(strand, int(lane)), 0
            while at < len(statements):
                label = thread.step(statements[at])
                at = at + 1 if label is None else labels[label]
                if label is not None and thread.watched is not None:
                    yield _until_changed(*thread.watched)
            if results:
                out[lane] = thread.registers["$0"]
        if results:
            strand.env[results[0]] = out

    run_once = without_waits(run)

    def read(strand: Any) -> Iterator[Wait]:
        run_once(strand)
        # A loop around it may poll: the others run meanwhile.
        yield Wait(lambda: True, lambda: "nothing")

    if all(s.opcode != "bra" for s in statements):
        reads = any(s.opcode.startswith("ld.") for s in statements)
        program.polls |= reads
        return read if reads else run_once
    program.polls = True
    return run


def _until_changed(memory: Memory, offset: int, word: np.uint32) -> Wait:
    def now() -> np.uint32:
        return memory.data[offset : offset + 4].view(np.uint32)[0]

    return Wait(
        lambda: now() != word,
        lambda: f"byte {offset} of {memory.name}, {now()}, to change",
    )
