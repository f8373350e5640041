# SPDX-License-Identifier: Apache-2.0
"""Inline PTX: its text as statements, and instructions on registers alone.

Each function computes what the PTX ISA says of the instruction whose text was emitted;
approximations are computed in float64 and rounded, so they are closer than the
hardware's.
"""

from __future__ import annotations

import dataclasses
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


def _table() -> dict[str, Compute]:
    rows: dict[str, Compute] = {
        "fma.rn.sat.f32": _fused(_saturated),
        "fma.rm.f32": _fused(_rounded_down),
    }
    for name, function in _SPECIAL.items():
        rows[f"{name}.approx.f32"] = _special(function, ftz=False)
        if name != "tanh":
            rows[f"{name}.approx.ftz.f32"] = _special(function, ftz=True)
    for kind in _FLOAT8:
        rows[f"cvt.rn.f16x2.{kind}x2"] = _from_float8(kind)
        rows[f"cvt.rn.satfinite.{kind}x2.f32"] = _to_float8(kind)
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
    function = _INSTRUCTIONS.get(statement.opcode)
    arity = 3 if statement.opcode.startswith("fma") else 1
    arity = 2 if "satfinite" in statement.opcode else arity
    read = [_operand(x) for x in statement.operands]
    if function is None or len(read) != arity + 1 or None in read:
        return None
    if statement.operands[0] != "$0":
        return None
    chosen: Compute = function
    return lambda *inputs: chosen(*(x(inputs) for x in read[1:] if x is not None))


def _operand(text: Any) -> Callable[[Sequence[np.ndarray]], np.ndarray] | None:
    """How an input or an f32 constant is read; None for another operand."""
    if not isinstance(text, str):
        return None
    if re.fullmatch(r"\$\d+", text):
        return lambda inputs: inputs[int(text[1:]) - 1]
    if re.fullmatch(r"0f[0-9A-Fa-f]{8}", text):
        return lambda inputs: np.array([int(text[2:], 16)], np.uint32)
    return None
