# SPDX-License-Identifier: Apache-2.0
"""Conversions between element types, of single elements or register vectors.

As in lax: float to integer truncates towards zero, saturates, and maps NaN to 0;
integers wrap; every nonzero value, NaN included, converts to True.
"""

from __future__ import annotations

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_gpu import errors
from pallas_gpu.mosaic.elements import dtypes
from pallas_gpu.mosaic.elements.arithmetic import resize_float as _resize

_CmpF = arith.CmpFPredicate
_CmpI = arith.CmpIPredicate


def convert_value(value: ir.Value, src: np.dtype, dst: np.dtype) -> ir.Value:
    """Converts a value; keeps its length.

    PTX: `cvt`, packed (`cvt.rn.bf16x2.f32`) for pairs of adjacent elements.

    Args:
      value: one element or a vector of `src`.
      src, dst: any two dtypes of kernels, except that none converts to
        float8_e8m0fnu.

    Raises:
      UnsupportedError: there is no conversion between the two.
    """
    require_conversion(src, dst)
    if src == dst:
        return value
    match dtypes.kind(src), dtypes.kind(dst):
        case ("exponent", _):
            return convert_value(_from_exponent(value), dtypes.F32, dst)
        case ("float8", "float") | ("float", "float8") | ("float8", "float8"):
            return _convert_float8(value, src, dst)
        case ("float8", _):
            return convert_value(
                _convert_float8(value, src, dtypes.F32), dtypes.F32, dst
            )
        case (_, "float8"):
            single = convert_value(value, src, dtypes.F32)
            return _convert_float8(single, dtypes.F32, dst)
        case "float", "float":
            return _float_to_float(value, src, dst)
        case "float", "bool":
            zero = dtypes.constant(0.0, src, value)
            return arith.cmpf(_CmpF.UNE, value, zero)
        case "float", _:
            return _float_to_int(value, src, dst)
        case ("signed", "float"):
            return _resize("arith.sitofp", dst, value)
        case (_, "float"):
            return _resize("arith.uitofp", dst, value)
        case (_, "bool"):
            return arith.cmpi(_CmpI.ne, value, dtypes.constant(0, src, value))
        case _:
            return _int_to_int(value, src, dst)


def require_conversion(src: np.dtype, dst: np.dtype) -> None:
    """Raises UnsupportedError if there is no conversion between two dtypes."""
    if dtypes.kind(dst) != "exponent" or src == dst:
        return
    raise errors.UnsupportedError(
        f"Conversion from {src} to {dst} is not supported",
        expected="float8_e8m0fnu as the source of a conversion only",
        got=f"{src} to {dst}",
        hint="convert the array outside the kernel",
    )


def _int_to_int(value: ir.Value, src: np.dtype, dst: np.dtype) -> ir.Value:
    if dtypes.bits(dst) == dtypes.bits(src):
        return value
    if dtypes.bits(dst) < dtypes.bits(src):
        return _resize("arith.trunci", dst, value)
    signed = dtypes.kind(src) == "signed"
    return _resize("arith.extsi" if signed else "arith.extui", dst, value)


def _float_to_float(value: ir.Value, src: np.dtype, dst: np.dtype) -> ir.Value:
    if dtypes.bits(src) == dtypes.bits(dst):
        # float16 and bfloat16: float32 holds both exactly.
        value = _resize("arith.extf", dtypes.F32, value)
        return _resize("arith.truncf", dst, value)
    if dtypes.bits(src) < dtypes.bits(dst):
        return _resize("arith.extf", dst, value)
    return _resize("arith.truncf", dst, value)


def _float_to_int(value: ir.Value, src: np.dtype, dst: np.dtype) -> ir.Value:
    if src in (dtypes.F16, dtypes.BF16):
        value, src = _resize("arith.extf", dtypes.F32, value), dtypes.F32
    if dtypes.bits(dst) >= 32:
        return dtypes.per_lane(lambda x: _round_to_zero(x, src, dst), value)
    wide = dtypes.per_lane(lambda x: _round_to_zero(x, src, dtypes.I32), value)
    limits = np.iinfo(dst)
    low = dtypes.constant(int(limits.min), dtypes.I32, wide)
    high = dtypes.constant(int(limits.max), dtypes.I32, wide)
    clamped = arith.minsi(arith.maxsi(wide, low), high)
    return _resize("arith.trunci", dst, clamped)


def _round_to_zero(element: ir.Value, src: np.dtype, dst: np.dtype) -> ir.Value:
    """PTX: `cvt.rzi`, which saturates; LLVM's fptosi is undefined out of range."""
    letter = "d" if src == dtypes.F64 else "f"
    sign = "" if dtypes.kind(dst) == "signed" else "u"
    size = "ll" if dtypes.bits(dst) == 64 else "i"
    result = llvm.call_intrinsic(
        dtypes.mlir_type(dst), f"llvm.nvvm.{letter}2{sign}{size}.rz", [element], [], []
    )
    if src == dtypes.F32 and dtypes.bits(dst) == 32:
        return result
    # NaN converts to 0 only from f32 to 32 bits (PTX ISA, cvt, integer notes).
    is_nan = arith.cmpf(_CmpF.UNO, element, element)
    return arith.select(is_nan, dtypes.constant(0, dst, element), result)


# --- float8 ---------------------------------------------------------------------------

_PTX_NAME = {dtypes.F8_E4M3: "e4m3x2", dtypes.F8_E5M2: "e5m2x2"}


def _convert_float8(value: ir.Value, src: np.dtype, dst: np.dtype) -> ir.Value:
    """PTX: `cvt.rn.f16x2.e4m3x2` and `cvt.rn.satfinite.e4m3x2.f32`, by pairs."""
    if src in _PTX_NAME:
        halves = _by_pairs(value, lambda pair: _from_float8(pair, src))
        return convert_value(halves, dtypes.F16, dst)
    single = convert_value(value, src, dtypes.F32)
    return _by_pairs(single, lambda pair: _to_float8(pair, dst))


def _by_pairs(value: ir.Value, emit) -> ir.Value:
    lanes = dtypes.length(value)
    if lanes is None or lanes % 2:
        elements = [value] if lanes is None else _elements(value)
        results = [dtypes.extract(emit(dtypes.pack([e, e])), 0) for e in elements]
        return results[0] if lanes is None else dtypes.pack(results)
    elements = _elements(value)
    pairs = [dtypes.pack(elements[i : i + 2]) for i in range(0, lanes, 2)]
    return dtypes.pack([e for pair in pairs for e in _elements(emit(pair))])


def _elements(value: ir.Value) -> list[ir.Value]:
    return [dtypes.extract(value, i) for i in range(dtypes.length(value) or 0)]


def _from_float8(pair: ir.Value, src: np.dtype) -> ir.Value:
    packed = dtypes.extract(dtypes.bitcast(pair, dtypes.I16), 0)
    word = llvm.inline_asm(
        ir.IntegerType.get_signless(32),
        [packed],
        f"cvt.rn.f16x2.{_PTX_NAME[src]} $0, $1;",
        "=r,h",
    )
    return dtypes.bitcast(dtypes.splat(word, 1), dtypes.F16)


def _to_float8(pair: ir.Value, dst: np.dtype) -> ir.Value:
    # The first source operand becomes the upper half of the result.
    packed = llvm.inline_asm(
        ir.IntegerType.get_signless(16),
        [dtypes.extract(pair, 1), dtypes.extract(pair, 0)],
        f"cvt.rn.satfinite.{_PTX_NAME[dst]}.f32 $0, $1, $2;",
        "=h,f,f",
    )
    return dtypes.bitcast(dtypes.splat(packed, 1), dst)


# --- float8_e8m0fnu -------------------------------------------------------------------


def _from_exponent(value: ir.Value) -> ir.Value:
    """2**(bits - 127) as f32: the bits are its exponent; 255 is NaN in both."""
    wide = _int_to_int(value, dtypes.U8, dtypes.U32)
    at_exponent = arith.shli(wide, dtypes.constant(23, dtypes.U32, value))
    # The exponent 0 of f32 is that of subnormals: 2**-127 is half its least normal.
    subnormal = dtypes.constant(1 << 22, dtypes.U32, value)
    is_zero = arith.cmpi(_CmpI.eq, wide, dtypes.constant(0, dtypes.U32, value))
    is_nan = arith.cmpi(_CmpI.eq, wide, dtypes.constant(255, dtypes.U32, value))
    nan = dtypes.constant(0x7FC00000, dtypes.U32, value)
    bits = arith.select(is_nan, nan, arith.select(is_zero, subnormal, at_exponent))
    return dtypes.bitcast(bits, dtypes.F32)
