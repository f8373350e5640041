# SPDX-License-Identifier: Apache-2.0
"""lax's elementwise operations on a register or a scalar.

A row has an emitter for each kind of elements: floats `f`, signed `i`, unsigned `u`
integers, and bools `b`. What libtpu has no instruction for is composed of others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector
from jaxlib.mlir.dialects import math as mlir_math

from pallas_gpu.sparsecore.emitters.values import BOOL, constant, is_float

Emit = Callable[..., ir.Value]
_I, _F = arith.CmpIPredicate, arith.CmpFPredicate


def kind_of(dtype: np.dtype) -> str:
    """Returns the kind of elements: f, i, u or b."""
    if dtype == BOOL:
        return "b"
    return "f" if is_float(dtype) else dtype.kind


def _number(value: float) -> Callable[[ir.Value], ir.Value]:
    return lambda like: constant(value, like.type)


_one, _two, _half, _zero = _number(1), _number(2), _number(0.5), _number(0)


def _negate(x: ir.Value) -> ir.Value:
    return arith.subi(_zero(x), x)


def _ones(x: ir.Value) -> ir.Value:
    return constant(-1, x.type)


def _sign(compare: Emit) -> Emit:
    def emit(x: ir.Value) -> ir.Value:
        zero, one = _zero(x), _one(x)
        below = arith.select(compare("lt", x, zero), constant(-1, x.type), x)
        return arith.select(compare("gt", x, zero), one, below)

    return emit


def _compared(predicates: dict[str, Any], compare: Emit) -> Emit:
    return lambda name, a, b: compare(predicates[name], a, b)


_ORDERS, _EQUAL = ("lt", "le", "gt", "ge"), {"eq": _I.eq, "ne": _I.ne}
_FLOATS = {"ne": _F.UNE} | {x: getattr(_F, f"O{x.upper()}") for x in ("eq", *_ORDERS)}
_compare_f = _compared(_FLOATS, arith.cmpf)
_compare_i, _compare_u = (
    _compared(_EQUAL | {x: getattr(_I, f"{sign}{x}") for x in _ORDERS}, arith.cmpi)
    for sign in "su"
)


def compare(name: str, kind: str, a: ir.Value, b: ir.Value) -> ir.Value:
    """Returns whether `a` compares to `b`: eq, ne, lt, le, gt or ge."""
    emit = {"f": _compare_f, "i": _compare_i, "u": _compare_u}[kind]
    return emit(name, a, b)


def not_(mask: ir.Value) -> ir.Value:
    """Returns the negation of bools."""
    return arith.xori(mask, constant(1, mask.type))


# --- compositions ---------------------------------------------------------------------


def _logistic(x: ir.Value) -> ir.Value:
    one = _one(x)
    return arith.divf(one, arith.addf(one, mlir_math.exp(arith.negf(x))))


def _exp2(x: ir.Value) -> ir.Value:
    return mlir_math.exp(arith.mulf(x, constant(math.log(2), x.type)))


def _erfc(x: ir.Value) -> ir.Value:
    return arith.subf(_one(x), mlir_math.erf(x))


# A quotient of polynomials in x * x, times x, for |x| < 4: the coefficients of Eigen's
# implementation for float32, that of the highest power first.
_ERF_ABOVE = (
    -2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06,
    -5.69250639462346e-05, -7.34990630326855e-04, -2.95459980854025e-03,
    -1.60960333262415e-02,
)  # fmt: skip
_ERF_BELOW = (
    -1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03,
    -7.37332916720468e-03, -1.42647390514189e-02,
)  # fmt: skip


def _erf(x: ir.Value) -> ir.Value:
    """The error function on chips without an instruction."""
    inside = _clamp(arith.maximumf, arith.minimumf)(
        constant(-4, x.type), x, constant(4, x.type)
    )
    square = arith.mulf(inside, inside)
    above, below = (_polynomial(square, c) for c in (_ERF_ABOVE, _ERF_BELOW))
    return arith.divf(arith.mulf(inside, above), below)


def _polynomial(x: ir.Value, coefficients: Sequence[float]) -> ir.Value:
    total = constant(coefficients[0], x.type)
    for coefficient in coefficients[1:]:
        total = arith.addf(arith.mulf(total, x), constant(coefficient, x.type))
    return total


def _sinh(x: ir.Value) -> ir.Value:
    grown = mlir_math.expm1(x)
    ratio = arith.divf(grown, arith.addf(grown, _one(x)))
    return arith.mulf(_half(x), arith.addf(grown, ratio))


def _cosh(x: ir.Value) -> ir.Value:
    grown = mlir_math.exp(mlir_math.absf(x))
    return arith.mulf(_half(x), arith.addf(grown, arith.divf(_one(x), grown)))


def _asinh(x: ir.Value) -> ir.Value:
    size, one = mlir_math.absf(x), _one(x)
    square = arith.mulf(x, x)
    root = mlir_math.sqrt(arith.addf(one, square))
    inner = arith.addf(size, arith.divf(square, arith.addf(one, root)))
    return mlir_math.copysign(mlir_math.log1p(inner), x)


def _acosh(x: ir.Value) -> ir.Value:
    one = _one(x)
    below, above = arith.subf(x, one), arith.addf(x, one)
    return mlir_math.log(arith.addf(x, mlir_math.sqrt(arith.mulf(below, above))))


def _atanh(x: ir.Value) -> ir.Value:
    inner = arith.divf(arith.mulf(_two(x), x), arith.subf(_one(x), x))
    return arith.mulf(_half(x), mlir_math.log1p(inner))


def _beside(x: ir.Value) -> ir.Value:
    """sqrt(1 - x * x), exact near 1."""
    one = _one(x)
    return mlir_math.sqrt(arith.mulf(arith.subf(one, x), arith.addf(one, x)))


def _is_finite(x: ir.Value) -> ir.Value:
    if not isinstance(x.type, ir.VectorType):
        # Other forms become a test of the class of floats, which ends libtpu.
        return _compare_f("eq", arith.subf(x, x), _zero(x))
    return _compare_f("lt", mlir_math.absf(x), constant(math.inf, x.type))


def _integer_pow(multiply: Emit, divide: Emit | None) -> Emit:
    def emit(x: ir.Value, *, y: int) -> ir.Value:
        result, square, left = None, x, abs(y)
        while left:
            if left & 1:
                result = square if result is None else multiply(result, square)
            left >>= 1
            square = multiply(square, square) if left else square
        if result is None:
            return _one(x)
        return result if y > 0 or divide is None else divide(_one(x), result)

    return emit


def round_to_even(x: ir.Value, *, has_instruction: bool) -> ir.Value:
    """Rounds to the nearest integer, of two to the even one.

    Without an instruction a float32 is moved to where the units are integers and back.
    """
    if has_instruction:
        return mlir_math.roundeven(x)
    unit = constant(2.0**23, x.type)
    moved = mlir_math.copysign(unit, x)
    there = arith.subf(arith.addf(x, moved), moved)
    small = _compare_f("lt", mlir_math.absf(x), unit)
    return arith.select(small, mlir_math.copysign(there, x), x)


def _round(x: ir.Value, *, rounding_method: Any, has_instruction: bool) -> ir.Value:
    if int(rounding_method) == 0:  # lax.RoundingMethod.AWAY_FROM_ZERO
        return mlir_math.round(x)
    return round_to_even(x, has_instruction=has_instruction)


def _shift(emit: Emit, fill: Callable[[ir.Value], ir.Value] | None) -> Emit:
    """A shift by the width or more: of lax it is 0, or the sign; of MLIR undefined."""

    def shifted(x: ir.Value, by: ir.Value) -> ir.Value:
        bits = 8 * 4
        inside = arith.cmpi(_I.ult, by, constant(bits, x.type))
        if fill is None:
            most = constant(bits - 1, x.type)
            return emit(x, arith.select(inside, by, most))
        return arith.select(inside, emit(x, by), fill(x))

    return shifted


def _signed(emit: Emit, unsigned: Emit, sign_of: Emit) -> Emit:
    """A division of signed words; of vectors by that of their magnitudes.

    Where the divisor is a constant, LLVM makes a product of 64 bits of a signed
    division, and libtpu ends its process.

    Args:
      sign_of: what has the sign of the result, of both operands.
    """

    def divided(x: ir.Value, y: ir.Value) -> ir.Value:
        if not isinstance(x.type, ir.VectorType):
            return emit(x, y)
        made = unsigned(_negated(x, x), _negated(y, y))
        return _negated(made, sign_of(x, y))

    return divided


def _negated(x: ir.Value, where: ir.Value) -> ir.Value:
    """Returns integers, negated where others are negative."""
    sign = arith.shrsi(where, constant(31, x.type))
    return arith.subi(arith.xori(x, sign), sign)


def _clamp(low_of: Emit, high_of: Emit) -> Emit:
    return lambda low, x, high: high_of(low_of(x, low), high)


def _all(emit: Emit, kinds: str = "iu") -> dict[str, Emit]:
    return dict.fromkeys(kinds, emit)


def _f(emit: Emit) -> dict[str, Emit]:
    return {"f": emit}


def _comparison(name: str) -> dict[str, Emit]:
    row: dict[str, Emit] = {
        kind: functools.partial(compare, name, kind) for kind in "fiu"
    }
    if name == "ne":
        row["b"] = arith.xori
    if name == "eq":
        row["b"] = lambda a, b: not_(arith.xori(a, b))
    return row


_ADD = {"f": arith.addf, **_all(arith.addi)}
ROWS: dict[str, dict[str, Emit]] = {
    "add": _ADD,
    "add_any": _ADD,
    "sub": {"f": arith.subf, **_all(arith.subi)},
    "mul": {"f": arith.mulf, **_all(arith.muli)},
    "div": {
        "f": arith.divf,
        "i": _signed(arith.divsi, arith.divui, arith.xori),
        "u": arith.divui,
    },
    "rem": {
        "f": arith.remf,
        "i": _signed(arith.remsi, arith.remui, lambda x, y: x),
        "u": arith.remui,
    },
    "max": {"f": arith.maximumf, "i": arith.maxsi, "u": arith.maxui, "b": arith.ori},
    "min": {"f": arith.minimumf, "i": arith.minsi, "u": arith.minui, "b": arith.andi},
    "neg": {"f": arith.negf, **_all(_negate)},
    "abs": {
        "f": mlir_math.absf,
        "i": lambda x: arith.maxsi(x, _negate(x)),
        "u": lambda x: x,
    },
    "sign": {
        "f": _sign(_compare_f),
        "i": _sign(_compare_i),
        "u": lambda x: arith.minui(x, _one(x)),
    },
    "square": {"f": lambda x: arith.mulf(x, x), **_all(lambda x: arith.muli(x, x))},
    "and": _all(arith.andi, "iub"),
    "or": _all(arith.ori, "iub"),
    "xor": _all(arith.xori, "iub"),
    "not": {**_all(lambda x: arith.xori(x, _ones(x))), "b": not_},
    "shift_left": _all(_shift(arith.shli, _zero)),
    "shift_right_logical": _all(_shift(arith.shrui, _zero)),
    "shift_right_arithmetic": _all(_shift(arith.shrsi, None)),
    "population_count": _all(mlir_math.ctpop),
    "clz": _all(mlir_math.ctlz),
    **{name: _comparison(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "clamp": {
        "f": _clamp(arith.maximumf, arith.minimumf),
        "i": _clamp(arith.maxsi, arith.minsi),
        "u": _clamp(arith.maxui, arith.minui),
    },
    "exp": _f(mlir_math.exp),
    "exp2": _f(_exp2),
    "expm1": _f(mlir_math.expm1),
    "log": _f(mlir_math.log),
    "log1p": _f(mlir_math.log1p),
    "log2": _f(mlir_math.log2),
    "sqrt": _f(mlir_math.sqrt),
    "rsqrt": _f(mlir_math.rsqrt),
    "cbrt": _f(mlir_math.cbrt),
    "logistic": _f(_logistic),
    "sin": _f(mlir_math.sin),
    "cos": _f(mlir_math.cos),
    "tan": _f(mlir_math.tan),
    "tanh": _f(mlir_math.tanh),
    "sinh": _f(_sinh),
    "cosh": _f(_cosh),
    "asin": _f(lambda x: mlir_math.atan2(x, _beside(x))),
    "acos": _f(lambda x: mlir_math.atan2(_beside(x), x)),
    "atan": _f(lambda x: mlir_math.atan2(x, _one(x))),
    "asinh": _f(_asinh),
    "acosh": _f(_acosh),
    "atanh": _f(_atanh),
    "atan2": _f(mlir_math.atan2),
    "erf": _f(mlir_math.erf),
    "erfc": _f(_erfc),
    "pow": _f(mlir_math.powf),
    "integer_pow": {
        "f": _integer_pow(arith.mulf, arith.divf),
        **_all(_integer_pow(arith.muli, None)),
    },
    "floor": _f(mlir_math.floor),
    "ceil": _f(mlir_math.ceil),
    "round": _f(_round),
    "is_finite": _f(_is_finite),
    "stop_gradient": _all(lambda x: x, "fiub"),
    "copy": _all(lambda x: x, "fiub"),
    "copy_p": _all(lambda x: x, "fiub"),
    "optimization_barrier": _all(lambda x: x, "fiub"),
}


WITHOUT_ERF: dict[str, Emit] = {
    "erf": _erf,
    "erfc": lambda x: arith.subf(_one(x), _erf(x)),
}


def on_register(emit: Emit, elements: int, *scalars: ir.Value) -> ir.Value:
    """Computes scalars in a register, for what has no scalar instruction."""
    registers = [
        vector.broadcast(ir.VectorType.get([elements], x.type), x) for x in scalars
    ]
    return vector.extract(emit(*registers), [], [0])


# Bools as numbers, 0 and 1: what of them is not 0 is true.
OF_NUMBERS: dict[str, Emit] = {
    **dict.fromkeys(("and", "min"), arith.andi),
    **dict.fromkeys(("or", "max"), arith.ori),
    **dict.fromkeys(("xor", "ne"), arith.xori),
    "eq": lambda a, b: arith.xori(arith.xori(a, b), _one(a)),
    "not": lambda a: arith.xori(a, _one(a)),
}
