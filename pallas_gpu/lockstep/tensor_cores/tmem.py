# SPDX-License-Identifier: Apache-2.0
"""Tensor memory: its allocation, who may access which cells, and tcgen05.ld and .st.

From the PTX ISA, "TensorCore 5th Generation Family Instructions". 128 lanes by 512
columns of 32 bits; an address has the lane in bits 16-31 and the column in bits 0-15.

Loads and stores of a warp are agents of their own, whose epoch grows when the warp
waits for them; others learn it only from before `tcgen05.fence::before_thread_sync`,
and know it for tcgen05 instructions only after `tcgen05.fence::after_thread_sync`.
Products (`tcgen05.py`) and copies from SMEM are agents, too; a model of tcgen05.cp uses
`Cells` in the same way. A pair of CTAs is two blocks whose ranks differ in the last
bit; what one of them issues for both accesses the cells of both.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.errors import PtxError
from pallas_gpu.lockstep import accesses, values
from pallas_gpu.lockstep.assembly import parse
from pallas_gpu.lockstep.copies import load_reduce
from pallas_gpu.lockstep.engine import LANES, RaceError
from pallas_gpu.lockstep.not_modelled import NotModelled
from pallas_gpu.lockstep.program import Program, Step, runs

TMEM_LANES, COLUMNS = 128, 512
# A NaN of float32, and of float16 in its low half: a small number would be lost where
# a product is added to it by mistake.
_POISON = 0xFFFFFE5A
_LEAST_COLUMNS = 32


class Cells:
    """The tensor memory of a block.

    Attributes:
      data: [lanes, columns] of 32 bits.
      allocated: the columns of each allocation, by its address.
      relinquished: whether the block has given up the permit to allocate.
      group: the cta_group of its instructions; None before the first.
      order: [rows, agents] what each warp knows for tcgen05 instructions: what it knew
        at its last fence::after_thread_sync.
    """

    def __init__(self, cta: Any) -> None:
        self.cta = cta
        self.data = np.full((TMEM_LANES, COLUMNS), _POISON, np.uint32)
        self.allocated: dict[int, int] = {}
        self.relinquished = False
        self.group: int | None = None
        self.latest_allocation = COLUMNS
        self.order = np.zeros_like(cta.clocks.known)
        shape = self.data.shape
        self._writer = np.full(shape, -1, np.int32)
        self._written = np.zeros(shape, np.int32)
        self._reads: dict[int, np.ndarray] = {}
        # The agent that is writing a cell, from 1; and how many reads of an agent are
        # in flight.
        self._writing = np.zeros(shape, np.int32)
        self._reading: dict[int, np.ndarray] = {}
        self.in_flight = 0

    def belong(self, group: int, what: str) -> None:
        """All instructions of a kernel have the same cta_group."""
        if self.group not in (None, group):
            raise PtxError(f"{what} of cta_group::{group} after ::{self.group}")
        self.group = group

    # --- accesses ---------------------------------------------------------------------

    def free(self, row: int, start: int, columns: int) -> None:
        """Nobody accesses the columns any more, as the warp that frees them knows."""
        lanes, held = np.indices((TMEM_LANES, columns))
        cells = lanes.reshape(-1), held.reshape(-1) + start
        what = "tcgen05.dealloc"
        self._require_idle(cells, what, writes=True)
        agent = store_agent(self.cta, row)
        self._require_known(row, agent, cells, what, readers=True)

    def begin(
        self,
        row: int,
        agent: int,
        cells: tuple[np.ndarray, ...],
        *,
        writes: bool,
        what: str,
        pipelined: bool = False,
        after: tuple[int, ...] = (),
    ) -> None:
        """An instruction that a warp issues accesses cells until `end`.

        Args:
          row: of the warp.
          agent: who accesses them.
          cells: their lanes and columns.
          writes: whether it also writes them.
          pipelined: whether the agent's own accesses in flight come before it.
          after: other agents whose accesses in flight come before it.
        """
        self._require_allocated(cells, what)
        own = (*after, agent) if pipelined else after
        self._require_idle(cells, what, writes=writes, own=own)
        self._require_known(row, agent, cells, what, readers=writes)
        self.in_flight += 1
        if writes:
            self._writing[cells] = agent + 1
        else:
            shape = self.data.shape
            self._reading.setdefault(agent, np.zeros(shape, np.int32))[cells] += 1

    def end(
        self,
        agent: int,
        epoch: int,
        cells: tuple[np.ndarray, ...],
        *,
        writes: bool,
    ) -> None:
        """The access is complete, as who knows of the agent's epoch knows."""
        self.in_flight -= 1
        if writes:
            self._writing[cells] = 0
            self._writer[cells], self._written[cells] = agent, epoch
        else:
            self._reading[agent][cells] -= 1
            self._reads_of(agent)[cells] = epoch

    def _require_idle(
        self,
        cells: tuple[np.ndarray, ...],
        what: str,
        *,
        writes: bool,
        own: tuple[int, ...] = (),
    ) -> None:
        """No access in flight conflicts, but for those of the agents `own`."""
        marks = [0, *(agent + 1 for agent in own)]
        if not np.isin(self._writing[cells], marks).all():
            raise RaceError(f"{what} accesses TMEM that is still being written")
        for reader, count in self._reading.items():
            if writes and reader not in own and count[cells].any():
                raise RaceError(f"{what} overwrites TMEM that is still being read")

    def _reads_of(self, agent: int) -> np.ndarray:
        return self._reads.setdefault(agent, np.zeros(self.data.shape, np.int32))

    def _require_allocated(self, cells: tuple[np.ndarray, ...], what: str) -> None:
        lanes, columns = cells
        inside = np.zeros(COLUMNS, bool)
        for start, count in self.allocated.items():
            inside[start : start + count] = True
        fine = columns.min() >= 0 and columns.max() < COLUMNS
        if not fine or lanes.max() >= TMEM_LANES or not inside[columns].all():
            raise PtxError(f"{what} accesses TMEM that is not allocated")

    def _require_known(
        self,
        row: int,
        agent: int,
        cells: tuple[np.ndarray, ...],
        what: str,
        *,
        readers: bool,
    ) -> None:
        known = self._known(row, agent)
        writer = self._writer[cells]
        when = np.where(writer >= 0, self._written[cells], 0)
        if (when > known[np.maximum(writer, 0)]).any():
            raise RaceError(
                f"{what} accesses TMEM whose writer is not known to be ordered before "
                "it: a wait, or a tcgen05.fence, is missing"
            )
        if not readers:
            return
        for other, table in self._reads.items():
            if (table[cells] > known[other]).any():
                raise RaceError(
                    f"{what} overwrites TMEM whose reader is not known to be ordered "
                    "before it: a wait, or a tcgen05.fence, is missing"
                )

    def _known(self, row: int, agent: int) -> np.ndarray:
        """The epochs that a warp knows of for tcgen05 instructions."""
        clocks = self.cta.clocks
        known = np.zeros(clocks.known.shape[1], np.int32)
        known[: self.order.shape[1]] = self.order[row]
        for own in (load_agent(self.cta, row), store_agent(self.cta, row), agent):
            if own < len(known):
                known[own] = np.iinfo(np.int32).max
        return known

    def fence_after(self, rows: np.ndarray) -> None:
        """fence::after_thread_sync: what the warps know holds for tcgen05, too."""
        known = self.cta.clocks.known
        if known.shape[1] > self.order.shape[1]:
            grown = np.zeros_like(known)
            grown[:, : self.order.shape[1]] = self.order
            self.order = grown
        self.order[rows] = np.maximum(self.order[rows], known[rows])


def of(strand: Any) -> Cells:
    """The tensor memory of a strand's block."""
    return of_cta(strand.cta)


def of_cta(cta: Any) -> Cells:
    """The tensor memory of a block."""
    if cta.tmem is None:
        cta.tmem = Cells(cta)
    return cta.tmem


def ctas_of(cta: Any, group: int, what: str) -> list[Any]:
    """The blocks of a cta_group: one, or a pair, the one of even rank first."""
    if group == 1:
        return [cta]
    ctas, first = cta.cluster.ctas, cta.rank & ~1
    if first + 1 >= len(ctas):
        raise PtxError(f"{what}: {cta.name} is not one of a pair")
    return ctas[first : first + 2]


def load_agent(cta: Any, row: int) -> int:
    """The loads of a warp."""
    return cta.clocks.agent(("tcgen05.ld", row))


def store_agent(cta: Any, row: int) -> int:
    """The stores of a warp."""
    return cta.clocks.agent(("tcgen05.st", row))


def finish(cta: Any) -> None:
    """A block ends: its tensor memory must be free, and nothing accesses it."""
    if cta.tmem is None:
        return
    if cta.tmem.allocated:
        raise PtxError(f"{cta.name} ends and has not freed its TMEM")
    if cta.tmem.in_flight:
        raise PtxError(f"{cta.name} ends while its TMEM is accessed")


# --- allocation -----------------------------------------------------------------------


def group_of(op: ir.Operation) -> int:
    """The cta_group of an operation: 1 or 2."""
    text = str(op.attributes["group"]) if "group" in op.attributes else "cta_1"
    return 2 if "cta_2" in text else 1


def _one_warp(strand: Any, op: ir.Operation) -> int:
    """The row of the one warp that executes an operation."""
    of(strand).belong(group_of(op), op.name)
    ctas_of(strand.cta, group_of(op), op.name)
    rows = strand.whole_warps(op.name)
    if len(rows) != 1:
        raise PtxError(f"{op.name} is executed by {len(rows)} warps")
    return int(rows[0])


@runs("nvvm.tcgen05.alloc")
def _alloc(program: Program, op: ir.Operation) -> Step:
    address, count = program.inputs(op)

    def alloc(strand: Any) -> None:
        _one_warp(strand, op)
        cells = of(strand)
        columns = strand.uniform(strand.env[count])
        if columns & columns - 1 or not _LEAST_COLUMNS <= columns <= COLUMNS:
            raise PtxError(f"tcgen05.alloc of {columns} columns")
        if cells.relinquished or columns > cells.latest_allocation:
            raise PtxError("tcgen05.alloc without a permit, or of more than before")
        taken = {
            c for start, n in cells.allocated.items() for c in range(start, start + n)
        }
        # The last that are free, so that the address is not 0 where it can be.
        starts = range(COLUMNS - columns, -1, -columns)
        free = [s for s in starts if not taken & set(range(s, s + columns))]
        if not free:
            raise PtxError("tcgen05.alloc would block for ever")
        cells.allocated[free[0]] = cells.latest_allocation = columns
        first = int(np.flatnonzero(strand.active())[0])
        with strand.where(np.arange(strand.lanes) == first):
            memory, offset = accesses.memory_of(strand, 3, strand.env[address])
            word = np.array([[free[0]]], np.uint32).view(np.uint8)
            memory.store(strand, accesses.places_of(offset, 4), word)

    return alloc


@runs("nvvm.tcgen05.relinquish_alloc_permit")
def _relinquish(program: Program, op: ir.Operation) -> Step:
    def relinquish(strand: Any) -> None:
        _one_warp(strand, op)
        of(strand).relinquished = True

    return relinquish


@runs("nvvm.tcgen05.dealloc")
def _dealloc(program: Program, op: ir.Operation) -> Step:
    address, count = program.inputs(op)

    def dealloc(strand: Any) -> None:
        row = _one_warp(strand, op)
        cells = of(strand)
        start = strand.uniform(strand.env[address])
        columns = strand.uniform(strand.env[count])
        if cells.allocated.get(start) != columns:
            raise PtxError(f"tcgen05.dealloc of {columns} columns at {start}")
        # Of a pair both have finished their accesses.
        for cta in ctas_of(strand.cta, group_of(op), op.name):
            of_cta(cta).free(row, start, columns)
        del cells.allocated[start]

    return dealloc


# --- ordering -------------------------------------------------------------------------


@dataclasses.dataclass
class Pending:
    """The loads, or the stores, of a warp that it has not waited for.

    Attributes:
      waits: how often it has.
    """

    cells: list[tuple[np.ndarray, ...]] = dataclasses.field(default_factory=list)
    data: list[np.ndarray] = dataclasses.field(default_factory=list)
    waits: int = 0


def _pending(strand: Any, row: int, kind: str) -> Pending:
    return strand.cta.tmem_pending.setdefault((kind, row), Pending())


def _in_warp(strand: Any, row: int) -> tuple[int, ...]:
    """Whose accesses come before a load or store of a warp: its own (PTX ISA 9.4)."""
    return load_agent(strand.cta, row), store_agent(strand.cta, row)


@runs("nvvm.tcgen05.wait")
def _wait(program: Program, op: ir.Operation) -> Step:
    stores = "store" in str(op.attributes["kind"])
    kind = "st" if stores else "ld"

    def wait(strand: Any) -> None:
        cells = of(strand)
        for row in map(int, strand.whole_warps("tcgen05.wait")):
            pending = _pending(strand, row, kind)
            pending.waits += 1
            agent = (store_agent if stores else load_agent)(strand.cta, row)
            for i, held in enumerate(pending.cells):
                if stores:
                    cells.data[held] = pending.data[i]
                cells.end(agent, pending.waits, held, writes=stores)
            pending.cells, pending.data = [], []

    return wait


@runs("nvvm.tcgen05.fence")
def _fence(program: Program, op: ir.Operation) -> Step:
    after = "after" in str(op.attributes["kind"])

    def fence(strand: Any) -> None:
        rows = strand.active_rows()
        if after:
            # What these warps issue may access the TMEM of the other CTA of the pair.
            for cta in strand.cta.cluster.ctas:
                if cta.tmem is not None:
                    cta.tmem.fence_after(rows)
            return
        clocks = strand.cta.clocks
        for row in map(int, rows):
            for kind, agent in (("ld", load_agent), ("st", store_agent)):
                waits = _pending(strand, row, kind).waits
                clocks.learn(row, agent(strand.cta, row), waits)

    return fence


# --- loads and stores -----------------------------------------------------------------

_TRANSFER = re.compile(
    r"tcgen05\.(ld|st)\.sync\.aligned\.(\w+)\.x(\d+)(\.pack::16b|\.unpack::16b)?\.b32"
)
# Registers of one repetition.
_REGISTERS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4}
_MOST_REGISTERS = 128


@dataclasses.dataclass(frozen=True)
class Form:
    """The form of a load or store (PTX ISA, "Matrix fragments").

    Attributes:
      shape: e.g. 16x256b.
      repetitions: the N of `.xN`.
      packed: a register has the low halves of two neighbouring columns.
    """

    shape: str
    repetitions: int
    packed: bool

    def __post_init__(self) -> None:
        n = self.repetitions
        known = self.shape in _REGISTERS and n > 0 and not n & n - 1
        if not known or self.registers > _MOST_REGISTERS:
            raise PtxError(f"no tcgen05.ld or tcgen05.st is {self}")

    @property
    def registers(self) -> int:
        """Registers of a thread."""
        return _REGISTERS[self.shape] * self.repetitions

    def places(self) -> tuple[np.ndarray, ...]:
        """[lanes, registers] lane and column of each thread's registers.

        Of packed registers the column is that of the pair: 0, 1 and so on.
        """
        t, i = np.arange(LANES)[:, None], np.arange(self.registers)[None]
        match self.shape:
            case "32x32b":
                lane, column = t + 0 * i, i + 0 * t
            case "16x64b":
                lane, column = t // 4 + 8 * (t % 2) + 0 * i, 2 * i + t // 2 % 2
            case "16x128b":
                lane, column = t // 4 + 8 * (i % 2), 4 * (i // 2) + t % 4
            case _:
                lane = t // 4 + 8 * (i // 2 % 2)
                column = 8 * (i // 4) + 2 * (t % 4) + i % 2
        return lane, column


def transfer(program: Program, op: ir.Operation, text: str) -> Step:
    """The step of a tcgen05.ld or tcgen05.st."""
    (statement,) = parse(text)
    if (found := load_reduce.form_of(statement.opcode)) and not statement.guard:
        repetitions, reduced = found
        form = Form("32x32b", repetitions, packed=False)
        registers, extremum, place = statement.operands
        words = (*registers, str(extremum))
        return _load(program, op, form, words, str(place), reduced)
    match = _TRANSFER.fullmatch(statement.opcode)
    if match is None or statement.guard:
        raise NotModelled(f"llvm.inline_asm {text[:80]}")
    verb, shape, times, packed = match.groups()
    form = Form(shape, int(times), packed is not None)
    names = [x for x in statement.operands if isinstance(x, tuple)]
    places = [x for x in statement.operands if isinstance(x, str)]
    if len(names) != 1 or len(places) != 1 or len(names[0]) != form.registers:
        raise PtxError(f"{statement.opcode} with other operands: {text[:80]}")
    if verb == "ld":
        return _load(program, op, form, names[0], places[0])
    return _store(program, op, form, names[0], places[0])


def _number(name: str) -> int:
    return int(name.strip("[]").removeprefix("$"))


def _rows(strand: Any, address: Any, form: Form) -> list[tuple[int, slice, Any]]:
    """Of each warp its row, its threads, and the cells of its registers."""
    rows = strand.whole_warps("tcgen05.ld and tcgen05.st")
    each = strand.per_lane(values.forced(address))
    found = []
    for position, warp in enumerate(strand.warps):
        row = int(strand.rows[position])
        if row not in rows:
            continue
        threads = slice(LANES * position, LANES * (position + 1))
        start = each[threads]
        if not (start == start[0]).all():
            raise PtxError("tcgen05.ld or .st with several addresses in a warp")
        first, column = int(start[0]) >> 16, int(start[0]) & 0xFFFF
        quarter = LANES * (warp % 4)
        allowed = (0,) if form.shape == "32x32b" else (0, 16)
        if first - quarter not in allowed:
            raise PtxError(f"warp {warp} accesses TMEM lanes from {first} on")
        lane, columns = form.places()
        found.append((row, threads, (first + lane, (column, columns))))
    return found


def _cells(form: Form, lane: np.ndarray, columns: Any) -> list[Any]:
    """The cells of the registers; two arrays of them if they are packed."""
    start, column = columns
    if not form.packed:
        return [(lane, start + column)]
    return [(lane, start + 2 * column), (lane, start + 2 * column + 1)]


def _load(
    program: Program,
    op: ir.Operation,
    form: Form,
    results: tuple[str, ...],
    place: str,
    reduced: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Step:
    inputs, (out,) = program.inputs(op), program.outputs(op)
    outputs = form.registers + (reduced is not None)
    kinds = values.result_kinds(op.results[0].type)
    names = [_number(x) for x in results]
    source = inputs[_number(place) - outputs]
    if sorted(names) != list(range(outputs)):
        raise NotModelled("tcgen05.ld with registers that are no results")

    def load(strand: Any) -> None:
        memory = of(strand)
        result = np.zeros((strand.lanes, outputs), np.uint32)
        for row, threads, (lane, columns) in _rows(strand, strand.env[source], form):
            agent, before = load_agent(strand.cta, row), _in_warp(strand, row)
            stores = _pending(strand, row, "st")
            for held, data in zip(stores.cells, stores.data, strict=True):
                memory.data[held] = data
            parts = []
            for cells in _cells(form, lane, columns):
                memory.begin(
                    row, agent, cells, writes=False, what="tcgen05.ld", after=before
                )
                _pending(strand, row, "ld").cells.append(cells)
                parts.append(memory.data[cells])
            word = parts[0]
            if form.packed:
                word = parts[0] & 0xFFFF | parts[1] << 16
            result[threads, : form.registers] = word
            if reduced is not None:
                result[threads, -1] = reduced(word)
        registers = [
            np.ascontiguousarray(result[:, names.index(i)]).view(kind)
            for i, kind in enumerate(kinds)
        ]
        strand.env[out] = tuple(registers) if outputs > 1 else registers[0]

    return load


def _store(
    program: Program, op: ir.Operation, form: Form, names: tuple[str, ...], place: str
) -> Step:
    inputs = program.inputs(op)
    target, sources = inputs[_number(place)], [inputs[_number(x)] for x in names]

    def store(strand: Any) -> None:
        memory = of(strand)
        held = [strand.per_lane(values.forced(strand.env[i])) for i in sources]
        words = np.stack([np.ascontiguousarray(x).view(np.uint32) for x in held], 1)
        for row, threads, (lane, columns) in _rows(strand, strand.env[target], form):
            agent, pending = store_agent(strand.cta, row), _pending(strand, row, "st")
            before = _in_warp(strand, row)
            own = words[threads]
            # What `.unpack` leaves in the upper halves is not specified.
            halves = [own & 0xFFFF | 0xA5A50000, own >> 16 | 0xA5A50000]
            parts = halves if form.packed else [own]
            for cells, data in zip(_cells(form, lane, columns), parts, strict=True):
                memory.begin(
                    row, agent, cells, writes=True, what="tcgen05.st", after=before
                )
                pending.cells.append(cells)
                pending.data.append(data)

    return store
