# SPDX-License-Identifier: Apache-2.0
"""tcgen05.mma and tcgen05.commit: products of one thread, in flight until a commit.

From the PTX ISA, "TensorCore 5th Generation Family Instructions": instruction and
shared memory descriptors, layouts of D and of A in TMEM, ordering. Products of one CTA;
sparsity and pairs of CTAs are fields of `Instruction` that it refuses.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from typing import Any

import ml_dtypes
import numpy as np
from jaxlib.mlir import ir

from tests.support.lockstep import accesses, mbarrier, tensor_copies, tmem, values
from tests.support.lockstep.assembly import Statement, parse
from tests.support.lockstep.engine import KernelError
from tests.support.lockstep.not_modelled import NotModelled
from tests.support.lockstep.program import Program, Step, runs
from tests.support.lockstep.registers import ASSEMBLY, AssemblyUnit
from tests.support.lockstep.tensor_copies import Copy, Scales, Scaling, keys
from tests.support.lockstep.tensor_map import swizzled

_K_BYTES = 32
_E2M1 = np.dtype(ml_dtypes.float4_e2m1fn)
_F32, _F16 = np.dtype(np.float32), np.dtype(np.float16)
# kind -> element types by their code in the descriptor; accumulators by theirs.
_OPERANDS: dict[str, dict[int, np.dtype]] = {
    "f16": {0: _F16, 1: np.dtype(ml_dtypes.bfloat16)},
    "tf32": {2: _F32},
    "f8f6f4": {
        0: np.dtype(ml_dtypes.float8_e4m3fn),
        1: np.dtype(ml_dtypes.float8_e5m2),
    },
    "i8": {0: np.dtype(np.uint8), 1: np.dtype(np.int8)},
    "mxf4": {1: _E2M1},
    "mxf4nvf4": {1: _E2M1},
}
_OPERANDS["mxf8f6f4"] = _OPERANDS["f8f6f4"]
_ACCUMULATORS: dict[str, dict[int, np.dtype]] = {
    "f16": {0: _F16, 1: _F32},
    "tf32": {1: _F32},
    "f8f6f4": {0: _F16, 1: _F32},
    "i8": {2: np.dtype(np.int32)},
    **{kind: {1: _F32} for kind in tensor_copies.SCALED},
}


# --- descriptors ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Instruction:
    """What an instruction descriptor says (PTX ISA, "Instruction descriptor")."""

    kind: str
    m: int
    n: int
    d: np.dtype
    a: np.dtype
    b: np.dtype
    transposed: tuple[bool, bool]
    scaling: Scaling | None

    @classmethod
    def decode(cls, word: int, kind: str, vector: int | None) -> Instruction:
        """From its 32 bits, for a kind and its `.scale_vec`."""
        scaling = None
        if kind in tensor_copies.SCALED:
            scaling = Scaling.decode(word, kind, vector or 0)
            word = Scaling.plain(word)
        if word & 0b100 or word & 0b11:
            raise NotModelled("tcgen05.mma of a sparse operand")
        if word >> 3 & 1 or word >> 13 & 3:
            raise NotModelled("tcgen05.mma that saturates or negates")
        if word >> 6 & 1 or word >> 23 & 1 or word >> 29:
            raise KernelError(f"reserved bits of an instruction descriptor {word:#x}")
        codes = word >> 4 & 3, word >> 7 & 7, word >> 10 & 7
        tables = _ACCUMULATORS[kind], _OPERANDS[kind], _OPERANDS[kind]
        types = [t.get(code) for t, code in zip(tables, codes, strict=True)]
        if None in types:
            raise KernelError(f"kind::{kind} has no types of the codes {codes}")
        d, a, b = types
        if d == _F16 and kind == "f16" and {a, b} != {_F16}:
            raise KernelError("a float16 accumulator of operands that are not float16")
        n, m = (word >> 17 & 63) << 3, (word >> 24 & 31) << 4
        transposed = bool(word >> 15 & 1), bool(word >> 16 & 1)
        made = cls(kind, m, n, d, a, b, transposed, scaling)  # type: ignore[arg-type]
        made._check()
        return made

    def _check(self) -> None:
        integer = self.kind == "i8"
        fine = self.m in (64, 128) and 8 <= self.n <= 256 and self.n % 8 == 0
        fine &= not integer or self.n in (8, 16, 24, 32) or self.n % 16 == 0
        fine &= not any(self.transposed) or self.kind != "tf32"
        fine &= not self.transposed[1] or self.b.itemsize > 1 or self.n % 16 == 0
        fine &= self.scaling is None or self.m == 128
        fine &= not any(self.transposed) or _E2M1 not in (self.a, self.b)
        if not fine:
            raise KernelError(f"no tcgen05.mma is {self}")

    @property
    def k(self) -> int:
        """K of the instruction."""
        return _K_BYTES * 8 // _bits(self.a)


def _bits(dtype: np.dtype) -> int:
    return 4 if dtype == _E2M1 else dtype.itemsize * 8


def _elements(held: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """[rows, k] elements of [rows, k, bytes]; of 4-bit ones the low half is first."""
    if dtype != _E2M1:
        return held.view(dtype)[..., 0]
    halves = np.stack([held[..., 0] & 15, held[..., 0] >> 4], axis=-1)
    return halves.reshape(len(held), -1).view(dtype)


_SPANS = {0: 16, 2: 128, 4: 64, 6: 32}


def smem_places(
    word: int, rows: int, k: int, itemsize: int, transposed: bool
) -> np.ndarray:
    """[rows, k, bytes]: places in the dynamic SMEM that a descriptor describes.

    PTX ISA, "Shared memory descriptor" and "Canonical layouts".
    """
    if word >> 46 & 7 != 0b001:
        raise KernelError("bits 46-48 of a shared memory descriptor are not 0b001")
    if word >> 49 & 7 or word >> 52 & 0x1FF or word >> 14 & 3 or word >> 30 & 3:
        raise NotModelled(f"a shared memory descriptor {word:#x}")
    if word >> 61 not in _SPANS:
        raise KernelError(f"swizzle {word >> 61} of a shared memory descriptor")
    span = _SPANS[word >> 61]
    start, leading, stride = ((word >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    row, column = np.arange(rows)[:, None], np.arange(k)[None]
    if not transposed:
        byte = column * itemsize
        if span == 16:
            offset = row // 8 * stride + row % 8 * 16 + byte // 16 * leading + byte % 16
        else:
            offset = row // 8 * stride + row % 8 * span + byte
    else:
        byte = row * itemsize
        if span == 16:
            offset = byte // 16 * stride + byte % 16 + column % 8 * 16
            offset = offset + column // 8 * leading
        else:
            offset = byte // span * leading + byte % span + column % 8 * span
            offset = offset + column // 8 * stride
    address = swizzled(start + offset, span)
    return address[..., None] - accesses.SMEM_BASE + np.arange(itemsize)


# --- products in flight ---------------------------------------------------------------


class Thread:
    """The tcgen05 work of one thread: it completes in order.

    Attributes:
      agent: its number in the clocks; its epoch is a number of commits.
    """

    def __init__(self, cta: Any, number: int) -> None:
        self.agent = cta.clocks.agent(("tcgen05", cta.number, number))
        self.cta = cta
        self.commits = 0
        self.queue: collections.deque[tuple[int, Product | Copy]] = collections.deque()

    def complete(self, upto: int) -> None:
        """Performs the work before a commit."""
        while self.queue and self.queue[0][0] <= upto:
            epoch, work = self.queue.popleft()
            work.complete(self.agent, epoch)


class Product:
    """One tcgen05.mma."""

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
    ) -> None:
        self._spec, self._accumulate = spec, accumulate
        self._smem, self._tmem = strand.cta.smem, tmem.of(strand)
        rows = np.array([row])
        self.d = _accumulator_cells(spec, d)
        self._a_cells: tuple[np.ndarray, np.ndarray] | None = None
        if isinstance(a, tuple):
            self._a_cells = _operand_cells(spec, a[0])
            self._tmem.begin(
                row,
                thread.agent,
                self._a_cells,
                writes=False,
                what="tcgen05.mma",
            )
        else:
            self._a = _operand_places(spec, a, 0)
            self._smem.begin_read(rows, np.unique(self._a), "tcgen05.mma")
        self._b = _operand_places(spec, b, 1)
        self._smem.begin_read(rows, np.unique(self._b), "tcgen05.mma")
        self._scales = []
        if spec.scaling is not None:
            self._scales = [
                Scales(strand, row, thread.agent, spec.scaling, side, size, address)
                for side, size, address in zip(
                    (0, 1), (spec.m, spec.n), scales, strict=True
                )
            ]
        self._tmem.begin(
            row,
            thread.agent,
            self.d,
            writes=True,
            what="tcgen05.mma",
            pipelined=self._follows_same(thread),
        )

    def _follows_same(self, thread: Thread) -> bool:
        """Whether products in flight that share cells of D have the same D.

        PTX ISA, "Pipelined instructions": the same accumulator and shape.
        """
        for _, other in thread.queue:
            theirs = other.d
            shared = np.isin(keys(self.d), keys(theirs)).any()
            if shared and not np.array_equal(keys(self.d), keys(theirs)):
                return False
        return True

    def complete(self, agent: int, epoch: int) -> None:
        """Multiplies what the operands hold now."""
        spec = self._spec
        if self._a_cells is None:
            a = _elements(self._smem.data[self._a], spec.a)
            self._smem.end_read(np.unique(self._a), agent, epoch)
        else:
            words = np.ascontiguousarray(self._tmem.data[self._a_cells])
            a = words.view(spec.a)
            self._tmem.end(agent, epoch, self._a_cells, writes=False)
        b = _elements(self._smem.data[self._b], spec.b)
        self._smem.end_read(np.unique(self._b), agent, epoch)
        wide = np.int64 if spec.kind == "i8" else np.float64
        a, b = _exact(a, spec).astype(wide), _exact(b, spec).astype(wide)
        if self._scales:
            held = [scales.complete(agent, epoch) for scales in self._scales]
            a, b = (
                x * np.repeat(each, spec.k // each.shape[1], axis=1)
                for x, each in zip((a, b), held, strict=True)
            )
        total = a @ b.T
        cells = self._tmem.data[self.d]
        if self._accumulate:
            total = total + _numbers(cells, spec.d).astype(wide)
        self._tmem.data[self.d] = _words(total, spec.d)
        self._tmem.end(agent, epoch, self.d, writes=True)


def _operand_places(spec: Instruction, word: int, side: int) -> np.ndarray:
    """[rows, k, bytes] of a or b in SMEM; of 4-bit elements two are a byte."""
    rows, dtype = ((spec.m, spec.a), (spec.n, spec.b))[side]
    k = spec.k * _bits(dtype) // (8 * dtype.itemsize)
    return smem_places(word, rows, k, dtype.itemsize, spec.transposed[side])


def _exact(x: np.ndarray, spec: Instruction) -> np.ndarray:
    """What the tensor core reads: of tf32 the low 13 bits are cut."""
    if spec.kind != "tf32":
        return x
    cut = np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)
    return cut.view(np.float32)


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


def _accumulator_cells(spec: Instruction, address: int) -> Any:
    """[m, n] lanes and columns of D: layout D of M = 128, F of M = 64."""
    base, column = address >> 16, address & 0xFFFF
    m, n = np.arange(spec.m)[:, None], np.arange(spec.n)[None]
    if spec.m == 128:
        if base:
            raise KernelError(f"an accumulator of 128 rows from lane {base} on")
        lane = m
    else:
        if base not in (0, 16):
            raise KernelError(f"an accumulator of 64 rows from lane {base} on")
        lane = base + 32 * (m // 16) + m % 16
    return np.broadcast_arrays(lane + 0 * n, column + n)


def _operand_cells(spec: Instruction, address: int) -> Any:
    """[m, 8] lanes and columns of A in TMEM, which is packed."""
    base, column = address >> 16, address & 0xFFFF
    if base or spec.m != 128:
        raise NotModelled("A in TMEM of 64 rows")
    m, word = np.arange(spec.m)[:, None], np.arange(_K_BYTES // 4)[None]
    return np.broadcast_arrays(m + 0 * word, column + word)


class _Commit:
    """An arrival on an mbarrier when the thread's earlier work is complete.

    That comes after all asynchronous work that had completed before, as far as the
    thread knew; what threads have stored it does not release.
    """

    def __init__(self, thread: Thread, barrier: Any, row: int) -> None:
        thread.commits += 1
        self._thread, self._upto, self._barrier = thread, thread.commits, barrier
        self._known = thread.cta.clocks.of_agents(row)

    def complete(self) -> None:
        self._thread.complete(self._upto)
        clocks = self._thread.cta.clocks
        clock = np.zeros(clocks.known.shape[1], np.int32)
        clock[: len(self._known)] = self._known
        clock[self._thread.agent] = self._upto
        self._barrier.arrive(1, clock)


def _thread(strand: Any, what: str) -> tuple[int, int, Thread]:
    """The lane of the one active thread, its row, and its work."""
    active = np.flatnonzero(strand.active())
    if len(active) != 1:
        raise KernelError(f"{what} is executed by {len(active)} threads")
    lane = int(active[0])
    number = int(strand.threads[lane])
    known = strand.cta.tensor_threads
    if number not in known:
        known[number] = Thread(strand.cta, number)
    return lane, int(strand.row_of_lane[lane]), known[number]


@runs("nvvm.tcgen05.commit")
def _commit(program: Program, op: ir.Operation) -> Step:
    address, *mask = program.inputs(op)
    if mask or tmem.group_of(op) != 1:
        raise NotModelled("nvvm.tcgen05.commit of a pair of CTAs")

    def commit(strand: Any) -> None:
        lane, row, thread = _thread(strand, "tcgen05.commit")
        place = int(strand.per_lane(strand.env[address])[lane])
        cta, offset = accesses.cluster_address(strand, place)
        barrier = mbarrier.find(cta, offset)
        barrier.check_known(row, "tcgen05.commit")
        launch = strand.cta.cluster.launch
        launch.scheduler.in_flight.append(_Commit(thread, barrier, row))

    return commit


def finish(cta: Any) -> None:
    """A block ends: all its products have been committed and completed."""
    if any(thread.queue for thread in cta.tensor_threads.values()):
        raise KernelError(f"CTA {cta.number} ends without waiting for its tcgen05.mma")


# --- text -----------------------------------------------------------------------------

_MMA = re.compile(
    r"tcgen05\.mma\.cta_group::1\.kind::(\w+)(?:\.block_scale\.scale_vec::(\d)X)?"
)


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
        d, a, b, idesc, *scales, enable = map(str, s.operands)
        vector = int(match[2]) if match[2] else None
        spec = Instruction.decode(registers[idesc], match[1], vector)
        if len(scales) != (2 if spec.scaling else 0):
            raise KernelError(f"{s.opcode} with {len(scales)} addresses of scales")
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
        )
        thread.queue.append((thread.commits + 1, product))
        return
    match = tensor_copies.COPY.fullmatch(s.opcode)
    if match is not None:
        d, source = (_value(registers, str(x).strip("[]")) for x in s.operands)
        rows = tensor_copies.rows_of(match[1])
        places = smem_places(source, rows, tensor_copies.ROW_BYTES, 1, False)
        copy = Copy(strand, row, thread, match[1], d, places)
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


ASSEMBLY.append(AssemblyUnit("tcgen05.", _text))
