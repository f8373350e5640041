# SPDX-License-Identifier: Apache-2.0
"""tcgen05.mma and tcgen05.commit: products of one thread, in flight until a commit.

From the PTX ISA, "TensorCore 5th Generation Family Instructions": instruction and
shared memory descriptors, layouts of D and of A in TMEM, ordering. Products of one CTA
or of a pair.
"""

from __future__ import annotations

import collections
import functools
import re
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.errors import PtxError
from pallas_gpu.lockstep import accesses, values
from pallas_gpu.lockstep.assembly import Statement, parse
from pallas_gpu.lockstep.not_modelled import NotModelled
from pallas_gpu.lockstep.program import Program, Step, runs
from pallas_gpu.lockstep.registers import assembles
from pallas_gpu.lockstep.sync import mbarrier
from pallas_gpu.lockstep.tensor_cores import (
    descriptors,
    matrices,
    tensor_copies,
    tmem,
)
from pallas_gpu.lockstep.tensor_cores.descriptors import Instruction, smem_places
from pallas_gpu.lockstep.tensor_cores.sparse_rows import SparseRows
from pallas_gpu.lockstep.tensor_cores.tensor_copies import (
    Copy,
    Scales,
    in_common,
    keys,
)

# --- products in flight ---------------------------------------------------------------


class Thread:
    """The tcgen05 work of one thread: it completes in order.

    Attributes:
      agent: its number in the clocks; its epoch is a number of commits.
    """

    def __init__(self, cta: Any, number: int) -> None:
        self.agent = cta.clocks.agent(("tcgen05", cta.name, number))
        self.cta = cta
        self.commits = 0
        self.queue: collections.deque[tuple[int, Product | Copy]] = collections.deque()

    def complete(self, upto: int) -> None:
        """Performs the work before a commit."""
        while self.queue and self.queue[0][0] <= upto:
            epoch, work = self.queue.popleft()
            work.complete(self.agent, epoch)


class Part:
    """The operands of a tcgen05.mma in one CTA.

    Attributes:
      d: [m, n] lanes and columns.
      a_cells: likewise, of packed words; None if `a` is in SMEM.
      a, b: [rows, k, bytes] in SMEM.
    """

    def __init__(
        self, cta: Any, spec: Instruction, d: int, a: int | tuple[int], b: int
    ) -> None:
        self.smem, self.tmem = cta.smem, tmem.of_cta(cta)
        self.d = _accumulator_cells(spec, d)
        self.a_cells: tuple[np.ndarray, np.ndarray] | None = None
        if isinstance(a, tuple):
            self.a_cells = _operand_cells(spec, a[0])
        else:
            self.a, self._bytes_of_a = _operand_places(spec, a, 0)
        self.b, self._bytes_of_b = _operand_places(spec, b, 1)

    def begin(self, row: int, agent: int, *, pipelined: bool, copied: bool) -> None:
        """The instruction, which a warp issues, accesses them until `end`.

        Args:
          pipelined: whether what it writes is in order.
          copied: whether only copies in flight write A in TMEM: they are in order.
        """
        what, rows = "tcgen05.mma", np.array([row])
        if self.a_cells is None:
            self.smem.begin_read(rows, self._bytes_of_a, what)
        else:
            self.tmem.begin(
                row, agent, self.a_cells, writes=False, what=what, pipelined=copied
            )
        self.smem.begin_read(rows, self._bytes_of_b, what)
        self.tmem.begin(row, agent, self.d, writes=True, what=what, pipelined=pipelined)

    def left(self, spec: Instruction) -> np.ndarray:
        """Its rows of A."""
        if self.a_cells is None:
            return descriptors.elements(self.smem.data[self.a], spec.a)
        held = np.ascontiguousarray(self.tmem.data[self.a_cells])
        if spec.a == descriptors.E2M1:
            return descriptors.elements(held.view(np.uint8)[..., None], spec.a)
        return held.view(spec.a)

    def right(self, spec: Instruction) -> np.ndarray:
        """Its rows of B, which are columns of the product."""
        return descriptors.elements(self.smem.data[self.b], spec.b)

    def end(self, agent: int, epoch: int) -> None:
        """The accesses are complete."""
        if self.a_cells is None:
            self.smem.end_read(self._bytes_of_a, agent, epoch)
        else:
            self.tmem.end(agent, epoch, self.a_cells, writes=False)
        self.smem.end_read(self._bytes_of_b, agent, epoch)
        self.tmem.end(agent, epoch, self.d, writes=True)


class Product:
    """One tcgen05.mma: descriptors and addresses are the same in each of its CTAs."""

    def __init__(
        self,
        strand: Any,
        row: int,
        thread: Thread,
        spec: Instruction,
        d: int,
        a: int | tuple[int],
        b: int,
        accumulate: bool,
        scales: tuple[int, ...],
        metadata: int | None,
    ) -> None:
        self._spec, self._accumulate = spec, accumulate
        tmem.of(strand).belong(spec.ctas, "tcgen05.mma")
        ctas = _running(strand.cta, spec.ctas, "tcgen05.mma")
        self._parts = [Part(cta, spec, d, a, b) for cta in ctas]
        # And the metadata of its rows, at the same address.
        self._sparse: list[SparseRows | None] = [None for _ in ctas]
        if metadata is not None and spec.selector is not None:
            chosen = spec.kind, spec.m // len(ctas), spec.selector, metadata, d
            self._sparse = [SparseRows(x, row, thread.agent, *chosen) for x in ctas]
        # Each CTA has the scales of its rows of A, and of all of B.
        self._scales: list[list[Scales]] = [[] for _ in ctas]
        if spec.scaling is not None:
            sizes = spec.m // spec.ctas, spec.n
            # Of b they may be in two halves.
            halved = spec.m == 128 and spec.ctas == 2
            operands = list(zip((0, 1), sizes, scales, (False, halved), strict=True))
            scaling = spec.scaling
            self._scales = [
                [Scales(cta, row, thread.agent, scaling, *x) for x in operands]
                for cta in ctas
            ]
        pipelined = self._follows_same(thread)
        for part in self._parts:
            cells = part.a_cells
            copied = cells is None or not tensor_copies.follows_product(thread, cells)
            part.begin(row, thread.agent, pipelined=pipelined, copied=copied)

    @property
    def d(self) -> tuple[np.ndarray, np.ndarray]:
        """Lanes and columns of D, the same in each CTA."""
        return self._parts[0].d

    def _follows_same(self, thread: Thread) -> bool:
        """Whether products in flight that share cells of D have the same D.

        PTX ISA, "Pipelined instructions": the same accumulator and shape.
        """
        for _, other in thread.queue:
            if self.d is other.d:
                continue
            ours, theirs = keys(self.d), keys(other.d)
            if not np.array_equal(ours, theirs) and in_common(ours, theirs):
                return False
        return True

    def complete(self, agent: int, epoch: int) -> None:
        """Multiplies what the operands hold now."""
        spec = self._spec
        wide = np.int64 if spec.kind == "i8" else np.float64

        def scaled(x: np.ndarray, scales: Scales) -> np.ndarray:
            held = scales.complete(agent, epoch)
            return x * np.repeat(held, spec.k // held.shape[1], axis=1)

        rights = np.concatenate([part.right(spec) for part in self._parts])
        right = matrices.exact(rights, spec.kind).astype(wide)
        each = zip(self._parts, self._scales, self._sparse, strict=True)
        for part, scales, sparse in each:
            a, b = matrices.exact(part.left(spec), spec.kind).astype(wide), right
            if sparse is not None:
                a = sparse.complete(agent, epoch, a)
            if scales:
                a, b = scaled(a, scales[0]), scaled(b, scales[1])
            total = a @ b.T
            cells = part.tmem.data[part.d]
            if self._accumulate:
                total = total + _numbers(cells, spec.d).astype(wide)
            part.tmem.data[part.d] = _words(total, spec.d)
            part.end(agent, epoch)


def _running(cta: Any, group: int, what: str) -> list[Any]:
    """The blocks of a cta_group, which have to run."""
    ctas = tmem.ctas_of(cta, group, what)
    for one in ctas:
        if not one.running:
            raise PtxError(f"{what}: {one.name} of the pair does not run")
    return ctas


# Loops issue the same few instructions again and again.
_PLACES = 64


@functools.lru_cache(maxsize=_PLACES)
def _operand_places(
    spec: Instruction, word: int, side: int
) -> tuple[np.ndarray, np.ndarray]:
    """[rows, k, bytes] of a CTA's a or b in SMEM, and each byte once.

    Of 4-bit elements two are a byte.
    """
    rows, dtype = ((spec.m, spec.a), (spec.n, spec.b))[side]
    rows //= spec.ctas
    k = (spec.a_k, spec.k)[side] * descriptors.bits(dtype) // (8 * dtype.itemsize)
    places = smem_places(word, rows, k, dtype.itemsize, spec.transposed[side])
    return places, np.unique(places)


def _numbers(words: np.ndarray, kind: np.dtype) -> np.ndarray:
    words = np.ascontiguousarray(words)
    if kind.itemsize == 2:
        return (words & 0xFFFF).astype(np.uint16).view(kind)
    return words.view(kind)


def _words(numbers: np.ndarray, kind: np.dtype) -> np.ndarray:
    """Cells of D; a 16-bit one is in the low half, the other half holds anything."""
    with np.errstate(all="ignore"):
        held = np.ascontiguousarray(numbers.astype(kind))
    if kind.itemsize == 2:
        return held.view(np.uint16).astype(np.uint32) | np.uint32(0xA5A50000)
    return held.view(np.uint32)


@functools.lru_cache(maxsize=_PLACES)
def _accumulator_cells(spec: Instruction, address: int) -> Any:
    """[m, n] lanes and columns of D in one CTA.

    Layout D of M = 128, F of M = 64; of a pair A of M = 256, B of M = 128.
    """
    base, column = address >> 16, address & 0xFFFF
    rows = spec.m // spec.ctas
    m, n = np.arange(rows)[:, None], np.arange(spec.n)[None]
    if base and (rows == 128 or spec.ctas == 2):
        raise PtxError(f"an accumulator of {rows} rows from lane {base} on")
    if rows == 128:
        lane = m
    elif spec.ctas == 2:
        half = spec.n // 2
        lane, n = m + 64 * (n // half), n % half
    else:
        if base not in (0, 16):
            raise PtxError(f"an accumulator of 64 rows from lane {base} on")
        lane = base + 32 * (m // 16) + m % 16
    return np.broadcast_arrays(lane + 0 * n, column + n)


def _operand_cells(spec: Instruction, address: int) -> Any:
    """[m, 8] lanes and columns of A in one CTA's TMEM, which is packed."""
    base, column = address >> 16, address & 0xFFFF
    rows = spec.m // spec.ctas
    if base or rows != 128:
        raise NotModelled("A in TMEM of 64 rows")
    m, word = np.arange(rows)[:, None], np.arange(descriptors.K_BYTES // 4)[None]
    return np.broadcast_arrays(m + 0 * word, column + word)


class _Commit:
    """An arrival on mbarriers when the thread's earlier work is complete.

    That comes after all asynchronous work that had completed before, as far as the
    thread knew; what threads have stored it does not release.
    """

    def __init__(self, thread: Thread, barriers: list[Any], row: int) -> None:
        thread.commits += 1
        self._thread, self._upto, self._barriers = thread, thread.commits, barriers
        self._known = thread.cta.clocks.of_agents(row)

    def complete(self) -> None:
        self._thread.complete(self._upto)
        clocks = self._thread.cta.clocks
        clock = np.zeros(clocks.known.shape[1], np.int32)
        clock[: len(self._known)] = self._known
        clock[self._thread.agent] = self._upto
        for barrier in self._barriers:
            barrier.arrive(1, clock)


def _thread(strand: Any, what: str) -> tuple[int, int, Thread]:
    """The lane of the one active thread, its row, and its work."""
    active = np.flatnonzero(strand.active())
    if len(active) != 1:
        raise PtxError(f"{what} is executed by {len(active)} threads")
    lane = int(active[0])
    number = int(strand.threads[lane])
    known = strand.cta.tensor_threads
    if number not in known:
        known[number] = Thread(strand.cta, number)
    return lane, int(strand.row_of_lane[lane]), known[number]


@runs("nvvm.tcgen05.commit")
def _commit(program: Program, op: ir.Operation) -> Step:
    address, *masks = program.inputs(op)
    group = tmem.group_of(op)

    def commit(strand: Any) -> None:
        lane, row, thread = _thread(strand, "tcgen05.commit")
        place = int(strand.per_lane(strand.env[address])[lane])
        cta, offset = accesses.cluster_address(strand, place)
        tmem.of(strand).belong(group, "tcgen05.commit")
        _running(strand.cta, group, "tcgen05.commit")
        reached = [cta]
        if masks:
            # The same offset in each CTA whose bit is set.
            mask = int(strand.per_lane(values.forced(strand.env[masks[0]]))[lane])
            every = strand.cta.cluster.ctas
            if mask & 0xFFFF >> len(every) << len(every):
                raise PtxError(f"tcgen05.commit to no CTA of the cluster: {mask:#x}")
            reached = [one for one in every if mask >> one.rank & 1]
        barriers = [mbarrier.find(one, offset) for one in reached]
        for one in barriers:
            one.check_known(row, "tcgen05.commit")
        launch = strand.cta.cluster.launch
        launch.scheduler.in_flight.append(_Commit(thread, barriers, row))

    return commit


def finish(cta: Any) -> None:
    """A block ends: all its products have been committed and completed."""
    if any(thread.queue for thread in cta.tensor_threads.values()):
        raise PtxError(f"{cta.name} ends without waiting for its tcgen05.mma")


# --- text -----------------------------------------------------------------------------

_MMA = re.compile(
    r"tcgen05\.mma(\.sp)?\.cta_group::([12])\.kind::(\w+)"
    r"(?:\.block_scale\.scale_vec::(\d)X)?"
)


@assembles("tcgen05.")
def _text(program: Program, op: ir.Operation, text: str) -> Step:
    if text.startswith(("tcgen05.ld", "tcgen05.st")):
        return tmem.transfer(program, op, text)
    inputs = program.inputs(op)
    statements = parse(text)
    for s in statements:
        if s.guard:
            raise NotModelled(f"a guarded {s.opcode}")

    def run(strand: Any) -> None:
        lane, row, thread = _thread(strand, "tcgen05.mma, tcgen05.cp")
        registers = {
            f"${i}": int(strand.per_lane(values.forced(strand.env[slot]))[lane])
            for i, slot in enumerate(inputs)
        }
        for statement in statements:
            _execute(strand, row, thread, statement, registers)

    return run


def _value(registers: dict[str, int], name: str) -> int:
    return registers[name] if name in registers else int(name)


def _execute(
    strand: Any, row: int, thread: Thread, s: Statement, registers: dict[str, int]
) -> None:
    match = _MMA.fullmatch(s.opcode)
    if match is not None:
        d, a, b, *metadata, idesc, enable = map(str, s.operands)
        scales: list[str] = []
        if match[4]:
            d, a, b, *metadata, idesc, sa, sb, enable = map(str, s.operands)
            scales = [sa, sb]
        vector = int(match[4]) if match[4] else None
        sparse, ctas = match[1] is not None, int(match[2])
        spec = Instruction.decode(
            registers[idesc], match[3], vector, ctas, sparse=sparse
        )
        if len(metadata) != sparse:
            raise PtxError(f"{s.opcode} with {len(metadata)} addresses of metadata")
        if len(scales) != (2 if spec.scaling else 0):
            raise PtxError(f"{s.opcode} with {len(scales)} addresses of scales")
        in_tmem = a.startswith("[")
        left = _value(registers, a.strip("[]"))
        product = Product(
            strand,
            row,
            thread,
            spec,
            _value(registers, d.strip("[]")),
            (left,) if in_tmem else left,
            registers[b],
            bool(registers[enable]),
            tuple(_value(registers, x.strip("[]")) for x in scales),
            _value(registers, metadata[0].strip("[]")) if sparse else None,
        )
        thread.queue.append((thread.commits + 1, product))
        return
    match = tensor_copies.COPY.fullmatch(s.opcode)
    if match is not None:
        to, source = (_value(registers, str(x).strip("[]")) for x in s.operands)
        size = tensor_copies.size_of(match[2])
        places, group = smem_places(source, *size, 1, False), int(match[1])
        tmem.of(strand).belong(group, "tcgen05.cp")
        for cta in _running(strand.cta, group, "tcgen05.cp"):
            copy = Copy(cta, row, thread, match[2], to, places)
            thread.queue.append((thread.commits + 1, copy))
        return
    target, x, y = (str(o) for o in s.operands)
    left, right = _value(registers, x), _value(registers, y)
    match s.opcode:
        case "add.u32" | "add.u64":
            width = int(s.opcode[-2:])
            registers[target] = (left + right) & (1 << width) - 1
        case "setp.ne.b32":
            registers[target] = int(left != right)
        case "setp.eq.b32":
            registers[target] = int(left == right)
        case _:
            raise NotModelled(f"{s.opcode} in inline assembly")
