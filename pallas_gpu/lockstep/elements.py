# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on elements, as the dialects arith and math define it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.lockstep import assembly, values
from pallas_gpu.lockstep.not_modelled import NotModelled
from pallas_gpu.lockstep.program import Program, Step, runs
from pallas_gpu.lockstep.values import signed


def _of_numbers(function: Callable[[float], float]) -> Callable:
    each = np.vectorize(function, otypes=[np.float64])
    return lambda x: each(x).astype(x.dtype)


def _leading_zeros(x: np.ndarray) -> np.ndarray:
    bits = 8 * x.dtype.itemsize
    lengths = [bits - int(v).bit_length() for v in x.flat]
    return np.array(lengths, x.dtype).reshape(x.shape)


def _round_half_away(x: np.ndarray) -> np.ndarray:
    # C's round: exact, where `x + 0.5` would itself be rounded.
    whole = np.trunc(x)
    up = (np.abs(x - whole) >= 0.5).astype(x.dtype)
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(x), np.copysign(np.abs(whole) + up, x), x)


def _in_signed(function: Callable) -> Callable:
    def compute(*inputs: np.ndarray) -> np.ndarray:
        return values.unsigned(function(*(signed(x) for x in inputs)))

    return compute


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a - np.fmod(a, b)) // b


def _truncate(x: np.ndarray, to: np.dtype) -> np.ndarray:
    return (x & x.dtype.type(1) if to.kind == "b" else x).astype(to)


def _maximum(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """+0.0 exceeds -0.0; NumPy gives either of the two."""
    return np.where(x == y, np.where(np.signbit(x), y, x), np.maximum(x, y))


# Functions of arrays of the operands' own types, which give the result's.
_SAME_TYPE: dict[str, Callable] = {
    "arith.addf": np.add,
    "arith.subf": np.subtract,
    "arith.mulf": np.multiply,
    "arith.divf": np.divide,
    "arith.negf": np.negative,
    "arith.maximumf": _maximum,
    "arith.minimumf": lambda x, y: -_maximum(-x, -y),
    "math.absf": np.abs,
    "math.copysign": np.copysign,
    "math.ceil": np.ceil,
    "math.floor": np.floor,
    "math.trunc": np.trunc,
    "math.roundeven": np.rint,
    "math.round": _round_half_away,
    "math.sqrt": np.sqrt,
    "math.rsqrt": lambda x: x.dtype.type(1) / np.sqrt(x),
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
    "math.asin": np.arcsin,
    "math.acos": np.arccos,
    "math.atan": np.arctan,
    "math.sinh": np.sinh,
    "math.cosh": np.cosh,
    "math.asinh": np.arcsinh,
    "math.acosh": np.arccosh,
    "math.atanh": np.arctanh,
    "math.cbrt": np.cbrt,
    "math.atan2": np.arctan2,
    "math.erf": _of_numbers(math.erf),
    "math.erfc": _of_numbers(math.erfc),
    "math.powf": np.power,
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
    "arith.divsi": _in_signed(_quotient),
    "arith.remsi": _in_signed(np.fmod),
    "arith.floordivsi": _in_signed(np.floor_divide),
    "arith.maxsi": _in_signed(np.maximum),
    "arith.minsi": _in_signed(np.minimum),
    "arith.shrsi": _in_signed(np.right_shift),
    "math.absi": _in_signed(np.abs),
    "math.ctlz": _leading_zeros,
    "math.ctpop": lambda x: np.bitwise_count(x).astype(x.dtype),
}
# From the operand's type to the result's.
_CONVERT: dict[str, Callable[[np.ndarray, np.dtype], np.ndarray]] = {
    "arith.extui": lambda x, to: x.astype(to),
    "arith.extsi": lambda x, to: signed(x).astype(f"i{to.itemsize}").view(to),
    "arith.index_castui": lambda x, to: x.astype(to),
    "arith.index_cast": lambda x, to: signed(x).astype(f"i{to.itemsize}").view(to),
    "arith.trunci": lambda x, to: _truncate(x, to),
    "arith.extf": lambda x, to: x.astype(to),
    "arith.truncf": lambda x, to: x.astype(to),
    "arith.sitofp": lambda x, to: signed(x).astype(to),
    "arith.uitofp": lambda x, to: x.astype(to),
}
_EQUAL = (np.equal, np.not_equal)
_ORDER = (np.less, np.less_equal, np.greater, np.greater_equal)
# Of ordered comparisons, by MLIR's number; 7 more and NaN gives True.
_CMPF: dict[int, Callable] = {
    1: np.equal,
    2: np.greater,
    3: np.greater_equal,
    4: np.less,
    5: np.less_equal,
    6: np.not_equal,
    7: lambda a, b: a == a,
}


def applied(program: Program, op: ir.Operation, function: Callable) -> Step:
    """The step that applies a function to the operands' arrays."""
    (out,) = program.outputs(op)
    slots = program.inputs(op)
    if len(slots) == 1:
        (a,) = slots

        def one(strand: Any) -> None:
            env = strand.env
            env[out] = function(values.forced(env[a]))

        return one
    if len(slots) == 2:
        a, b = slots

        def two(strand: Any) -> None:
            env = strand.env
            env[out] = function(values.forced(env[a]), values.forced(env[b]))

        return two

    def many(strand: Any) -> None:
        env = strand.env
        env[out] = function(*(values.forced(env[i]) for i in slots))

    return many


# The operations of LLVM's dialect that are those of arith.
_LLVM = {
    "llvm.add": "arith.addi",
    "llvm.sub": "arith.subi",
    "llvm.mul": "arith.muli",
    "llvm.udiv": "arith.divui",
    "llvm.urem": "arith.remui",
    "llvm.and": "arith.andi",
    "llvm.or": "arith.ori",
    "llvm.xor": "arith.xori",
    "llvm.shl": "arith.shli",
    "llvm.lshr": "arith.shrui",
    "llvm.fadd": "arith.addf",
    "llvm.fsub": "arith.subf",
    "llvm.fmul": "arith.mulf",
}


@runs(*_SAME_TYPE, *_LLVM)
def _same_type(program: Program, op: ir.Operation) -> Step:
    name = _LLVM.get(op.name, op.name)
    function = _SAME_TYPE[name]
    if name.startswith(_PARTIAL):
        return applied(program, op, _where_defined(name, function))
    return applied(program, op, function)


# LLVM leaves the results of these undefined for some operands.
_PARTIAL = (
    *("arith.divsi", "arith.divui", "arith.floordivsi"),
    *("arith.rem", "arith.shl", "arith.shr"),
)


def _where_defined(name: str, function: Callable) -> Callable:
    def compute(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if name.startswith("arith.sh"):
            inside = b < 8 * a.dtype.itemsize
            assert inside.all(), f"{name} by the width or more"
            return function(a, b)
        assert b.all(), f"{name} by zero"
        if name.endswith("si"):
            least = np.iinfo(signed(a).dtype).min
            overflows = (signed(a) == least) & (signed(b) == -1)
            assert not overflows.any(), f"{name} overflows"
        return function(a, b)

    return compute


@runs(*_CONVERT)
def _convert(program: Program, op: ir.Operation) -> Step:
    to, function = values.dtype(op.results[0].type), _CONVERT[op.name]
    return applied(program, op, lambda x: function(x, to))


@runs("arith.bitcast")
def _bitcast(program: Program, op: ir.Operation) -> Step:
    to = values.dtype(op.results[0].type)
    return applied(program, op, lambda x: x.view(to))


@runs("arith.constant", "llvm.mlir.constant")
def _constant(program: Program, op: ir.Operation) -> None:
    (out,) = program.outputs(op)
    value = values.constant(op.attributes["value"], op.results[0].type)
    program.constants[out] = value


@runs("arith.cmpi")
def _cmpi(program: Program, op: ir.Operation) -> Step:
    predicate = ir.IntegerAttr(op.attributes["predicate"]).value
    if predicate < 2:
        return applied(program, op, _EQUAL[predicate])
    order = _ORDER[(predicate - 2) % 4]
    if predicate >= 6:
        return applied(program, op, order)
    return applied(program, op, lambda a, b: order(signed(a), signed(b)))


@runs("arith.cmpf")
def _cmpf(program: Program, op: ir.Operation) -> Step:
    predicate = ir.IntegerAttr(op.attributes["predicate"]).value

    def compare(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        unordered = np.isnan(a) | np.isnan(b)
        if predicate < 8:
            return _CMPF[predicate](a, b) & ~unordered
        # 8 to 14 are ueq, ugt, uge, ult, ule, une, uno.
        if predicate == 14:
            return unordered
        return _CMPF[predicate - 7](a, b) | unordered

    return applied(program, op, compare)


@runs("arith.select")
def _select(program: Program, op: ir.Operation) -> Step:
    wide = values.length(op.results[0].type) is not None

    def select(which: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if wide and which.ndim == 1:
            which = which[:, None]
        return np.where(which, a, b)

    return applied(program, op, select)


@runs("math.fma")
def _fma(program: Program, op: ir.Operation) -> Step:
    def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        exact = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
        return exact.astype(a.dtype)

    return applied(program, op, fma)


@runs("llvm.call")
def _call(program: Program, op: ir.Operation) -> Step:
    name = ir.FlatSymbolRefAttr(op.attributes["callee"]).value
    if name not in ("__nv_fmodf", "__nv_fmod"):
        raise NotModelled(f"llvm.call {name}")
    return applied(program, op, np.fmod)


# --- intrinsics -----------------------------------------------------------------------


@runs("llvm.call_intrinsic")
def _intrinsic(program: Program, op: ir.Operation) -> Step:
    name = ir.StringAttr(op.attributes["intrin"]).value
    to = values.dtype(op.results[0].type)
    if name == "llvm.nvvm.prmt":
        return applied(program, op, _prmt)
    match name.removeprefix("llvm.nvvm.").split("."):
        case ["d2f", "rz"]:
            return applied(program, op, _single_to_zero)
        case [kind, "rz"] if "2" in kind:
            integer = kind.split("2")[1]
            is_signed = integer in ("i", "ll")
            return applied(program, op, lambda x: round_to_zero(x, to, is_signed))
    raise NotModelled(f"llvm.call_intrinsic {name}")


def _single_to_zero(x: np.ndarray) -> np.ndarray:
    """`cvt.rz.f32.f64`."""
    near = x.astype(np.float32)
    away = np.abs(near.astype(np.float64)) > np.abs(x)
    return np.where(away, np.nextafter(near, np.float32(0)), near)


def round_to_zero(x: np.ndarray, to: np.dtype, is_signed: bool) -> np.ndarray:
    """`cvt.rzi`: clamps, and gives 0 for NaN where 32 bits become 32."""
    limits = np.iinfo(f"{'i' if is_signed else 'u'}{to.itemsize}")
    low, high = int(limits.min), int(limits.max)
    value = np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=high, neginf=low)
    clamped = [min(max(int(v), low), high) for v in value.flat]
    return np.array(clamped, limits.dtype).reshape(x.shape).view(to)


def _prmt(low: np.ndarray, high: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Bytes of two words, chosen by the nibbles of the selector (PTX ISA, prmt)."""
    both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    result = np.zeros(np.broadcast_shapes(both.shape, selector.shape), np.uint32)
    for i in range(4):
        nibble = selector >> np.uint32(4 * i)
        byte = both >> (8 * (nibble & np.uint32(7))).astype(np.uint64) & np.uint64(255)
        # The nibble's top bit repeats the byte's sign instead.
        sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        byte = np.where(nibble & np.uint32(8), sign, byte)
        result |= byte.astype(np.uint32) << np.uint32(8 * i)
    return result


def approximation(program: Program, op: ir.Operation, text: str) -> Step | None:
    """The step of an instruction in inline PTX that works on registers alone."""
    function = assembly.register_instruction(text)
    if function is None:
        return None
    to, bits = values.dtype(op.results[0].type), assembly.input_bits(text)
    for i, x in enumerate(op.operands):
        own = 8 * values.dtype(x.type).itemsize
        if bits not in (None, own):
            raise NotModelled(
                f"{text!r} for registers of another width",
                f"${len(op.results) + i} of {own} bits, where its type has {bits}",
            )

    def compute(*inputs: np.ndarray) -> np.ndarray:
        raw = (np.ascontiguousarray(values.unsigned(x)) for x in inputs)
        return function(*raw).view(to)

    return applied(program, op, compute)
