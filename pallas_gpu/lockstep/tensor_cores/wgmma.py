# SPDX-License-Identifier: Apache-2.0
"""wgmma: products of a warpgroup, in flight until they are waited for.

From the PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions". Each warp has 16
of the 64 rows of A and D, so a strand computes those of its warps.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.errors import PtxError
from pallas_gpu.lockstep import values
from pallas_gpu.lockstep.assembly import Statement, parse
from pallas_gpu.lockstep.engine import Groups, RaceError
from pallas_gpu.lockstep.not_modelled import NotModelled
from pallas_gpu.lockstep.program import Program, Step, runs
from pallas_gpu.lockstep.registers import assembles
from pallas_gpu.lockstep.tensor_cores import matrices

_GROUP_WARPS = 4
# (kinds of A and B) -> K of an instruction, kinds of D.
_SHAPES: tuple[tuple[set[str], int, set[str]], ...] = (
    ({"f16"}, 16, {"f16", "f32"}),
    ({"bf16"}, 16, {"f32"}),
    ({"tf32"}, 8, {"f32"}),
    ({"e4m3", "e5m2"}, 32, {"f16", "f32"}),
    ({"s8", "u8"}, 32, {"s32"}),
)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One wgmma.mma_async.

    Attributes:
      n, k: of the shape m64nNkK.
      d, a, b: element types in PTX.
      signs: of A and B.
      transposed: A, B lie with M or N innermost.
    """

    n: int
    k: int
    d: str
    a: str
    b: str
    signs: tuple[int, int] = (1, 1)
    transposed: tuple[bool, bool] = (False, False)

    def __post_init__(self) -> None:
        integer = self.d == "s32"
        fine = 8 <= self.n <= 256 and self.n % 8 == 0
        fine &= not integer or self.n in (8, 16, 24) or self.n % 16 == 0
        fine &= any(
            {self.a, self.b} <= kinds and self.k == k and self.d in results
            for kinds, k, results in _SHAPES
        )
        fine &= not any(self.transposed) or self.a in ("f16", "bf16")
        if not fine:
            raise PtxError(f"no wgmma instruction is {self}")


# --- products in flight ---------------------------------------------------------------


class _SmemOperand:
    """A matrix in SMEM: read when the product completes."""

    def __init__(self, strand: Any, word: int, rows, k, kind: str, transposed: bool):
        self._kind = matrices.DTYPES[kind]
        self._smem = strand.cta.smem
        size = self._kind.itemsize
        self._places, self._flat = matrices.smem_places(rows, k, size, word, transposed)
        self._smem.begin_read(strand.rows, self._flat, "wgmma")

    def read(self, agent: int, epoch: int) -> np.ndarray:
        data = self._smem.data[self._places].view(self._kind)[..., 0]
        self._smem.end_read(self._flat, agent, epoch)
        return data


def _pieces(strand: Any, registers: list[Any], kind: np.dtype) -> np.ndarray:
    """[lanes, elements] of registers of 32 bits."""
    words = [strand.per_lane(values.forced(x)) for x in registers]
    return np.ascontiguousarray(np.stack(words, axis=1)).view(kind)


class Product:
    """One instruction of a strand; its registers are written when it completes."""

    def __init__(self, strand: Any, spec: Instruction, d: list[Any], a: Any, b: int):
        self._strand = strand
        self._spec = spec
        self._d = d  # registers, or the product that writes them all
        self.matrix: np.ndarray | None = None
        warps = len(strand.warps)
        first = matrices.WARP_ROWS * (strand.warps[0] % _GROUP_WARPS)
        rows = first, first + matrices.WARP_ROWS * warps
        self._a: Any = a
        if isinstance(a, int):
            self._a = _SmemOperand(strand, a, rows, spec.k, spec.a, spec.transposed[0])
        self._b = _SmemOperand(
            strand, b, (0, spec.n), spec.k, spec.b, spec.transposed[1]
        )

    def complete(self, agent: int, epoch: int) -> None:
        """Multiplies what the operands hold now."""
        spec = self._spec
        if isinstance(self._a, _SmemOperand):
            a = self._a.read(agent, epoch)
        else:
            kind, warps = matrices.DTYPES[spec.a], len(self._strand.warps)
            row, column = matrices.a_places(warps, spec.k)
            a = np.empty((matrices.WARP_ROWS * warps, spec.k), kind)
            a[row, column] = _pieces(self._strand, self._a, kind)
        b = self._b.read(agent, epoch)
        wide = np.int64 if spec.d == "s32" else np.float64
        a, b = (
            matrices.exact(x, kind).astype(wide)
            for x, kind in ((a, spec.a), (b, spec.b))
        )
        with np.errstate(all="ignore"):
            a, b = a * spec.signs[0], b * spec.signs[1]
            old = np.asarray(self._old() if self._d else 0, wide)
            if spec.a in ("e4m3", "e5m2"):
                total = _float8_sum(a, b, old)
            else:
                total = a @ b.T + old
            self.matrix = total.astype(matrices.DTYPES[spec.d])
        self._d = []

    def _old(self) -> np.ndarray:
        first = self._d[0]
        if isinstance(first, _Register) and first.product.registers_are(self._d):
            assert first.product.matrix is not None
            return first.product.matrix
        warps, kind = len(self._strand.warps), matrices.DTYPES[self._spec.d]
        matrix = np.empty((matrices.WARP_ROWS * warps, self._spec.n), kind)
        matrix[matrices.d_places(warps, self._spec.n)] = _pieces(
            self._strand, self._d, kind
        )
        return matrix

    def registers_are(self, registers: list[Any]) -> bool:
        """True when the registers are all of this product's, in order."""
        return len(registers) == self.count and all(
            isinstance(x, _Register) and x.product is self and x.index == i
            for i, x in enumerate(registers)
        )

    @property
    def count(self) -> int:
        """Registers of D."""
        return self._spec.n // (4 if self._spec.d == "f16" else 2)

    def register(self, index: int) -> np.ndarray:
        """[lanes]: one register of D."""
        if self.matrix is None:
            raise RaceError(
                "a register of an accumulator is used before wgmma.wait_group has "
                "waited for its group"
            )
        row, column = matrices.d_places(len(self._strand.warps), self._spec.n)
        if self._spec.d != "f16":
            return self.matrix[row[:, index], column[:, index]]
        pair = slice(2 * index, 2 * index + 2)
        halves = np.ascontiguousarray(self.matrix[row[:, pair], column[:, pair]])
        return halves.view(np.uint32)[:, 0]


# DeepSeek-V3 technical report (arXiv 2412.19437), 3.5.2: the terms of an instruction
# are aligned to the largest one, and bits below 2**-13 of it are cut.
_FLOAT8_KEPT_BITS = 13


def _float8_sum(a: np.ndarray, b: np.ndarray, old: np.ndarray) -> np.ndarray:
    """`a @ b.T + old` with the precision that float8 products are summed with."""
    terms = a[:, None, :] * b[None, :, :]
    start = np.broadcast_to(old, terms.shape[:2])[..., None]
    terms = np.concatenate([terms, start], axis=2)
    _, exponent = np.frexp(np.abs(terms).max(axis=2, keepdims=True))
    unit = np.ldexp(1.0, exponent - 1 - _FLOAT8_KEPT_BITS)
    total = (np.trunc(terms / unit) * unit).sum(axis=2)
    return np.where(np.isfinite(total), total, terms.sum(axis=2))


class _Register(values.Lazy):
    """A register of D that a product writes."""

    def __init__(self, product: Product, index: int, kind: np.dtype) -> None:
        super().__init__(lambda: product.register(index).view(kind))
        self.product = product
        self.index = index


class ProductGroups(Groups[Product]):
    """The wgmma groups of a strand."""

    fenced = False
    completed = 0

    def wait(self, strand: Any, pending: int) -> None:
        """Completes all groups but the newest ones."""
        self.fenced = False
        clocks = strand.cta.clocks
        agent = clocks.agent(("wgmma", strand.cta.name, strand.warps))
        for group in self.take(pending):
            self.completed += 1
            for product in group:
                product.complete(agent, self.completed)
        clocks.learn(strand.rows, agent, self.completed)


def groups_of(strand: Any) -> ProductGroups:
    """The groups of a strand."""
    if strand.wgmma is None:
        strand.wgmma = ProductGroups()
    return strand.wgmma


@runs("nvvm.wgmma.fence.aligned")
def _fence_alone(program: Program, op: ir.Operation) -> Step:
    return lambda strand: _fence(strand, {})


@runs("nvvm.wgmma.commit.group.sync.aligned")
def _commit_alone(program: Program, op: ir.Operation) -> Step:
    return lambda strand: _commit(strand, {})


@runs("nvvm.wgmma.wait.group.sync.aligned")
def _wait_group(program: Program, op: ir.Operation) -> Step:
    pending = ir.IntegerAttr(op.attributes["group"]).value

    def wait(strand: Any) -> None:
        _aligned(strand, "wgmma.wait_group")
        groups_of(strand).wait(strand, pending)

    return wait


def _aligned(strand: Any, what: str) -> None:
    if strand.mask is not None and not strand.mask.all():
        raise PtxError(f"{what} is executed by some threads of the warpgroup only")


# --- text -----------------------------------------------------------------------------

_MMA = re.compile(
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.(\w+)\.(\w+)\.(\w+)"
)
_Run = Callable[[Any, dict[str, Any]], None]  # of the strand and the registers


@assembles("wgmma.")
def _text(program: Program, op: ir.Operation, text: str) -> Step:
    """The step of a text with wgmma in it, statement by statement."""
    constraints = ir.StringAttr(op.attributes["constraints"]).value.split(",")
    outputs = sum(c.startswith("=") for c in constraints)
    given = [c for c in constraints if not c.startswith(("=", "~"))]
    inputs = program.inputs(op)
    (out,) = program.outputs(op)
    kinds = values.result_kinds(op.results[0].type)
    # Vectors of one element are registers, too, and constants numbers of the text.
    of_one = [values.length(x.type) == 1 for x in op.operands]
    wraps = "vector<1x" in str(op.results[0].type)
    numbers = {
        f"${outputs + i}": str(program.constants[slot][0])
        for i, (constraint, slot) in enumerate(zip(given, inputs, strict=True))
        if constraint == "n"
    }
    steps = [_statement(_with_numbers(s, numbers), kinds) for s in parse(text)]

    def run(strand: Any) -> None:
        registers: dict[str, Any] = {}
        for i, (constraint, slot) in enumerate(zip(given, inputs, strict=True)):
            value = strand.env[slot]
            if of_one[i]:
                lazy = isinstance(value, values.LazyVector)
                value = value.elements[0] if lazy else values.forced(value)[:, 0]
            registers[f"${outputs + i}"] = value
            if constraint.isdigit():
                registers[f"${constraint}"] = value
        for step in steps:
            step(strand, registers)
        results = tuple(registers[f"${i}"] for i in range(outputs))
        if wraps:
            results = tuple(values.LazyVector([x]) for x in results)
        strand.env[out] = results if outputs > 1 else results[0]

    return run


def _with_numbers(s: Statement, numbers: dict[str, str]) -> Statement:
    given = tuple(numbers.get(x, x) if isinstance(x, str) else x for x in s.operands)
    return dataclasses.replace(s, operands=given)


def _statement(s: Statement, kinds: list[np.dtype]) -> _Run:
    if s.guard:
        raise NotModelled(f"a guarded {s.opcode}")
    match = _MMA.fullmatch(s.opcode)
    if match is not None:
        return _mma(s, match, kinds)
    match s.opcode, s.operands:
        case "wgmma.fence.sync.aligned", ():
            return _fence
        case "wgmma.commit_group.sync.aligned", ():
            return _commit
        case "setp.eq.b32" | "setp.ne.b32", (str() as target, str() as a, str() as b):
            truth = (int(a) == int(b)) == (s.opcode == "setp.eq.b32")
            return lambda strand, r: r.__setitem__(target, truth)
        case "add.s64", (str() as target, str() as a, str() as b):
            number = int(b)

            def add(strand: Any, r: dict[str, Any]) -> None:
                r[target] = values.forced(r[a]) + np.uint64(number)

            return add
    raise NotModelled(f"{s.opcode} in inline assembly")


def _fence(strand: Any, registers: dict[str, Any]) -> None:
    _aligned(strand, "wgmma.fence")
    groups_of(strand).fenced = True


def _commit(strand: Any, registers: dict[str, Any]) -> None:
    _aligned(strand, "wgmma.commit_group")
    groups_of(strand).commit()


def _mma(s: Statement, match: re.Match[str], kinds: list[np.dtype]) -> _Run:
    d, a, b, scale, *numbers = s.operands
    assert isinstance(d, tuple) and isinstance(b, str) and isinstance(scale, str)
    immediates = [int(str(x)) for x in numbers]
    signs = (immediates[0], immediates[1]) if immediates else (1, 1)
    bits = [bool(x) for x in immediates[2:]]
    if isinstance(a, tuple):  # a register operand has no transposition
        bits = [False, *bits]
    transposed = (bits[0], bits[1]) if len(bits) == 2 else (False, False)
    n, k, of_d, of_a, of_b = match.groups()
    spec = Instruction(int(n), int(k), of_d, of_a, of_b, signs, transposed)
    per_register = 4 if spec.d == "f16" else 2
    if len(d) * per_register != spec.n or (isinstance(a, tuple) and len(a) != 4):
        raise PtxError(f"{s.opcode} with {len(d)} registers of D")

    def run(strand: Any, registers: dict[str, Any]) -> None:
        _aligned(strand, "wgmma.mma_async")
        groups = groups_of(strand)
        if not groups.fenced:
            raise PtxError("wgmma.mma_async without wgmma.fence before it")
        old = [registers[name] for name in d] if registers[scale] else []
        if isinstance(a, tuple):
            left: Any = [registers[name] for name in a]
        else:
            left = strand.uniform(registers[a])
        product = Product(strand, spec, old, left, strand.uniform(registers[b]))
        groups.open.append(product)
        for i, name in enumerate(d):
            registers[name] = _Register(product, i, kinds[int(name[1:])])

    return run
