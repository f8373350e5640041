# SPDX-License-Identifier: Apache-2.0
"""A program for each row of the elementwise table and each dtype that it has.

What a program expects is computed by NumPy from lax's definition of the operation.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from jax import lax
from jax.interpreters import ad

from pallas_gpu.emitters import elementwise, gmem
from pallas_gpu.emitters.elements import dtypes, table
from pallas_gpu.emitters.elements.row import NARROW_FLOATS
from tests.support.programs import Program

SIZE = 256
# All dtypes by kind; the first one is that of a kind's mutants.
DTYPES: dict[str, tuple[str, ...]] = {
    "float": ("float32", "float16", "bfloat16", "float64"),
    "signed": ("int32", "int8", "int16", "int64", "int4", "int2"),
    "unsigned": ("uint32", "uint8", "uint16", "uint64", "uint4", "uint2"),
    "bool": ("bool",),
    "float8": ("float8_e4m3fn", "float8_e5m2"),
    "float4": ("float4_e2m1fn",),
    "exponent": ("float8_e8m0fnu",),
}
BINARY = {
    *("add", "add_any", "sub", "mul", "div", "rem", "max", "min", "pow", "atan2"),
    *("and", "or", "xor", "shift_left", "shift_right_logical"),
    *("shift_right_arithmetic", "eq", "ne", "lt", "le", "gt", "ge"),
}
TERNARY = {"clamp", "select_n"}
PARAMS: dict[str, tuple[dict[str, int], ...]] = {
    "integer_pow": ({"y": 3}, {"y": -2}, {"y": 0}, {"y": 10}),
    "round": ({"rounding_method": 0}, {"rounding_method": 1}),
}
TOLERANCE = {"float64": 1e-14, "float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}
_SPECIAL = (0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 0.5, 1.5, 2.5, -2.5)


def arity(name: str) -> int:
    """How many operands the operation has."""
    return 3 if name in TERNARY else 2 if name in BINARY else 1


def sample(dtype: str, seed: int) -> np.ndarray:
    """Ordinary and awkward values, the same in every process."""
    rng, target = np.random.default_rng(seed), np.dtype(dtype)
    kind, width = dtypes.kind(target), dtypes.stored_bits(target)
    if kind == "bool":
        return rng.integers(0, 2, SIZE).astype(bool)
    if width < 8 or kind == "exponent":
        # All values, and all pairs of those of 4 bits.
        codes = np.arange(SIZE) >> width * (seed % 2) if width < 8 else np.arange(SIZE)
        return _of_codes(codes if width < 8 else rng.permutation(codes), target)
    if kind in ("signed", "unsigned"):
        limits = np.iinfo(target)
        wide = rng.integers(limits.min, limits.max, SIZE, target, endpoint=True)
        small = rng.integers(0, 12, SIZE).astype(target)
        flat = np.where(rng.random(SIZE) < 0.5, wide, small)
        ends = (0, 1, 2, 3, limits.max, limits.min, limits.max - 1, 7, 31, 33)
        special = np.array([min(v, limits.max) for v in ends], target)
        if kind == "signed":
            special = np.append(special, target.type(-1))
    else:
        flat = (rng.normal(size=SIZE) * 3).astype(target)
        special = np.array(_SPECIAL).astype(target)
    # Every awkward value meets every other one and itself, as far as there is room.
    count, room = len(special), min(len(special) ** 2, SIZE // 2)
    places = np.arange(room) // count if seed % 2 else np.arange(room) % count
    flat[:room] = special[places]
    return flat


# --- what lax defines -----------------------------------------------------------------


def _codes(x: np.ndarray) -> np.ndarray:
    """The bits of elements, as integers."""
    mask = (1 << dtypes.stored_bits(x.dtype)) - 1
    return x.view(f"u{x.dtype.itemsize}").astype(object) & mask


def _of_codes(codes: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Elements by their lowest bits."""
    codes = codes.astype(object) & (1 << dtypes.stored_bits(dtype)) - 1
    codes = codes.astype(f"u{dtype.itemsize}")
    if dtypes.is_packed(dtype) and dtypes.kind(dtype) != "float4":
        return codes.astype(dtype)
    return codes.view(dtype)


def _each(function: Callable[..., Any], dtype: Any = np.float64) -> Callable:
    return np.vectorize(function, otypes=[dtype])


def _quotient(x: int, y: int) -> int:
    size = abs(x) // abs(y) if y else 1
    return size if y and (x < 0) == (y < 0) else -size


def _remainder(x: int, y: int) -> int:
    size = abs(x) % abs(y) if y else abs(x)
    return -size if x < 0 else size


def _round(x, rounding_method):
    return np.rint(x) if rounding_method else np.trunc(x + np.copysign(0.5, x))


# Of integers, which are Python's: what does not fit wraps.
OF_INTEGERS: dict[str, Callable] = {
    "div": _each(_quotient, object),
    "rem": _each(_remainder, object),
    "sign": lambda x: (x > 0) * 1 - (x < 0) * 1,
}
# Of the bits of integers, and their width.
OF_BITS: dict[str, Callable[..., int]] = {
    "shift_left": lambda width, x, y: x << min(y, width),
    "shift_right_logical": lambda width, x, y: x >> min(y, width),
    "shift_right_arithmetic": lambda width, x, y: (
        x - (x >> width - 1 << width) >> min(y, width)
    ),
    "population_count": lambda width, x: x.bit_count(),
    "clz": lambda width, x: width - x.bit_length(),
}
_OF_PYTHON = "add sub mul neg abs xor eq ne lt le gt ge"
_OF_NUMPY = """
    floor ceil pow exp exp2 expm1 log log2 log1p sqrt cbrt tanh sin cos tan asin acos
    atan atan2 sinh cosh asinh acosh atanh
"""
REFERENCE: dict[str, Callable] = {
    **{name: getattr(operator, name) for name in _OF_PYTHON.split()},
    **{name: getattr(np, name) for name in _OF_NUMPY.split()},
    "add_any": operator.add,
    "div": operator.truediv,
    "rem": np.fmod,
    "max": np.maximum,
    "min": np.minimum,
    "sign": lambda x: np.where(np.isnan(x), x, np.copysign(np.abs(np.sign(x)), x)),
    "square": lambda x: x * x,
    "one_minus_square": lambda x: (1 + x) * (1 - x),
    "integer_pow": lambda x, y: 1 / x**-y if y < 0 else x**y,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "select_n": lambda which, a, b: np.where(which, b, a),
    "and": operator.and_,
    "or": operator.or_,
    "not": operator.invert,
    "is_finite": np.isfinite,
    "round": _round,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "erf": _each(math.erf),
    "erfc": _each(math.erfc),
}


def _expected(
    name: str, operands: list[np.ndarray], to: np.dtype, **params: int
) -> np.ndarray:
    """The results of an operation on operands of one dtype, as elements of a dtype."""
    dtype = operands[-1].dtype
    if name == "bitcast_convert_type":
        return _of_codes(_codes(operands[0]), to)
    if name in OF_BITS:
        function = functools.partial(OF_BITS[name], dtypes.stored_bits(dtype))
        return _of_codes(_each(function, object)(*map(_codes, operands)), to)
    function = REFERENCE[name]
    if dtypes.kind(dtype) in ("signed", "unsigned"):
        function = OF_INTEGERS.get(name, function)
        wide = [x.astype(bool if x.dtype == bool else object) for x in operands]
    elif dtypes.kind(dtype) == "bool":
        wide = operands
    else:
        exact = np.float32 if is_narrow_float(to) else np.float64
        wide = [x.astype(bool if x.dtype == bool else exact) for x in operands]
    with np.errstate(all="ignore"):
        result = np.asarray(function(*wide, **params))
        if dtypes.kind(to) == "bool":
            return result.astype(bool)
        return _of_codes(result, to) if result.dtype == object else rounded(result, to)


def rounded(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The nearest numbers; narrow floats by way of float32, as they are computed."""
    return (x.astype(np.float32) if is_narrow_float(dtype) else x).astype(dtype)


def has_signed_zeros(dtype: np.dtype) -> bool:
    """Whether the sign of a zero is defined: a NaN becomes a zero of float4."""
    return dtypes.kind(dtype) != "float4"


def is_narrow_float(dtype: np.dtype) -> bool:
    """Whether a dtype is computed in float32 and rounded once."""
    return dtypes.kind(dtype) in NARROW_FLOATS


# --- programs -------------------------------------------------------------------------


def operands_of(name: str, dtype: str) -> list[np.ndarray]:
    """The operands of an operation's program."""
    if name == "select_n":
        return [sample("bool", 4), sample(dtype, 0), sample(dtype, 1)]
    if name == "clamp":
        first, second = sample(dtype, 0), sample(dtype, 1)
        low, high = (f(first, second).astype(dtype) for f in (np.minimum, np.maximum))
        return [low, sample(dtype, 2), high]
    operands = [sample(dtype, seed) for seed in range(arity(name))]
    if name == "rem" and dtypes.kind(np.dtype(dtype)) == "float":
        # Exact while the quotient is small; see the emitter. Right below a multiple of
        # the divisor the quotient is rounded up, and has to be corrected.
        operands[0] = np.clip(operands[0], -100, 100).astype(dtype)
        below = operands[1][128:] * np.arange(1, 129).astype(dtype)
        operands[0][128:] = np.nextafter(below, np.zeros_like(below))
        operands[0][192:] *= -1
    return operands


# Of the same width.
_BITCASTS = {
    **{f"uint{bits}": f"int{bits}" for bits in (2, 8)},
    **{"uint4": "float4_e2m1fn", "uint16": "bfloat16", "uint32": "float32"},
    "uint64": "float64",
}


def result_dtype(name: str, dtype: str) -> np.dtype:
    """The dtype of the result of an operation's program."""
    row = table.lookup(name)
    bits = dtypes.stored_bits(np.dtype(dtype))
    to = np.dtype(_BITCASTS.get(dtype, f"uint{bits}"))
    return row.result_dtype(np.dtype(dtype), to)


def row_program(name: str, dtype: str, approx_math: bool = False, **params) -> Program:
    """Applies an operation of the table to arrays of a dtype."""
    operands, to = operands_of(name, dtype), result_dtype(name, dtype)
    options = {"approx_math": approx_math, "to": to, **params}

    def emit(kb, *views):
        values = [gmem.load(view) for view in views[:-1]]
        gmem.store(views[-1], elementwise.apply(name, *values, **options))

    expected = _expected(name, operands, to, **params)
    exact = name in ("is_finite", "bitcast_convert_type")
    # Each factor of a power is rounded.
    roundings = abs(params.get("y", 1)) or 1
    tolerance = 0.0 if exact else TOLERANCE.get(dtype, 0.0) * roundings
    # lax leaves open which of two zeros is larger.
    signed = has_signed_zeros(to) and name not in ("max", "min", "clamp")
    return Program(emit, operands, [expected], tolerance, signed_zeros=signed)


def rows() -> dict[str, list[tuple[str, str]]]:
    """The kinds and dtypes of every row but that of conversions, which follow."""
    return {
        name: [(kind, dtype) for kind in row.kinds for dtype in DTYPES[kind]]
        for name, row in table.TABLE.items()
        if name != "convert_element_type"
    }


def params_of(name: str, kind: str) -> list[dict[str, int]]:
    """The parameters that a row is tried with: integers have no negative powers."""
    signed = kind in ("signed", "unsigned")
    return [p for p in PARAMS.get(name, ({},)) if not (signed and p.get("y", 0) < 0)]


LAX = {name: getattr(lax, f"bitwise_{name}") for name in ("and", "or", "xor", "not")}
LAX["add_any"] = ad.add_jaxvals


def lax_function(name: str, dtype: str, params: dict[str, int]) -> Callable:
    """The function of lax that a program computes."""
    options: dict[str, Any] = dict(params)
    if name == "round":
        options = {k: lax.RoundingMethod(v) for k, v in params.items()}
    if name == "bitcast_convert_type":
        options["new_dtype"] = result_dtype(name, dtype)
    return functools.partial(LAX.get(name) or getattr(lax, name), **options)


@functools.cache
def row_programs(name: str, kind: str, dtype: str) -> list[Program]:
    """The programs of a row for a dtype: one for each choice of parameters."""
    return [row_program(name, dtype, **params) for params in params_of(name, kind)]


@functools.cache
def approximations(dtype: str = "float32") -> dict[str, Program]:
    """The programs of rows that have an approximation, which they use."""
    names = [name for name, row in table.TABLE.items() if row.approx is not None]
    return {name: row_program(name, dtype, approx_math=True) for name in names}


# --- conversions ----------------------------------------------------------------------

ALL = tuple(itertools.chain(*DTYPES.values()))


def conversions(src: str) -> list[str]:
    """The dtypes that a dtype is converted to: all others."""
    return [dtype for dtype in ALL if dtype != src]


# The conversions with mutants: those of less than a byte are made of these.
SOURCES = tuple(x for x in ALL if not dtypes.is_packed(np.dtype(x)))


def mutated_conversions(src: str) -> list[str]:
    """The dtypes of which a wrong conversion is to be noticed."""
    if src in DTYPES["exponent"]:
        # By way of float32.
        return ["int32", "float32", "bfloat16", "float16", "float8_e5m2"]
    exponents = DTYPES["exponent"]
    return [x for x in SOURCES if x != src and x not in exponents]


@functools.cache
def conversion_program(src: str, dst: str) -> Program:
    """Converts an array as lax does."""
    x, target = sample(src, 0), np.dtype(dst)
    if "float8" in src:  # all values
        x = np.arange(256, dtype=np.uint8).view(np.dtype(src))
    elif dst in DTYPES["float8"] and x.dtype.itemsize > 1:
        # Halfway between the largest number and the next one, in either half of a pair.
        x[:2] = 464 if dst == "float8_e4m3fn" or src == "int16" else 61440

    if dtypes.is_packed(x.dtype) or dtypes.is_packed(target):
        x = np.tile(x, 8)  # several words in each thread

    def emit(kb, view, out):
        gmem.store(out, elementwise.astype(gmem.load(view), target))

    signed = has_signed_zeros(target)
    return Program(emit, [x], [_converted(x, target)], signed_zeros=signed)


def _converted(x: np.ndarray, dst: np.dtype) -> np.ndarray:
    kinds, integers = (dtypes.kind(x.dtype), dtypes.kind(dst)), ("signed", "unsigned")
    with np.errstate(all="ignore"):
        if kinds[0] not in ("bool", *integers) and kinds[1] in integers:
            limits = ml_dtypes.iinfo(dst)
            ends = float(limits.min), float(limits.max)
            whole = [int(np.clip(v, *ends)) for v in np.nan_to_num(x.astype(float))]
            return np.array([min(v, int(limits.max)) for v in whole], object).astype(
                dst
            )
        if kinds[1] == "bool":
            return x.astype(np.float64) != 0
        if kinds[0] in NARROW_FLOATS:
            x = x.astype(np.float64)
        # ml_dtypes converts its integers to bytes and floats alone.
        return (x.astype(np.int8) if dtypes.is_packed(x.dtype) else x).astype(dst)
