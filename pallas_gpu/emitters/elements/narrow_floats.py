# SPDX-License-Identifier: Apache-2.0
"""Conversions of floats of 4 and 8 bits: float8, float4_e2m1fn, float8_e8m0fnu.

In registers they are bytes. Rounding, NaN and what is too large are as in lax, which
differs from PTX's `cvt.satfinite`: float8_e4m3fn has NaN for what is too large, and
float8_e5m2 infinity.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_gpu.emitters.elements import arith, dtypes
from pallas_gpu.emitters.elements.arithmetic import resize_float

_CmpF = arith.CmpFPredicate
_CmpI = arith.CmpIPredicate


def from_double(value: ir.Value) -> ir.Value:
    """f64 to f32, rounded to odd: a second rounding then gives that of the f64.

    The last bit is set if the f32 is not exact, so no value lies halfway between two
    narrower floats that did not before (Boldo and Melquiond, "When double rounding is
    odd").
    """
    return dtypes.per_lane(_round_to_odd, value)


def _round_to_odd(element: ir.Value) -> ir.Value:
    towards_zero = llvm.call_intrinsic(
        ir.F32Type.get(), "llvm.nvvm.d2f.rz", [element], [], []
    )
    back = resize_float("arith.extf", dtypes.F64, towards_zero)
    inexact = arith.cmpf(_CmpF.UNE, back, element)
    odd = arith.extui(dtypes.mlir_type(dtypes.U32), inexact)
    bits = arith.ori(dtypes.bitcast(towards_zero, dtypes.U32), odd)
    return dtypes.bitcast(bits, dtypes.F32)


# --- float8_e4m3fn, float8_e5m2 -------------------------------------------------------

_PTX_NAME = {dtypes.F8_E4M3: "e4m3x2", dtypes.F8_E5M2: "e5m2x2"}
# What rounds to more than the largest number. The type's largest numbers are 448 and
# 57344, the next ones would be 480 and 65536; ties go to the even mantissa.
_TOO_LARGE = {
    dtypes.F8_E4M3: (_CmpF.OGT, 464.0),
    dtypes.F8_E5M2: (_CmpF.OGE, 61440.0),
}


def float8_to_half(value: ir.Value, src: np.dtype) -> ir.Value:
    """float8 as f16, exactly. PTX: `cvt.rn.f16x2.e4m3x2`, by pairs."""
    lanes = dtypes.length(value)
    if lanes is None:
        byte = resize_float("arith.extui", dtypes.U16, value)
        half = resize_float("arith.trunci", dtypes.U16, _from_float8(byte, src))
        return dtypes.bitcast(half, dtypes.F16)

    def emit(pair: ir.Value) -> ir.Value:
        word = dtypes.extract(dtypes.bitcast(pair, dtypes.I16), 0)
        return dtypes.bitcast(dtypes.splat(_from_float8(word, src), 1), dtypes.F16)

    return _by_pairs(value, emit)


def to_float8(value: ir.Value, dst: np.dtype) -> ir.Value:
    """f32 as float8. PTX: `cvt.rn.satfinite.e4m3x2.f32`, by pairs."""
    if dtypes.length(value) is None:
        return resize_float("arith.trunci", dst, _to_float8(value, value, dst))

    def emit(pair: ir.Value) -> ir.Value:
        packed = _to_float8(dtypes.extract(pair, 0), dtypes.extract(pair, 1), dst)
        return dtypes.bitcast(dtypes.splat(packed, 1), dst)

    return _by_pairs(value, emit)


def _by_pairs(value: ir.Value, emit: Callable[[ir.Value], ir.Value]) -> ir.Value:
    """Applies an emitter of vectors of two elements."""
    elements = _elements(value)
    if len(elements) % 2:
        single = [dtypes.extract(emit(dtypes.pack([e, e])), 0) for e in elements]
        return dtypes.pack(single)
    pairs = [dtypes.pack(elements[i : i + 2]) for i in range(0, len(elements), 2)]
    return dtypes.pack([e for pair in pairs for e in _elements(emit(pair))])


def _elements(value: ir.Value) -> list[ir.Value]:
    return [dtypes.extract(value, i) for i in range(dtypes.length(value) or 0)]


def _from_float8(packed: ir.Value, src: np.dtype) -> ir.Value:
    """Two halves in an i32, of two float8 in an i16."""
    return llvm.inline_asm(
        ir.IntegerType.get_signless(32),
        [packed],
        f"cvt.rn.f16x2.{_PTX_NAME[src]} $0, $1;",
        "=r,h",
    )


def _to_float8(low: ir.Value, high: ir.Value, dst: np.dtype) -> ir.Value:
    """Two float8 in an i16, of two f32."""
    # The first source operand becomes the upper half of the result.
    saturated = llvm.inline_asm(
        ir.IntegerType.get_signless(16),
        [high, low],
        f"cvt.rn.satfinite.{_PTX_NAME[dst]}.f32 $0, $1, $2;",
        "=h,f,f",
    )
    # The code after that of the largest number is NaN's, or infinity's.
    steps = [
        arith.select(_too_large(x, dst), dtypes.constant(step, dtypes.I16), _none())
        for x, step in ((low, 1), (high, 1 << 8))
    ]
    return arith.addi(saturated, arith.ori(*steps))


def _none() -> ir.Value:
    return dtypes.constant(0, dtypes.I16)


def _too_large(element: ir.Value, dst: np.dtype) -> ir.Value:
    predicate, limit = _TOO_LARGE[dst]
    bits = dtypes.bitcast(element, dtypes.I32)
    magnitude = arith.andi(bits, dtypes.constant(0x7FFFFFFF, dtypes.I32))
    size = dtypes.bitcast(magnitude, dtypes.F32)
    return arith.cmpf(predicate, size, dtypes.constant(limit, dtypes.F32))


# --- float8_e8m0fnu -------------------------------------------------------------------


def from_exponent(value: ir.Value) -> ir.Value:
    """2**(bits - 127) as f32: the bits are its exponent; 255 is NaN in both."""
    wide = resize_float("arith.extui", dtypes.U32, value)
    at_exponent = arith.shli(wide, dtypes.constant(23, dtypes.U32, value))
    # The exponent 0 of f32 is that of subnormals: 2**-127 is half its least normal.
    subnormal = dtypes.constant(1 << 22, dtypes.U32, value)
    is_zero = arith.cmpi(_CmpI.eq, wide, dtypes.constant(0, dtypes.U32, value))
    is_nan = arith.cmpi(_CmpI.eq, wide, dtypes.constant(255, dtypes.U32, value))
    nan = dtypes.constant(0x7FC00000, dtypes.U32, value)
    bits = arith.select(is_nan, nan, arith.select(is_zero, subnormal, at_exponent))
    return dtypes.bitcast(bits, dtypes.F32)


def to_exponent(value: ir.Value) -> ir.Value:
    """f32 as a power of two: the nearest exponent, the higher one of a tie.

    As lax: zero, what is negative and what is too large are NaN, and subnormal numbers
    up to 2**-127 are 2**-127.
    """
    bits = dtypes.bitcast(value, dtypes.U32)
    half = dtypes.constant(1 << 22, dtypes.U32, value)
    exponent = arith.shrui(
        arith.addi(bits, half), dtypes.constant(23, dtypes.U32, value)
    )
    zero = dtypes.constant(0, dtypes.U32, value)
    least = arith.cmpi(_CmpI.ule, bits, half)
    code = arith.select(least, zero, exponent)
    # Zero wraps; infinity, NaN and negative numbers have larger bits than any other.
    before = arith.subi(bits, dtypes.constant(1, dtypes.U32, value))
    last = dtypes.constant(0x7F7FFFFF - 1, dtypes.U32, value)
    is_nan = arith.cmpi(_CmpI.ugt, before, last)
    code = arith.select(is_nan, dtypes.constant(255, dtypes.U32, value), code)
    return resize_float("arith.trunci", dtypes.F8_E8M0, code)


def double_to_exponent(value: ir.Value) -> ir.Value:
    """f64 as a power of two; as lax, what is less than 2**-127 is NaN."""
    code = to_exponent(from_double(value))
    least = dtypes.constant(2.0**-127, dtypes.F64, value)
    below = arith.cmpf(_CmpF.ULT, value, least)
    nan = dtypes.constant(np.nan, dtypes.F8_E8M0, value)
    return arith.select(below, nan, code)


# --- float4_e2m1fn --------------------------------------------------------------------


def from_float4(value: ir.Value) -> ir.Value:
    """float4_e2m1fn, in the low 4 bits of a byte, as f32.

    The codes are those of 0, 0.5, 1, 1.5, 2, 3, 4, 6, with the sign as bit 3.
    """
    word = resize_float("arith.extui", dtypes.U32, value)

    def const(number: int) -> ir.Value:
        return dtypes.constant(number, dtypes.U32, value)

    code = arith.andi(word, const(7))
    # From 1 on, a code is an exponent above its bias of 1, and a bit of the mantissa.
    normal = arith.addi(arith.shli(code, const(22)), const(126 << 23))
    half = arith.select(
        arith.cmpi(_CmpI.eq, code, const(1)), const(126 << 23), const(0)
    )
    is_normal = arith.cmpi(_CmpI.ugt, code, const(1))
    magnitude = arith.select(is_normal, normal, half)
    sign = arith.shli(arith.andi(word, const(8)), const(28))
    return dtypes.bitcast(arith.ori(magnitude, sign), dtypes.F32)


def to_float4(value: ir.Value) -> ir.Value:
    """f32 as float4_e2m1fn, to nearest even; as lax, at most 6, and NaN is -0."""
    bits = dtypes.bitcast(value, dtypes.U32)

    def const(number: int) -> ir.Value:
        return dtypes.constant(number, dtypes.U32, value)

    magnitude = arith.andi(bits, const(0x7FFFFFFF))
    # One bit of the mantissa remains: ties to even add the last remaining bit.
    last = arith.andi(arith.shrui(magnitude, const(22)), const(1))
    rounded = arith.addi(arith.addi(magnitude, const((1 << 21) - 1)), last)
    normal = arith.subi(arith.shrui(rounded, const(22)), const(252))
    normal = arith.minui(normal, const(7))
    # Below 1 the codes count halves: of 2**22 the last bit of the mantissa is 0.5.
    size = dtypes.bitcast(magnitude, dtypes.F32)
    shifted = arith.addf(size, dtypes.constant(float(1 << 22), dtypes.F32, value))
    small = arith.andi(dtypes.bitcast(shifted, dtypes.U32), const(3))
    below = arith.cmpi(_CmpI.ult, magnitude, const(127 << 23))
    code = arith.select(below, small, normal)
    sign = arith.andi(arith.shrui(bits, const(28)), const(8))
    is_nan = arith.cmpi(_CmpI.ugt, magnitude, const(0x7F800000))
    code = arith.select(is_nan, const(8), arith.ori(code, sign))
    return resize_float("arith.trunci", dtypes.F4_E2M1, code)
