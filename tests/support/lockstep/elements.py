# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on the bits that threads hold, for `lockstep`.

A value is an array of int64 whose low bits are those of the elements; what an operation
makes of them follows from the types of its operands and of its result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from jaxlib.mlir import ir

Bits = np.ndarray
_FLOATS = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
}


def element(type_: ir.Type) -> ir.Type:
    """The type of an element."""
    return type_.element_type if isinstance(type_, ir.VectorType) else type_


def width(type_: ir.Type) -> int:
    """Bits of an element; pointers and indices have 64."""
    kind = element(type_)
    return 64 if str(kind).startswith(("!llvm.ptr", "index")) else kind.width


def masked(value: Bits, type_: ir.Type) -> Bits:
    """The bits that a type has room for."""
    bits = width(type_)
    return value & ((1 << bits) - 1) if bits < 64 else value


def signed(value: Bits, type_: ir.Type) -> Bits:
    """The integers that the bits are, as two's complement."""
    shift = 64 - width(type_)
    return value << shift >> shift


def unsigned(value: Bits, type_: ir.Type) -> Bits:
    """The integers that the bits are, without a sign."""
    return masked(value, type_).view(np.uint64)


def floats(value: Bits, type_: ir.Type) -> np.ndarray:
    """The numbers that the bits are."""
    dtype = _FLOATS[str(element(type_))]
    return value.astype(f"u{dtype.itemsize}").view(dtype)


def bits(value: Any, type_: ir.Type) -> Bits:
    """The bits of numbers, rounded to a type."""
    kind = _FLOATS.get(str(element(type_)))
    if kind is None:
        return masked(np.asarray(value).astype(np.int64), type_)
    value = np.asarray(value).astype(kind)
    return value.view(f"u{kind.itemsize}").astype(np.int64)


# --- tables ---------------------------------------------------------------------------


def _leading_zeros(x: np.ndarray, bits_each: int) -> np.ndarray:
    lengths = [bits_each - int(v).bit_length() for v in x.flat]
    return np.array(lengths, np.int64).reshape(x.shape)


_FLOAT: dict[str, Callable] = {
    "arith.addf": np.add,
    "arith.subf": np.subtract,
    "arith.mulf": np.multiply,
    "arith.divf": np.divide,
    "arith.negf": np.negative,
    "arith.maximumf": np.maximum,
    "arith.minimumf": np.minimum,
    "math.absf": np.abs,
    "math.copysign": np.copysign,
    "math.ceil": np.ceil,
    "math.floor": np.floor,
    "math.trunc": np.trunc,
    "math.roundeven": np.rint,
    "math.round": lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x),
    "math.sqrt": np.sqrt,
    "math.rsqrt": lambda x: 1 / np.sqrt(x),
    "math.exp": np.exp,
    "math.exp2": np.exp2,
    "math.expm1": np.expm1,
    "math.log": np.log,
    "math.log2": np.log2,
    "math.log1p": np.log1p,
    "math.sin": np.sin,
    "math.cos": np.cos,
    "math.tan": np.tan,
    "math.tanh": np.tanh,
    "math.cbrt": np.cbrt,
    "math.atan2": np.arctan2,
    "math.erf": np.vectorize(math.erf, otypes=[np.float64]),
    "math.erfc": np.vectorize(math.erfc, otypes=[np.float64]),
    "math.powf": np.power,
}
_UNSIGNED: dict[str, Callable] = {
    "arith.addi": np.add,
    "arith.subi": np.subtract,
    "arith.muli": np.multiply,
    "arith.xori": np.bitwise_xor,
    "arith.andi": np.bitwise_and,
    "arith.ori": np.bitwise_or,
    "arith.shli": np.left_shift,
    "arith.shrui": np.right_shift,
    "arith.divui": np.floor_divide,
    "arith.remui": np.remainder,
    "arith.maxui": np.maximum,
    "arith.minui": np.minimum,
    "arith.extui": lambda x: x,
    "arith.trunci": lambda x: x,
    "arith.index_castui": lambda x: x,
}


def _quotient(a: Bits, b: Bits) -> Bits:
    return (a - np.fmod(a, b)) // b


_SIGNED: dict[str, Callable] = {
    "arith.divsi": _quotient,
    "arith.remsi": np.fmod,
    "arith.maxsi": np.maximum,
    "arith.minsi": np.minimum,
    "arith.shrsi": np.right_shift,
    "arith.extsi": lambda x: x,
    "arith.index_cast": lambda x: x,
    "math.absi": np.abs,
}
_EQUAL = (np.equal, np.not_equal)
_ORDER = (np.less, np.less_equal, np.greater, np.greater_equal)
# Of ordered comparisons, by MLIR's number; 8 more and NaN gives True.
_CMPF = {
    1: np.equal,
    2: np.greater,
    3: np.greater_equal,
    4: np.less,
    5: np.less_equal,
    6: np.not_equal,
    7: lambda a, b: np.ones(a.shape, bool),
}


def _cmpi(op: ir.Operation, a: Bits, b: Bits) -> np.ndarray:
    predicate = ir.IntegerAttr(op.attributes["predicate"]).value
    if predicate < 2:
        return _EQUAL[predicate](a, b)
    read = signed if predicate < 6 else unsigned
    type_ = op.operands[0].type
    return _ORDER[(predicate - 2) % 4](read(a, type_), read(b, type_))


def _cmpf(op: ir.Operation, a: Bits, b: Bits) -> np.ndarray:
    predicate = ir.IntegerAttr(op.attributes["predicate"]).value
    x, y = (floats(v, op.operands[0].type) for v in (a, b))
    unordered = np.isnan(x) | np.isnan(y)
    if predicate < 8:
        return _CMPF[predicate](x, y) & ~unordered
    # 8 to 14 are ueq, ugt, uge, ult, ule, une, uno.
    if predicate == 14:
        return unordered
    return _CMPF[predicate - 7](x, y) | unordered


def _round_to_zero(op: ir.Operation, x: Bits) -> Bits | None:
    """`cvt.rzi`: clamps, and gives 0 for NaN where 32 bits become 32."""
    name = str(op.attributes["intrin"]).strip('"')
    target = op.results[0].type
    is_signed = name.split("2")[1].startswith(("i", "ll"))
    value = floats(x, op.operands[0].type).astype(np.float64)
    size = width(target)
    low = -(2.0 ** (size - 1)) if is_signed else 0.0
    high = 2.0 ** (size - 1 if is_signed else size)
    whole = np.trunc(np.nan_to_num(value, nan=0.0, posinf=high, neginf=low))
    result = [int(min(max(v, low), high)) for v in whole.flat]
    top = int(high) - 1
    result = [min(v, top) & ((1 << size) - 1) for v in result]
    result = [v - (1 << 64) if v >> 63 else v for v in result]
    return np.array(result, np.int64).reshape(value.shape)


def compute(op: ir.Operation, inputs: list[Bits]) -> Bits | None:
    """The result of an operation on elements, None for any other."""
    name, type_ = op.name, op.results[0].type
    with np.errstate(all="ignore"):
        if name in _UNSIGNED:
            types = [o.type for o in op.operands]
            plain = [unsigned(x, t) for x, t in zip(inputs, types, strict=True)]
            return masked(_UNSIGNED[name](*plain).view(np.int64), type_)
        if name in _SIGNED:
            types = [o.type for o in op.operands]
            read = [signed(x, t) for x, t in zip(inputs, types, strict=True)]
            return masked(_SIGNED[name](*read), type_)
        if name in _FLOAT:
            numbers = [floats(x, type_) for x in inputs]
            return bits(_FLOAT[name](*numbers), type_)
    return _others(op, name, inputs, type_)


def _others(op, name: str, inputs: list[Bits], type_: ir.Type) -> Bits | None:
    source = op.operands[0].type if len(op.operands) else None
    match name:
        case "arith.cmpi":
            return _cmpi(op, *inputs).astype(np.int64)
        case "arith.cmpf":
            return _cmpf(op, *inputs).astype(np.int64)
        case "arith.extf" | "arith.truncf":
            return bits(floats(inputs[0], source), type_)
        case "arith.sitofp":
            return bits(signed(inputs[0], source), type_)
        case "arith.uitofp":
            return bits(unsigned(inputs[0], source), type_)
        case "math.fma":
            a, b, c = (floats(x, type_).astype(np.float64) for x in inputs)
            return bits(a * b + c, type_)
        case "math.ctpop":
            counts = np.bitwise_count(unsigned(inputs[0], type_))
            return counts.astype(np.int64)
        case "math.ctlz":
            return _leading_zeros(unsigned(inputs[0], type_), width(type_))
        case "llvm.call_intrinsic" if ".rz" in str(op.attributes["intrin"]):
            return _round_to_zero(op, inputs[0])
    return None
