# SPDX-License-Identifier: Apache-2.0
"""The table of elementwise operations: a row defines all facts of one operation.

A row has lax's name, the relevant parameters, and for each kind of dtype an emitter and
its cost. The lowering rules, the cost model of layout inference, the dtypes in error
messages and the documentation's coverage table are derived from it.
"""

from __future__ import annotations

import math as pymath
from collections.abc import Iterable, Mapping
from typing import TypedDict

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu import errors
from pallas_gpu.emitters import operations
from pallas_gpu.emitters.elements import arith, dtypes
from pallas_gpu.emitters.elements import arithmetic as emitters
from pallas_gpu.emitters.elements.arithmetic import Emitter
from pallas_gpu.emitters.elements.convert import conversion
from pallas_gpu.emitters.elements.row import Case, Row

_CmpF = arith.CmpFPredicate
_CmpI = arith.CmpIPredicate
_LOG2_E = pymath.log2(pymath.e)
# PTX ISA, "lg2": the error from 0.5 to 2.
_LG2 = 2**-22


def by_name(rows: Iterable[Row]) -> dict[str, Row]:
    """The rows by name."""
    table: dict[str, Row] = {}
    for row in rows:
        if row.name in table:
            raise errors.InternalError(f"duplicate row of the table: {row.name}")
        table[row.name] = row
    return table


def lookup(name: str) -> Row:
    """The row of an operation."""
    row = TABLE.get(name) or _COMBINING.get(name)
    if row is None:
        raise errors.UnsupportedError(
            f"GPU kernels have no elementwise operation {name!r}",
            expected=sorted(TABLE),
        )
    return row


def emit(name: str, dtype: np.dtype, *values: ir.Value, **params) -> ir.Value:
    """Emits an operation of the table.

    Args:
      name: lax's name of the primitive.
      dtype: of the operands (of the cases, for `select_n`).
      values: single elements, or vectors of one length.
      params: `approx_math` allows the hardware's approximations for f32; `to` is the
        dtype of the result if the row does not determine it; the others are lax's
        (`y` of `integer_pow`, `rounding_method`).

    Raises:
      UnsupportedError: there is no such operation.
      DTypeError: the operation does not support the dtype.
    """
    return lookup(name).emitter(dtype, **params)(*values)


# --- pieces of rows -------------------------------------------------------------------


def _plain(operation: str) -> Emitter:
    return emitters.plain(operations.same_type(operation))


def _op(operation: str) -> Case:
    return Case(_plain(operation))


class _Ints(TypedDict):
    signed: Case
    unsigned: Case


def _ints(emit: Emitter) -> _Ints:
    """One emitter for signed and unsigned integers."""
    return {"signed": Case(emit), "unsigned": Case(emit)}


def _comparison(name: str, float_, signed, unsigned) -> Row:
    below = Case(emitters.compare(arith.cmpi, unsigned))
    return Row(
        name,
        floating=Case(emitters.compare(arith.cmpf, float_)),
        signed=Case(emitters.compare(arith.cmpi, signed)),
        unsigned=below,
        boolean=below,
        result="bool",
    )


def _bitwise(name: str, operation: str) -> Row:
    ints = _ints(_plain(operation))
    return Row(name, **ints, boolean=_op(operation), low_bits=True)


def _function(name: str, operation: str, approx: Case | None = None) -> Row:
    return Row(name, floating=_op(operation), widen=True, approx=approx)


def _special(instruction: str, rtol: float | None = None) -> Case:
    return Case(emitters.plain(emitters.approx(instruction)), rtol=rtol)


def _bitcast(dtype: np.dtype, value: ir.Value, *, to: np.dtype) -> ir.Value:
    return dtypes.bitcast(value, to)


_ADD, _SUB, _MUL = (
    Case(emitters.plain(op)) for op in (emitters.addf, emitters.subf, emitters.mulf)
)
_CONVERT = Case(emitters.Bound(lambda dtype, to: conversion(dtype, to)))
_BITCAST = Case(_bitcast)
_SELECT = Case(emitters.select_n)
_NOT = Case(emitters.bitwise_not)

# --- the table ------------------------------------------------------------------------

ROWS: tuple[Row, ...] = (
    # Arithmetic.
    Row(
        "add",
        floating=_ADD,
        **_ints(_plain("arith.addi")),
        boolean=_op("arith.ori"),
        low_bits=True,
    ),
    # The sum of two cotangents, in derivatives of array code.
    Row("add_any", floating=_ADD, **_ints(_plain("arith.addi")), low_bits=True),
    Row(
        "sub",
        floating=Case(emitters.plain(emitters.subf)),
        **_ints(_plain("arith.subi")),
        low_bits=True,
    ),
    Row(
        "mul",
        floating=_MUL,
        **_ints(_plain("arith.muli")),
        boolean=_op("arith.andi"),
        low_bits=True,
    ),
    Row(
        "div",
        floating=Case(emitters.divide_float),
        signed=Case(
            emitters.guarded(arith.divsi, emitters.all_ones, emitters.negate_int)
        ),
        unsigned=Case(emitters.guarded(arith.divui, emitters.all_ones, None)),
        widen=True,
    ),
    Row(
        "rem",
        floating=Case(emitters.rem_float),
        signed=Case(emitters.guarded(arith.remsi, emitters.identity, emitters.zero)),
        unsigned=Case(emitters.guarded(arith.remui, emitters.identity, None)),
        widen=True,
    ),
    Row(
        "max",
        floating=_op("arith.maximumf"),
        signed=_op("arith.maxsi"),
        unsigned=_op("arith.maxui"),
        boolean=_op("arith.ori"),
    ),
    Row(
        "min",
        floating=_op("arith.minimumf"),
        signed=_op("arith.minsi"),
        unsigned=_op("arith.minui"),
        boolean=_op("arith.andi"),
    ),
    Row(
        "neg",
        floating=_op("arith.negf"),
        **_ints(emitters.negate_int),
        low_bits=True,
    ),
    Row(
        "abs",
        floating=Case(emitters.abs_float),
        signed=_op("math.absi"),
        unsigned=Case(emitters.identity),
    ),
    Row(
        "sign",
        floating=Case(emitters.sign_float),
        signed=Case(emitters.sign_signed),
        unsigned=Case(emitters.sign_unsigned),
    ),
    Row(
        "square",
        floating=Case(emitters.square(emitters.mulf)),
        **_ints(emitters.square(arith.muli)),
        low_bits=True,
    ),
    # In the derivative of tanh.
    Row("one_minus_square", floating=Case(emitters.one_minus_square), widen=True),
    Row(
        "integer_pow",
        floating=Case(emitters.integer_pow(emitters.mulf)),
        **_ints(emitters.integer_pow(arith.muli)),
        params=("y",),
        low_bits=True,
    ),
    Row(
        "clamp",
        floating=Case(emitters.clamp(arith.maximumf, arith.minimumf)),
        signed=Case(emitters.clamp(arith.maxsi, arith.minsi)),
        unsigned=Case(emitters.clamp(arith.maxui, arith.minui)),
        typed_by=-1,
    ),
    # Bits.
    _bitwise("and", "arith.andi"),
    _bitwise("or", "arith.ori"),
    _bitwise("xor", "arith.xori"),
    Row("not", signed=_NOT, unsigned=_NOT, boolean=_NOT, low_bits=True),
    Row("shift_left", **_ints(emitters.shift(arith.shli))),
    Row(
        "shift_right_logical",
        **_ints(emitters.shift(arith.shrui)),
        extension="unsigned",
    ),
    Row(
        "shift_right_arithmetic",
        **_ints(emitters.shift(arith.shrsi, keeps_sign=True)),
        extension="signed",
    ),
    Row("population_count", **_ints(_plain("math.ctpop")), extension="unsigned"),
    Row("clz", **_ints(_plain("math.ctlz")), extension="unsigned"),
    # Comparisons and choices.
    _comparison("eq", _CmpF.OEQ, _CmpI.eq, _CmpI.eq),
    _comparison("ne", _CmpF.UNE, _CmpI.ne, _CmpI.ne),
    _comparison("lt", _CmpF.OLT, _CmpI.slt, _CmpI.ult),
    _comparison("le", _CmpF.OLE, _CmpI.sle, _CmpI.ule),
    _comparison("gt", _CmpF.OGT, _CmpI.sgt, _CmpI.ugt),
    _comparison("ge", _CmpF.OGE, _CmpI.sge, _CmpI.uge),
    Row("is_finite", floating=Case(emitters.is_finite), result="bool"),
    Row(
        "select_n",
        floating=_SELECT,
        signed=_SELECT,
        unsigned=_SELECT,
        boolean=_SELECT,
        typed_by=-1,
        narrow_float=_SELECT,
        low_bits=True,
    ),
    # Conversions.
    Row(
        "convert_element_type",
        floating=_CONVERT,
        signed=_CONVERT,
        unsigned=_CONVERT,
        boolean=_CONVERT,
        narrow_float=_CONVERT,
        result="any",
    ),
    # To a type of the same width; the others are composites.
    Row(
        "bitcast_convert_type",
        floating=_BITCAST,
        signed=_BITCAST,
        unsigned=_BITCAST,
        narrow_float=_BITCAST,
        result="any",
    ),
    _function("floor", "math.floor"),
    _function("ceil", "math.ceil"),
    Row(
        "round",
        floating=Case(emitters.round_float),
        params=("rounding_method",),
        widen=True,
    ),
    # Functions.
    _function("pow", "math.powf"),
    Row(
        "exp",
        floating=Case(emitters.exp_float),
        widen=True,
        # The product with log2(e), up to 128, is rounded.
        approx=Case(emitters.scaled_input(emitters.ex2, _LOG2_E), rtol=2**-17),
    ),
    _function("exp2", "math.exp2", Case(emitters.plain(emitters.ex2), rtol=2**-22)),
    _function("expm1", "math.expm1"),
    _function(
        "log",
        "math.log",
        Case(
            emitters.scaled_output(emitters.lg2, pymath.log(2)), rtol=2**-21, atol=_LG2
        ),
    ),
    _function(
        "log2", "math.log2", Case(emitters.plain(emitters.lg2), rtol=2**-22, atol=_LG2)
    ),
    _function("log1p", "math.log1p"),
    _function("sqrt", "math.sqrt", _special("sqrt.approx.ftz.f32", 2**-23)),
    _function("rsqrt", "math.rsqrt", _special("rsqrt.approx.ftz.f32", 2**-22)),
    _function("cbrt", "math.cbrt"),
    _function("tanh", "math.tanh", _special("tanh.approx.f32", 2**-11)),
    Row(
        "logistic",
        floating=Case(emitters.logistic),
        widen=True,
        approx=Case(emitters.logistic_approx, rtol=2**-16),
    ),
    _function("sin", "math.sin", _special("sin.approx.ftz.f32")),
    _function("cos", "math.cos", _special("cos.approx.ftz.f32")),
    _function("tan", "math.tan"),
    _function("asin", "math.asin"),
    _function("acos", "math.acos"),
    _function("atan", "math.atan"),
    _function("atan2", "math.atan2"),
    _function("sinh", "math.sinh"),
    _function("cosh", "math.cosh"),
    _function("asinh", "math.asinh"),
    _function("acosh", "math.acosh"),
    _function("atanh", "math.atanh"),
    _function("erf", "math.erf"),
    _function("erfc", "math.erfc"),
)
TABLE: Mapping[str, Row] = by_name(ROWS)
# Operations of scans that lax has no primitive for.
_COMBINING: Mapping[str, Row] = by_name(
    [Row("logaddexp", floating=Case(emitters.logaddexp), widen=True)]
)
