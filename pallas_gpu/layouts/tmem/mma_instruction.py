# SPDX-License-Identifier: Apache-2.0
"""The instruction descriptor of tcgen05.mma, its kinds and shapes, as integers.

PTX ISA, tcgen05 "Instruction descriptor" and "Matrix shapes". Instructions of the kinds
f16, tf32, f8f6f4 and i8.

Block scaling has descriptors of its own: `scaled_instruction`; the metadata of sparse
operands is in `sparsity`.

An instruction of a pair of CTAs (`ctas`) has the M and N of both together.
"""

from __future__ import annotations

import dataclasses
import enum

from pallas_gpu.errors import DTypeError, ShapeError

# One instruction reads 32 bytes of K from each row of a dense operand.
K_BYTES = 32
MAX_N = 256
# Rows of the accumulator in each CTA.
ROWS = (64, 128)
_N_STEP = 8
# The bit of a sparse left operand; the two below it are the selector.
_SPARSE = 2
# Integer kinds (PTX ISA, table of shapes): 8, 16, 24, 32, then multiples of 16.
_INTEGER_N_STEP, _INTEGER_FREE_N = 16, 32
# Those of a pair of CTAs.
_PAIR_N_STEP, _PAIR_INTEGER_N_STEP = 16, 32


class Kind(enum.Enum):
    """The `.kind` of an instruction: `kind::f16` and so on."""

    F16 = "f16"
    TF32 = "tf32"
    F8F6F4 = "f8f6f4"
    I8 = "i8"
    MXF8F6F4 = "mxf8f6f4"
    MXF4NVF4 = "mxf4nvf4"


# Element types by their names in PTX: the kind that reads them, and their code in bits
# 7-9 and 10-12.
_OPERANDS: dict[str, tuple[Kind, int]] = {
    "f16": (Kind.F16, 0),
    "bf16": (Kind.F16, 1),
    "tf32": (Kind.TF32, 2),
    "e4m3": (Kind.F8F6F4, 0),
    "e5m2": (Kind.F8F6F4, 1),
    "u8": (Kind.I8, 0),
    "s8": (Kind.I8, 1),
}
# Accumulator types: their code in bits 4-5.
_ACCUMULATORS = {"f16": 0, "f32": 1, "s32": 2}
# The accumulators of each left operand.
_ADMITTED: dict[str, tuple[str, ...]] = {
    "f16": ("f32", "f16"),
    "bf16": ("f32",),
    "tf32": ("f32",),
    "e4m3": ("f32", "f16"),
    "e5m2": ("f32", "f16"),
    "u8": ("s32",),
    "s8": ("s32",),
}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One tcgen05.mma without block scaling.

    Attributes:
      m, n: rows and columns of the accumulator.
      d, a, b: element types in PTX.
      a_transposed, b_transposed: the operand in SMEM lies along M or N.
      ctas: 1, or 2 for a pair; `m` and `n` are those of both together.
      sparse: the left operand has two of each four elements; K is doubled.

    Raises:
      DTypeError, ShapeError: there is no such instruction.

      >>> hex(Instruction(128, 64, "f32", "f16", "f16").descriptor)
      '0x8100010'
    """

    m: int
    n: int
    d: str
    a: str
    b: str
    a_transposed: bool = False
    b_transposed: bool = False
    ctas: int = 1
    sparse: bool = False

    def __post_init__(self) -> None:
        require_types(self.d, self.a, self.b)
        require_shape(self.m, self.n, self.kind, self.ctas)

    @property
    def kind(self) -> Kind:
        """The kind of the operands."""
        return _OPERANDS[self.a][0]

    @property
    def descriptor(self) -> int:
        """The 32 bits: sparsity, types, transpositions, N / 8 and M / 16."""
        return (
            self.sparse << _SPARSE
            | _ACCUMULATORS[self.d] << 4
            | _OPERANDS[self.a][1] << 7
            | _OPERANDS[self.b][1] << 10
            | self.a_transposed << 15
            | self.b_transposed << 16
            | self.n >> 3 << 17
            | self.m >> 4 << 24
        )

    @property
    def mnemonic(self) -> str:
        """The opcode of the instruction."""
        sparse = ".sp" * self.sparse
        return f"tcgen05.mma{sparse}.cta_group::{self.ctas}.kind::{self.kind.value}"


def kind_of(operand: str) -> Kind:
    """The kind of instruction that reads operands of a type."""
    return _OPERANDS[operand][0]


def require_types(d: str, a: str, b: str) -> None:
    """Raises DTypeError unless an instruction has operands of these types."""
    known = a in _OPERANDS and b in _OPERANDS and _OPERANDS[a][0] is _OPERANDS[b][0]
    mixed = a != b and {a, b} & {"f16", "bf16", "tf32"}
    if not known or mixed:
        raise DTypeError(
            "tcgen05.mma does not multiply these types",
            expected="two equal types, two 8-bit floats, or two 8-bit integers",
            got=f"{a} and {b}",
        )
    if d not in _ADMITTED[a] or d not in _ADMITTED[b]:
        raise DTypeError(
            f"tcgen05.mma of {a} operands does not support this accumulator",
            expected=" or ".join(_ADMITTED[a]),
            got=d,
        )


def require_shape(m: int, n: int, kind: Kind, ctas: int = 1) -> None:
    """Raises ShapeError unless an instruction of one CTA, or of two, has this shape."""
    rows = [ctas * count for count in ROWS]
    if m in rows and n <= MAX_N and is_n(n, kind, ctas):
        return
    if ctas == 2:
        steps = f"a multiple of {n_step(kind, ctas)}"
    elif kind is Kind.I8:
        steps = "8, 16, 24, 32 or a multiple of 16"
    else:
        steps = "a multiple of 8"
    raise ShapeError(
        "there is no tcgen05.mma of this shape",
        expected=f"M = {rows[0]} or {rows[1]}; N {steps}, up to {MAX_N}",
        got=f"M = {m}, N = {n}" + (" of a pair of CTAs" if ctas == 2 else ""),
    )


def n_step(kind: Kind, ctas: int = 1) -> int:
    """What N is a multiple of; integer kinds have a few small N of one CTA besides."""
    if ctas == 2:
        return _PAIR_INTEGER_N_STEP if kind is Kind.I8 else _PAIR_N_STEP
    return _INTEGER_N_STEP if kind is Kind.I8 else _N_STEP


def is_n(n: int, kind: Kind, ctas: int = 1) -> bool:
    """Whether N, up to the maximum, is that of an instruction."""
    if ctas == 2:
        return n > 0 and n % n_step(kind, ctas) == 0
    if n < _N_STEP or n % _N_STEP:
        return False
    return kind is not Kind.I8 or n <= _INTEGER_FREE_N or n % _INTEGER_N_STEP == 0
