# SPDX-License-Identifier: Apache-2.0
"""Conversions between element types, of single elements or register vectors.

As in lax: float to integer truncates towards zero, saturates, and maps NaN to 0;
integers wrap; every nonzero value, NaN included, converts to True.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import ml_dtypes
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_gpu.emitters import module, operations
from pallas_gpu.emitters.elements import arith, dtypes, narrow_floats, packed
from pallas_gpu.emitters.elements.arithmetic import before_broadcast
from pallas_gpu.emitters.elements.arithmetic import resize_float as _resize

_CmpF = arith.CmpFPredicate
_CmpI = arith.CmpIPredicate
_HIGH_HALF = -(2**16)
_EXTEND = "arith.extf"
_NARROWED_BY_LLVM = ("arith.addf", "arith.subf", "arith.mulf")


_Conversion = Callable[[ir.Value], ir.Value]


def convert_value(value: ir.Value, src: np.dtype, dst: np.dtype) -> ir.Value:
    """Converts a value; keeps its length.

    PTX: `cvt`, packed (`cvt.rn.bf16x2.f32`) for pairs of adjacent elements.

    Args:
      value: one element or a vector of `src`.
      src, dst: any two dtypes of kernels.
    """
    return conversion(src, dst)(value)


@functools.cache
def conversion(src: np.dtype, dst: np.dtype) -> _Conversion:
    """The function that converts values, as `convert_value`."""
    if src == dst:
        return lambda value: value
    if dtypes.is_packed(src) and dtypes.kind(src) in _INTEGERS:
        return functools.partial(_from_narrow_int, src=src, dst=dst)
    if dst in (dtypes.F16, dtypes.BF16) and src in (dtypes.I8, dtypes.U8):
        return functools.partial(_byte_to_half, src=src, dst=dst)
    return _by_kind(src, dst)


def _by_kind(src: np.dtype, dst: np.dtype) -> _Conversion:
    match dtypes.kind(src), dtypes.kind(dst):
        case ("float8" | "float4" | "exponent", _):
            return functools.partial(_from_narrow_float, src=src, dst=dst)
        case (_, "float8" | "float4" | "exponent"):
            return functools.partial(_to_narrow_float, src=src, dst=dst)
        case "float", "float":
            return _float_to_float(src, dst)
        case "float", "bool":
            return lambda x: arith.cmpf(_CmpF.UNE, x, dtypes.constant(0.0, src, x))
        case "float", _:
            return functools.partial(_float_to_int, src=src, dst=dst)
        case ("signed", "float"):
            return functools.partial(_resize, "arith.sitofp", dst)
        case (_, "float"):
            return functools.partial(_resize, "arith.uitofp", dst)
        case (_, "bool"):
            return lambda x: arith.cmpi(_CmpI.ne, x, dtypes.constant(0, src, x))
        case _:
            return _int_to_int(src, dst)


_INTEGERS = ("signed", "unsigned")


def _byte_to_half(value: ir.Value, src: np.dtype, dst: np.dtype) -> ir.Value:
    fast = packed.bytes_to_half(value, src, dst)
    return _by_kind(src, dst)(value) if fast is None else fast


def _from_narrow_int(value: ir.Value, src: np.dtype, dst: np.dtype) -> ir.Value:
    fast = packed.converted(value, src, dst)
    if fast is not None:
        return fast
    held = dtypes.I8 if dtypes.kind(src) == "signed" else dtypes.U8
    return convert_value(packed.extended(value, src), held, dst)


def _from_narrow_float(value: ir.Value, src: np.dtype, dst: np.dtype) -> ir.Value:
    match dtypes.kind(src):
        case "float8":
            half = narrow_floats.float8_to_half(value, src)
            return convert_value(half, dtypes.F16, dst)
        case "float4":
            wide = narrow_floats.from_float4(value)
        case _:
            wide = narrow_floats.from_exponent(value)
    return convert_value(wide, dtypes.F32, dst)


def _to_narrow_float(value: ir.Value, src: np.dtype, dst: np.dtype) -> ir.Value:
    if src == dtypes.F64:
        if dtypes.kind(dst) == "exponent":
            return narrow_floats.double_to_exponent(value)
        single = narrow_floats.from_double(value)
    else:
        # A 64-bit integer that float32 rounds is too large for any narrow float but
        # float8_e8m0fnu, whose one bit of precision a second rounding does not change.
        single = convert_value(value, src, dtypes.F32)
    match dtypes.kind(dst):
        case "float8":
            return narrow_floats.to_float8(single, dst)
        case "float4":
            return narrow_floats.to_float4(single)
        case _:
            return narrow_floats.to_exponent(single)


def _int_to_int(src: np.dtype, dst: np.dtype) -> _Conversion:
    if dtypes.bits(dst) == dtypes.bits(src):
        return lambda value: value
    if dtypes.bits(dst) < dtypes.bits(src):
        return functools.partial(_resize, "arith.trunci", dst)
    signed = dtypes.kind(src) == "signed"
    return functools.partial(_resize, "arith.extsi" if signed else "arith.extui", dst)


def _float_to_float(src: np.dtype, dst: np.dtype) -> _Conversion:
    narrowed = functools.partial(_resize, "arith.truncf", dst)
    if dtypes.bits(src) == dtypes.bits(dst):
        # float16 and bfloat16: float32 holds both exactly.
        return lambda value: narrowed(_resize("arith.extf", dtypes.F32, value))
    if dtypes.bits(src) > dtypes.bits(dst):
        if dst == dtypes.BF16:
            return lambda value: narrowed(_of_narrow_operands(value))
        return narrowed
    in_words = (src, dst) == (dtypes.BF16, dtypes.F32)

    def widened(value: ir.Value) -> ir.Value:
        if in_words and (dtypes.length(value) or 1) % 2 == 0:
            result = _extended_in_words(value)
        else:
            result = _resize("arith.extf", dst, value)
        module.current().extended[result] = value
        return result

    return widened


def _extended_in_words(value: ir.Value) -> ir.Value:
    """bfloat16 to float32: each word gives its low and its high half, by one operation.

    From `cvt.f32.bf16` ptxas makes two for the high half: it is taken out of the word
    before it is shifted.
    """
    words = dtypes.bitcast(value, dtypes.I32)
    low = arith.shli(words, dtypes.constant(16, dtypes.I32, words))
    high = arith.andi(words, dtypes.constant(_HIGH_HALF, dtypes.I32, words))
    count = dtypes.length(words) or 1
    order = [i for word in range(count) for i in (word, count + word)]
    halves = (dtypes.bitcast(half, dtypes.F32) for half in (low, high))
    return vector.shuffle(*halves, order)


def _of_narrow_operands(value: ir.Value) -> ir.Value:
    """A sum or product whose extended operands are extended by `arith.extf`.

    LLVM computes what is rounded to bfloat16 at once in bfloat16, two elements in an
    instruction, where the result is the same. It recognises the conversion only. With
    an operand of float32 it computes nothing narrower, but ptxas needs fewer registers:
    then this form replaces the words, unless something else uses them.
    """
    made = value.owner
    if isinstance(made, ir.Block) or made.name not in _NARROWED_BY_LLVM:
        return value
    narrow = [before_extension(operand, dtypes.BF16) for operand in made.operands]
    pairs = list(zip(made.operands, narrow, strict=True))
    is_narrow = all(
        source is not None or dtypes.is_constant(before_broadcast(operand))
        for operand, source in pairs
    )
    unused = all(len(list(o.uses)) == 1 for o, source in pairs if source is not None)
    if not any(narrow) or not (is_narrow or unused):
        return value
    wide = [
        operand if source is None else operations.create(_EXTEND, value.type, [source])
        for operand, source in pairs
    ]
    attributes = {"fastmath": made.operation.attributes["fastmath"]}
    return operations.create(made.name, value.type, wide, attributes)


def before_extension(value: ir.Value, dtype: np.dtype) -> ir.Value | None:
    """The value of which this one is the conversion to a wider float.

    None if it is not one of a narrower type `dtype`.
    """
    narrow = module.current().extended.get(value)
    if narrow is None:
        return None
    lanes = dtypes.length(narrow)
    element = narrow.type if lanes is None else narrow.type.element_type
    return narrow if element == dtypes.mlir_type(dtype) else None


def _float_to_int(value: ir.Value, src: np.dtype, dst: np.dtype) -> ir.Value:
    if src in (dtypes.F16, dtypes.BF16):
        value, src = _resize("arith.extf", dtypes.F32, value), dtypes.F32
    if dtypes.bits(dst) >= 32:
        return dtypes.per_lane(lambda x: _round_to_zero(x, src, dst), value)
    wide = dtypes.per_lane(lambda x: _round_to_zero(x, src, dtypes.I32), value)
    limits = ml_dtypes.iinfo(dst)
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
