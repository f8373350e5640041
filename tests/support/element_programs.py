# SPDX-License-Identifier: Apache-2.0
"""A program for each row of the elementwise table and each kind of dtype it has.

What a program expects is computed by NumPy from lax's definition of the operation.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from pallas_gpu.mosaic import elementwise, gmem
from pallas_gpu.mosaic.elements import dtypes, table
from pallas_gpu.mosaic.elements.row import Row
from tests.support.programs import Program

SIZE = 256
# One dtype of each kind, and those whose emitters differ from it.
SAMPLES: dict[str, tuple[str, ...]] = {
    "float": ("float32", "float16", "bfloat16"),
    "signed": ("int32", "int8"),
    "unsigned": ("uint32",),
    "bool": ("bool",),
    "float8": ("float8_e4m3fn", "float8_e5m2"),
    "exponent": ("float8_e8m0fnu",),
}
BINARY = (
    *("add", "add_any", "sub", "mul", "div", "rem", "max", "min", "pow", "atan2"),
    *("and", "or", "xor", "shift_left", "shift_right_logical"),
    *("shift_right_arithmetic", "eq", "ne", "lt", "le", "gt", "ge"),
)
TERNARY = ("clamp", "select_n")
PARAMS: dict[str, tuple[dict[str, int], ...]] = {
    "integer_pow": ({"y": 3}, {"y": -2}),
    "round": ({"rounding_method": 0}, {"rounding_method": 1}),
}
TOLERANCE = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}
_SPECIAL = (0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 0.5, 1.5, 2.5, -2.5)


def arity(name: str) -> int:
    """How many operands the operation has."""
    return 3 if name in TERNARY else 2 if name in BINARY else 1


def sample(dtype: str, seed: int, size: int = SIZE) -> np.ndarray:
    """Ordinary and awkward values, the same in every process."""
    rng, kind = np.random.default_rng(seed), np.dtype(dtype)
    if dtype == "bool":
        return rng.integers(0, 2, size).astype(bool)
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        wide = rng.integers(limits.min, limits.max, size, kind, endpoint=True)
        narrow = rng.integers(0, 12, size).astype(kind)
        flat = np.where(rng.random(size) < 0.5, wide, narrow)
        ends = (0, 1, 2, 3, limits.max, limits.min, limits.max - 1, 7, 31, 33)
        special = np.array([min(v, limits.max) for v in ends], kind)
        if kind.kind == "i":
            special = np.append(special, kind.type(-1))
    else:
        flat = (rng.normal(size=size) * 3).astype(kind)
        special = np.array(_SPECIAL).astype(kind)
    # Every awkward value meets every other one and itself, as far as there is room.
    count, room = len(special), min(len(special) ** 2, size // 2)
    places = np.arange(room) // count if seed % 2 else np.arange(room) % count
    flat[:room] = special[places]
    return flat


# --- what lax defines -----------------------------------------------------------------


def _quotient(a, b):
    if a.dtype.kind == "f":
        return a / b
    wide = [int(x) for x in a], [int(y) for y in b]
    return np.array(
        [-1 if y == 0 else int(math.copysign(1, x * y)) * (abs(x) // abs(y))
         for x, y in zip(*wide, strict=True)], object,
    )  # fmt: skip


def _remainder(a, b):
    if a.dtype.kind == "f":
        return np.fmod(a, b)
    pairs = zip((int(x) for x in a), (int(y) for y in b), strict=True)
    return np.array([x if y == 0 else int(math.fmod(x, y)) for x, y in pairs], object)


def _shift(function: Callable[[int, int], int], *, as_signed: bool = False) -> Callable:
    """Shifts of any distance, of the bits or of the number that they are."""

    def shift(a, b):
        width = 8 * a.dtype.itemsize
        mask = (1 << width) - 1
        result = []
        for x, y in zip(a, b, strict=True):
            number = int(x) & mask
            if as_signed and number >> (width - 1):
                number -= 1 << width
            result.append(function(number, int(y) & mask))
        return np.array(result, object)

    return shift


def _left(x: int, distance: int) -> int:
    return x << distance if distance < 64 else 0


def _right(x: int, distance: int) -> int:
    return x >> min(distance, 64)


def _sign(x):
    return np.where(np.isnan(x), x, np.sign(x)) if x.dtype.kind == "f" else np.sign(x)


def _leading_zeros(x):
    width = 8 * x.dtype.itemsize
    mask = (1 << width) - 1
    return np.array([width - (int(v) & mask).bit_length() for v in x], object)


def _round(x, rounding_method):
    return np.rint(x) if rounding_method else np.trunc(x + np.copysign(0.5, x))


def _power(x, y):
    return np.array([int(v) ** y for v in x], object) if x.dtype.kind in "iu" else x**y


def _each(function: Callable[[float], float]) -> Callable:
    return np.vectorize(function, otypes=[np.float64])


REFERENCE: dict[str, Callable] = {
    "add": lambda a, b: a + b,
    "add_any": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": _quotient,
    "rem": _remainder,
    "max": np.maximum,
    "min": np.minimum,
    "neg": lambda x: -x,
    "abs": np.abs,
    "sign": _sign,
    "square": lambda x: x * x,
    "one_minus_square": lambda x: (1 + x) * (1 - x),
    "integer_pow": _power,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda x: ~x,
    "shift_left": _shift(_left),
    "shift_right_logical": _shift(_right),
    "shift_right_arithmetic": _shift(_right, as_signed=True),
    "population_count": lambda x: np.bitwise_count(x.view(f"u{x.dtype.itemsize}")),
    "clz": _leading_zeros,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "is_finite": np.isfinite,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": _round,
    "pow": np.power,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log2": np.log2,
    "log1p": np.log1p,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "cbrt": np.cbrt,
    "tanh": np.tanh,
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "erf": _each(math.erf),
    "erfc": _each(math.erfc),
}
# Without a definition here: their programs are the conversions below.
CONVERSIONS_ONLY = {"convert_element_type", "bitcast_convert_type"}


def _expected(name: str, operands: Sequence[np.ndarray], row: Row, **params):
    dtype = operands[row.typed_by].dtype
    if name == "select_n":
        return np.where(operands[0], operands[2], operands[1])
    is_float = dtypes.kind(dtype) in ("float", "float8")
    wide = list(operands)
    if is_float:
        wide = [x if x.dtype == bool else x.astype(np.float64) for x in operands]
    if dtype.kind in "iu" and name in (
        "add",
        "add_any",
        "sub",
        "mul",
        "neg",
        "abs",
        "square",
    ):
        wide = [x.astype(object) for x in wide]
    with np.errstate(all="ignore"):
        result = np.asarray(REFERENCE[name](*wide, **params))
        if row.result == "bool":
            return result.astype(bool)
        if result.dtype == object:
            mask = (1 << 8 * dtype.itemsize) - 1
            bits = np.array([int(v) & mask for v in result], np.uint64)
            return bits.astype(f"u{dtype.itemsize}").view(dtype)
        return _rounded(result, dtype)


def _rounded(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The nearest numbers, by way of float32 as NumPy converts to narrow floats."""
    return x.astype(dtype)


# --- programs -------------------------------------------------------------------------


def operands_of(name: str, dtype: str) -> list[np.ndarray]:
    """The operands of an operation's program."""
    if name == "select_n":
        return [sample("bool", 4), sample(dtype, 0), sample(dtype, 1)]
    if name == "clamp":
        first, second = sample(dtype, 0), sample(dtype, 1)
        low, high = np.minimum(first, second), np.maximum(first, second)
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


def row_program(name: str, dtype: str, **params: int) -> Program:
    """Applies an operation of the table to arrays of a dtype."""
    row, operands = table.lookup(name), operands_of(name, dtype)

    def emit(kb, *views):
        values = [gmem.load(view) for view in views[:-1]]
        gmem.store(views[-1], elementwise.apply(name, *values, **params))

    plain = {k: v for k, v in params.items() if k != "approx_math"}
    expected = _expected(name, operands, row, **plain)
    tolerance = 0.0 if name == "is_finite" else TOLERANCE.get(dtype, 0.0)
    return Program(emit, operands, [expected], tolerance)


@functools.cache
def is_elsewhere(name: str, kind: str) -> bool:
    """Whether tests/test_narrow_types.py computes a row: types widened as float8 is."""
    return kind == "float4" or (kind == "exponent" and name != "select_n")


@functools.cache
def row_programs() -> dict[tuple[str, str, str], list[Program]]:
    """The programs of every (row, kind, dtype): one for each choice of parameters."""
    found = {}
    for name, row in table.TABLE.items():
        if name in CONVERSIONS_ONLY:
            continue
        for kind in row.kinds:
            if is_elsewhere(name, kind):
                continue
            for dtype in SAMPLES[kind]:
                found[name, kind, dtype] = [
                    row_program(name, dtype, **params)
                    for params in PARAMS.get(name, ({},))
                    if not (params.get("y", 0) < 0 and kind != "float")
                ]
    return found


@functools.cache
def approximations() -> dict[str, Program]:
    """The programs of rows that have an approximation, which they use."""
    names = [name for name, row in table.TABLE.items() if row.approx is not None]
    return {name: row_program(name, "float32", approx_math=True) for name in names}


# tests/test_narrow_types.py converts all of their values to all types, and back.
CONVERTED_ELSEWHERE = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn")
CONVERTIBLE = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64"),
)
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


def conversions() -> Iterator[tuple[str, str]]:
    """Every pair of dtypes that convert."""
    yield from itertools.permutations(CONVERTIBLE, 2)
    for narrow in FLOAT8:
        for other in CONVERTIBLE:
            yield narrow, other
            yield other, narrow
    yield from itertools.permutations(FLOAT8, 2)
    # By way of float32.
    for other in ("int32", "float32", "bfloat16", "float16", "float8_e5m2"):
        yield "float8_e8m0fnu", other


def conversion_program(src: str, dst: str) -> Program:
    """Converts an array as lax does."""
    x, target = sample(src, 0), np.dtype(dst)
    if "float8" in src:  # all values
        x = np.resize(np.arange(256, dtype=np.uint8), 256).view(np.dtype(src))
    elif dst in FLOAT8 and x.dtype.itemsize > 1:
        # Halfway between the largest number and the next one, in either half of a pair.
        limit = 464 if dst == "float8_e4m3fn" or src == "int16" else 61440
        x[:2] = limit

    def emit(kb, view, out):
        gmem.store(out, elementwise.astype(gmem.load(view), target))

    return Program(emit, [x], [_converted(x, target)])


def _converted(x: np.ndarray, dst: np.dtype) -> np.ndarray:
    if dtypes.kind(x.dtype) in ("float", "float8", "exponent") and dst.kind in "iu":
        limits = np.iinfo(dst)
        numbers = (float(v) for v in x)
        whole = [
            0 if math.isnan(v)
            else int(min(max(v, float(limits.min)), float(limits.max)))
            for v in numbers
        ]  # fmt: skip
        return np.array([min(max(v, limits.min), limits.max) for v in whole], dst)
    if dtypes.kind(x.dtype) == "exponent":
        x = x.astype(np.float64)
    with np.errstate(all="ignore"):
        return _rounded(x, dst)
