# SPDX-License-Identifier: Apache-2.0
"""Inline PTX: its text as statements, and instructions on registers alone.

Each function computes what the PTX ISA says of the instruction whose text was emitted;
approximations are computed in float64 and rounded, so they are closer than the
hardware's.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

_TINY = np.float32(np.finfo(np.float32).tiny)
Compute = Callable[..., np.ndarray]  # of unsigned arrays


@dataclasses.dataclass(frozen=True)
class Statement:
    """One statement of PTX.

    Attributes:
      label: in front of it, or empty.
      guard: the predicate's register or operand, `!` in front where negated, or empty.
      opcode: `add.s64` and the like.
      operands: registers, numbers, `[address]`, or tuples of registers in braces.
    """

    label: str
    guard: str
    opcode: str
    operands: tuple[Any, ...]


_STATEMENT = re.compile(
    r"(?:(?P<label>\w+):\s*)?(?:@(?P<guard>!?\$?\w+)\s+)?(?P<opcode>[\w.:]+)\s*(?P<rest>.*)",
    re.DOTALL,
)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")


def parse(text: str) -> list[Statement]:
    """The statements of inline assembly; declarations of registers are left out."""
    text = text.strip()
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    statements = []
    for piece in map(str.strip, text.split(";")):
        if not piece or piece.startswith(".reg"):
            continue
        match = _STATEMENT.fullmatch(piece)
        assert match is not None, piece
        operands: list[str | tuple[str, ...]] = []
        for operand in _OPERAND.findall(match["rest"]):
            if operand.startswith("{"):
                operands.append(tuple(x.strip() for x in operand[1:-1].split(",")))
            else:
                operands.append(operand)
        statements.append(
            Statement(
                match["label"] or "",
                match["guard"] or "",
                match["opcode"],
                tuple(operands),
            )
        )
    return statements


# --- instructions on registers --------------------------------------------------------


def _flush(x: np.ndarray) -> np.ndarray:
    """`.ftz`: subnormal numbers become zeros of their sign."""
    return np.where(np.abs(x) < _TINY, np.copysign(np.float32(0), x), x)


def _special(function: Compute, *, ftz: bool) -> Compute:
    def compute(x: np.ndarray) -> np.ndarray:
        number = x.view(np.float32)
        number = _flush(number) if ftz else number
        with np.errstate(all="ignore"):
            result = function(number.astype(np.float64)).astype(np.float32)
        result = _flush(result) if ftz else result
        return result.view(np.uint32)

    return compute


# PTX ISA, "Floating Point Instructions".
_SPECIAL: dict[str, Compute] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda x: 1 / x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}
_FLOAT8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
_FLOATS = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f32": np.float32,
    "f64": np.float64,
}


def dtype_of(kind: str) -> np.dtype:
    """The elements of a type of PTX, of which a register may have several: `f16x2`."""
    name = kind.removeprefix("noftz.").partition("x")[0]
    known = _FLOATS.get(name) or _FLOAT8.get(name)
    return np.dtype(known or f"{'i' if name[0] == 's' else 'u'}{int(name[1:]) // 8}")


def _from_float8(kind: str) -> Compute:
    dtype = _FLOAT8[kind]

    def compute(x: np.ndarray) -> np.ndarray:
        return x.view(dtype).astype(np.float16).view(np.uint32)

    return compute


def _to_float8(kind: str) -> Compute:
    dtype = _FLOAT8[kind]
    largest = np.float32(ml_dtypes.finfo(dtype).max)

    def compute(upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
        upper, lower = np.broadcast_arrays(upper, lower)
        pair = np.stack([lower, upper], axis=-1).view(np.float32)
        # `.satfinite`: what is larger becomes the largest; NaN stays NaN.
        codes = np.clip(pair, -largest, largest).astype(dtype).view(np.uint8)
        # The canonical NaN of both types.
        codes = np.where(np.isnan(pair), np.uint8(0x7F), codes)
        return np.ascontiguousarray(codes).view(np.uint16)[..., 0]

    return compute


def _to_pair(dtype: Any) -> Compute:
    def compute(upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
        pair = np.stack(np.broadcast_arrays(lower, upper), axis=-1).view(np.float32)
        with np.errstate(all="ignore"):
            return np.ascontiguousarray(pair.astype(dtype)).view(np.uint32)[..., 0]

    return compute


def _fused(rounding: Callable[[np.ndarray], np.ndarray]) -> Compute:
    """`fma` of f32; exact in float64 for the operands that emitters have."""

    def compute(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        a, b, c = (x.view(np.float32).astype(np.float64) for x in (a, b, c))
        with np.errstate(all="ignore"):
            return rounding(a * b + c).astype(np.float32).view(np.uint32)

    return compute


def _saturated(exact: np.ndarray) -> np.ndarray:
    """`.sat`: from 0 to 1, and 0 for NaN."""
    rounded = exact.astype(np.float32)
    return np.where(np.isnan(rounded), 0, np.clip(rounded, 0, 1))


def _rounded_down(exact: np.ndarray) -> np.ndarray:
    """`.rm`."""
    rounded = exact.astype(np.float32)
    below = np.nextafter(rounded, np.float32(-np.inf))
    return np.where(rounded > exact, below, rounded)


# PTX ISA, "Integer Arithmetic", "Floating Point" and "Logic and Shift Instructions", by
# the number of operands.
_OF_NUMBERS: dict[str, tuple[int, Callable[..., np.ndarray]]] = {
    "add": (2, np.add),
    "sub": (2, np.subtract),
    "mul": (2, np.multiply),
    # The operand that is a number, if the other one is NaN.
    "min": (2, np.fmin),
    "max": (2, np.fmax),
    "min.NaN": (2, np.minimum),
    "max.NaN": (2, np.maximum),
    "abs": (1, np.abs),
    "neg": (1, np.negative),
}
_OF_BITS: dict[str, tuple[int, Callable[..., np.ndarray]]] = {
    "and": (2, np.bitwise_and),
    "or": (2, np.bitwise_or),
    "xor": (2, np.bitwise_xor),
    "not": (1, np.bitwise_not),
}


def _typed(dtype: Any, function: Callable[..., np.ndarray]) -> Compute:
    """A function of elements of a type, of which a register may have several."""

    def compute(*registers: np.ndarray) -> np.ndarray:
        width, kind = registers[0].dtype, np.dtype(dtype)
        inputs = np.broadcast_arrays(*registers)
        split = [np.ascontiguousarray(x)[..., None].view(kind) for x in inputs]
        with np.errstate(all="ignore"):
            result = np.ascontiguousarray(function(*split).astype(kind))
        return result.view(width)[..., 0]

    return compute


def _rounded_once(a: Any, b: Any, c: Any) -> np.ndarray:
    """`fma` of types of at most 32 bits: products of these are exact in float64.

    One sum in 2**29 may be rounded to the other of two neighbours.
    """
    return a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)


def _counted(count: Callable[[str], int]) -> Compute:
    """A number found in the 32 bits of a register."""
    return np.vectorize(lambda x: count(f"{x:032b}"), otypes=[np.uint32])


def _on_registers() -> dict[str, tuple[int, Compute]]:
    rows: dict[str, tuple[int, Compute]] = {
        "popc.b32": (1, _counted(lambda bits: bits.count("1"))),
        "clz.b32": (1, _counted(lambda bits: 32 - len(bits.lstrip("0")))),
        "brev.b32": (1, _counted(lambda bits: int(bits[::-1], 2))),
    }
    for name, (arity, function) in _OF_BITS.items():
        for bits in (16, 32, 64):
            rows[f"{name}.b{bits}"] = arity, _typed(f"u{bits // 8}", function)
    for name, (arity, function) in _OF_NUMBERS.items():
        for sign, bits in itertools.product("su", (16, 32, 64)):
            word = "mul.lo" if name == "mul" else name
            if (sign == "s" or arity == 2) and not name.endswith("NaN"):
                dtype = f"{'i' if sign == 's' else 'u'}{bits // 8}"
                rows[f"{word}.{sign}{bits}"] = arity, _typed(dtype, function)
        for kind, float_type in _FLOATS.items():
            row = arity, _typed(float_type, function)
            rounded = (".rn", "") if name in ("add", "sub", "mul") else ("",)
            for rounding in rounded:
                rows[f"{name}{rounding}.{kind}"] = row
                if kind.endswith("16"):
                    rows[f"{name}{rounding}.{kind}x2"] = row
    for kind in ("s32", "u32"):
        rows[f"mad.lo.{kind}"] = 3, _typed(np.uint32, lambda a, b, c: a * b + c)
    # Amounts from 32 on shift all bits out.
    rows["shl.b32"] = 2, _typed(np.uint32, lambda a, b: np.where(b < 32, a << b, 0))
    rows["shr.u32"] = 2, _typed(np.uint32, lambda a, b: np.where(b < 32, a >> b, 0))
    for kind in ("f16", "bf16"):
        rows[f"cvt.rn.{kind}x2.f32"] = 2, _to_pair(_FLOATS[kind])
    for kind in ("f16", "bf16", "f32"):
        for packed in ("", "x2") if kind.endswith("16") else ("",):
            rows[f"fma.rn.{kind}{packed}"] = 3, _typed(_FLOATS[kind], _rounded_once)
    return rows


def _table() -> dict[str, tuple[int, Compute]]:
    rows = _on_registers()
    rows["fma.rn.sat.f32"] = 3, _fused(_saturated)
    rows["fma.rm.f32"] = 3, _fused(_rounded_down)
    for name, function in _SPECIAL.items():
        rows[f"{name}.approx.f32"] = 1, _special(function, ftz=False)
        if name != "tanh":
            rows[f"{name}.approx.ftz.f32"] = 1, _special(function, ftz=True)
    for kind in _FLOAT8:
        rows[f"cvt.rn.f16x2.{kind}x2"] = 1, _from_float8(kind)
        rows[f"cvt.rn.satfinite.{kind}x2.f32"] = 2, _to_float8(kind)
    return rows


_INSTRUCTIONS = _table()


def register_instruction(text: str) -> Compute | None:
    """What one instruction on registers computes; None where the text is another.

    Args:
      text: the template; `$0` is the result, and the inputs are numbered behind it.
    """
    statements = parse(text)
    if len(statements) != 1 or statements[0].guard:
        return None
    (statement,) = statements
    arity, function = _INSTRUCTIONS.get(statement.opcode, (0, None))
    read = [_operand(x) for x in statement.operands]
    if function is None or len(read) != arity + 1 or None in read:
        return None
    if statement.operands[0] != "$0":
        return None
    chosen: Compute = function
    return lambda *inputs: chosen(*(x(inputs) for x in read[1:] if x is not None))


def input_bits(text: str) -> int | None:
    """The bits of the inputs of an instruction, which are all of its last type."""
    (statement,) = parse(text)
    match = re.search(r"[a-z]+(\d+)(x2)?$", statement.opcode)
    if match is None or re.search(r"e[45]m[32]x2$", statement.opcode):
        return None
    return int(match[1]) * (2 if match[2] else 1)


def _operand(text: Any) -> Callable[[Sequence[np.ndarray]], np.ndarray] | None:
    """How an input or a constant is read; None for another operand."""
    if not isinstance(text, str):
        return None
    if re.fullmatch(r"\$\d+", text):
        return lambda inputs: inputs[int(text[1:]) - 1]
    if re.fullmatch(r"0f[0-9A-Fa-f]{8}", text):
        return lambda inputs: np.array([int(text[2:], 16)], np.uint32)
    if re.fullmatch(r"-?(0x[0-9A-Fa-f]+|0|[1-9]\d*)", text):

        def constant(inputs: Sequence[np.ndarray]) -> np.ndarray:
            bits = 8 * inputs[0].dtype.itemsize
            return np.array([int(text, 0) % (1 << bits)], inputs[0].dtype)

        return constant
    return None
