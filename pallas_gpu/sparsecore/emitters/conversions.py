# SPDX-License-Identifier: Apache-2.0
"""Conversions between element types, also of other widths, and of bits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector
from jaxlib.mosaic.python import tpu

from pallas_gpu import errors
from pallas_gpu.sparsecore.emitters.values import (
    BOOL,
    F32,
    I32,
    WORD_BYTES,
    Array,
    constant,
    element_type,
    elements_of,
    is_float,
    vector_type,
    word_of,
)
from pallas_gpu.sparsecore.types import register_elements as register_elements

_INTEGER: dict[int, np.dtype] = {1: np.dtype(np.int8), 2: np.dtype(np.int16), 4: I32}


def astype(x: Array, dtype: np.dtype, lanes: int) -> Array:
    """Returns a value with its elements converted.

    Args:
      lanes: elements of 32 bits in a register.
    """
    if x.dtype == dtype:
        return x
    if x.dtype == BOOL:
        return astype(_numbers(x, dtype, lanes), dtype, lanes)
    if dtype == BOOL:
        return x.with_parts([_differs_from_zero(p, x.dtype) for p in x.parts], BOOL)
    is_integer = set(x.dtype.kind + dtype.kind) <= set("iu")
    in_place = not x.is_scalar or dtype.itemsize == WORD_BYTES
    if is_integer and in_place and x.dtype.itemsize == dtype.itemsize:
        return x.with_parts(x.parts, dtype)
    x = widened(x, lanes)
    word = F32 if is_float(dtype) else I32 if dtype != np.uint32 else dtype
    x = x.with_parts([_converted(p, x.dtype, word) for p in x.parts], word)
    if dtype.itemsize == WORD_BYTES:
        return x.with_parts(x.parts, dtype)
    return narrowed(x, dtype, lanes)


def _numbers(mask: Array, dtype: np.dtype, lanes: int) -> Array:
    """Returns bools as 1 and 0, of a type that a register has as many elements of."""
    if mask.is_scalar:
        wide = word_of(dtype)
    else:
        width = WORD_BYTES * lanes // elements_of(mask.parts[0])
        wide = dtype
        if dtype.itemsize != width:
            wide = _INTEGER[width]
    parts = []
    for part in mask.parts:
        t = element_type(wide)
        if not mask.is_scalar:
            t = vector_type(elements_of(part), wide)
        parts.append(arith.select(part, constant(1, t), constant(0, t)))
    return mask.with_parts(parts, wide)


def narrow_numbers(mask: Array, lanes: int) -> Array | None:
    """Returns bools of narrow elements as integers of their width; None for others."""
    if mask.is_scalar or elements_of(mask.parts[0]) == lanes:
        return None
    width = WORD_BYTES * lanes // elements_of(mask.parts[0])
    return _numbers(mask, _INTEGER[width], lanes)


def _differs_from_zero(part: ir.Value, dtype: np.dtype) -> ir.Value:
    zero = constant(0, part.type)
    if is_float(dtype):
        return arith.cmpf(arith.CmpFPredicate.UNE, part, zero)
    return arith.cmpi(arith.CmpIPredicate.ne, part, zero)


def _converted(part: ir.Value, before: np.dtype, after: np.dtype) -> ir.Value:
    """Converts elements of 32 bits."""
    if is_float(before) == is_float(after):
        return part
    t: ir.Type = element_type(after)
    if isinstance(part.type, ir.VectorType):
        t = vector_type(elements_of(part), after)
    if is_float(after):
        return (arith.uitofp if before.kind == "u" else arith.sitofp)(t, part)
    return (arith.fptoui if after.kind == "u" else arith.fptosi)(t, part)


# --- other widths ---------------------------------------------------------------------


def widened(x: Array, lanes: int) -> Array:
    """Returns a value with elements of 32 bits: floats, signed or unsigned integers."""
    if x.dtype.itemsize == WORD_BYTES:
        return x
    wide = word_of(x.dtype)
    if x.is_scalar:
        return x.with_parts(x.parts, wide)
    parts = [
        unpacked(part, i, wide, lanes, "compressed", x.dtype.kind == "u")
        for part in x.parts
        for i in range(WORD_BYTES // x.dtype.itemsize)
    ]
    return x.with_parts(parts, wide)


def narrowed(x: Array, dtype: np.dtype, lanes: int) -> Array:
    """Returns a value of 32-bit elements as elements of fewer bits."""
    if x.is_scalar and is_float(dtype):
        return x.with_parts([from_bits(to_bits(x.value, dtype), dtype)], dtype)
    if x.is_scalar:
        # By shifts: libtpu converts no narrow scalar to a float.
        others = constant(8 * (WORD_BYTES - dtype.itemsize), x.value.type)
        extend = arith.shrui if dtype.kind == "u" else arith.shrsi
        return x.with_parts([extend(arith.shli(x.value, others), others)], dtype)
    count = WORD_BYTES // dtype.itemsize
    if len(x.parts) % count:
        raise errors.ShapeError(
            "elements that do not fill a register of their type",
            expected=f"a multiple of {lanes * count} elements of {dtype.name}",
            got=f"{dtype.name}{list(x.shape)}",
            hint=f"convert {count} registers of 32-bit elements at a time",
        )
    groups = [x.parts[i : i + count] for i in range(0, len(x.parts), count)]
    return x.with_parts([packed(group, dtype, "compressed") for group in groups], dtype)


def to_bits(word: ir.Value, dtype: np.dtype) -> ir.Value:
    """Returns a scalar in a word as an integer of its own width."""
    t = ir.IntegerType.get_signless(8 * dtype.itemsize)
    if not is_float(dtype):
        return arith.trunci(t, word)
    # To the nearest bfloat16, of two to the even one; a NaN stays one.
    bits = arith.bitcast(element_type(I32), word)
    half = constant(16, bits.type)
    odd = arith.andi(arith.shrui(bits, half), constant(1, bits.type))
    more = arith.addi(odd, constant(0x7FFF, bits.type))
    is_nan = arith.cmpf(arith.CmpFPredicate.UNO, word, word)
    quiet = arith.ori(bits, constant(0x400000, bits.type))
    rounded = arith.select(is_nan, quiet, arith.addi(bits, more))
    return arith.trunci(t, arith.shrui(rounded, half))


def from_bits(bits: ir.Value, dtype: np.dtype) -> ir.Value:
    """Returns a scalar in a word, from an integer of its width."""
    word = element_type(I32)
    if not is_float(dtype):
        return (arith.extui if dtype.kind == "u" else arith.extsi)(word, bits)
    wide = arith.extui(word, bits)
    return arith.bitcast(element_type(F32), arith.shli(wide, constant(16, word)))


def packed(sources: Sequence[ir.Value], dtype: np.dtype, form: str) -> ir.Value:
    """Returns registers of wider elements in one, which has as many elements as all."""
    count = sum(elements_of(part) for part in sources)
    return tpu.pack_subelements(
        vector_type(count, dtype),
        list(sources),
        list(range(len(sources))),
        ir.Attribute.parse(f"#tpu.pack_format<{form}>"),
        unsigned_integers=True if dtype.kind == "u" else None,
    )


def unpacked(
    source: ir.Value, i: int, wide: np.dtype, lanes: int, form: str, unsigned: bool
) -> ir.Value:
    """Returns the i-th part of a register's elements, as wider elements.

    Args:
      lanes: the number of these elements.
    """
    return tpu.unpack_subelements(
        vector_type(lanes, wide),
        source,
        i,
        ir.Attribute.parse(f"#tpu.pack_format<{form}>"),
        unsigned_integers=True if unsigned else None,
    )


# --- masks ----------------------------------------------------------------------------


def mask_of(mask: Array, elements: int, lanes: int) -> Array:
    """Returns bools in registers of as many elements as those they are used with."""
    if mask.is_scalar or elements_of(mask.parts[0]) == elements:
        return mask
    dtype = _INTEGER[WORD_BYTES * lanes // elements]
    return astype(astype(mask, dtype, lanes), BOOL, lanes)


# --- bits -----------------------------------------------------------------------------


def bitcast(x: Array, dtype: np.dtype, shape: Sequence[int]) -> Array:
    """Returns the bits as elements of another type."""
    same = element_type(x.dtype) == element_type(dtype)
    parts = x.parts if same else [_bitcast(part, x.dtype, dtype) for part in x.parts]
    return Array(tuple(shape), dtype, tuple(parts))


def _bitcast(part: ir.Value, before: np.dtype, after: np.dtype) -> ir.Value:
    if not isinstance(part.type, ir.VectorType):
        if before.itemsize < WORD_BYTES:
            return from_bits(to_bits(part, before), after)
        return arith.bitcast(element_type(after), part)
    count = elements_of(part) * before.itemsize // after.itemsize
    return vector.bitcast(vector_type(count, after), part)


def registers_of(shape: Sequence[int], dtype: np.dtype, lanes: int) -> int:
    """Returns how many registers a value takes; 0 for a scalar."""
    size = math.prod(shape)
    return 0 if size == 1 else size // register_elements(dtype, lanes)
