# SPDX-License-Identifier: Apache-2.0
"""lax's pure operations in NumPy.

Each row is lax's definition. XLA's CPU backend deviates from it in ways that show in a
kernel's results (jax 0.11.2 and 0.12.0.1): it flushes denormals, which the emitted code
keeps, it drops NaN from reductions, and it computes maxima of 8-bit sums modulo 2**32.
NumPy also needs no compilation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_gpu.emulator.engine.pure import movement, narrow, scalars

Function = Callable[..., Any]
_Make = Callable[[Any], Function]


def function(eqn: Any) -> Function | None:
    """Returns a NumPy function of the operands of an equation; None without a row.

    Its results are as read-only as values are: they can be views of the operands.
    """
    make = _TABLE.get(eqn.primitive.name)
    return None if make is None else scalars.function(eqn) or make(eqn)


def is_floating(dtype: Any) -> bool:
    """True for a float of any width."""
    return bool(jnp.issubdtype(dtype, jnp.floating))


def _is_narrow(dtype: Any) -> bool:
    """True for a float that is computed in float32 and rounded to its type."""
    return is_floating(dtype) and np.dtype(dtype).itemsize < 4


# --- elements -------------------------------------------------------------------------


def _elementwise(fn: Function, floating: Function | None = None) -> _Make:
    """A function of elements; narrow floats are computed in float32.

    Args:
      fn: computes it, for all types or for integers.
      floating: computes it for floats.
    """

    def make(eqn: Any) -> Function:
        operand, result = eqn.invars[-1].aval.dtype, eqn.outvars[0].aval.dtype
        if narrow.is_integer(operand):
            return narrow.in_bytes(fn, result)
        chosen = floating if floating is not None and is_floating(operand) else fn
        return _in_float32(chosen, result) if _is_narrow(operand) else chosen

    return make


def _of_bits(fn: Function, width: Callable[..., Any]) -> _Make:
    """A function of bit patterns.

    Args:
      fn: computes it for types of whole bytes.
      width: of less, from the number of their bits and the patterns as uint8.
    """

    def make(eqn: Any) -> Function:
        if narrow.is_integer(eqn.invars[-1].aval.dtype):
            return narrow.by_bits(width, eqn.outvars[0].aval.dtype)
        return fn

    return make


def _in_float32(fn: Function, dtype: Any) -> Function:
    def compute(*operands: Any) -> Any:
        wide = [x.astype(np.float32) if _is_narrow(x.dtype) else x for x in operands]
        return _to(dtype, fn(*wide))

    return compute


def _to(dtype: Any, x: Any) -> Any:
    """Returns the result of a computation, rounded to its type."""
    if is_floating(dtype) and np.dtype(dtype).itemsize == 1:
        return narrow.to_float(np.dtype(dtype), x)
    return x.astype(dtype, copy=False)


def _rounded(fn: Function) -> _Make:
    """A function of floats, computed in float64: its error is that of the rounding.

    Floats of a byte are rounded from float32, in which the emitted code computes them.
    """

    def make(eqn: Any) -> Function:
        dtype = eqn.outvars[0].aval.dtype
        first = np.float32 if dtype.itemsize == 1 else dtype

        def compute(*xs: Any) -> Any:
            exact = fn(*[x.astype(np.float64) for x in xs])
            return _to(dtype, exact.astype(first))

        return compute

    return make


def _quotient(a: Any, b: Any) -> Any:
    """Integers: truncated; division by zero returns all ones."""
    quotient = np.floor_divide(a, np.where(b == 0, b.dtype.type(1), b))
    # Where the floor is below a negative quotient that is not whole.
    below = (quotient * b != a) & ((a < 0) != (b < 0))
    return np.where(b == 0, ~b, quotient + below.astype(a.dtype))


def _remainder(a: Any, b: Any) -> Any:
    """Integers: the dividend's sign; the remainder by zero is the dividend."""
    return np.where(b == 0, a, np.fmod(a, np.where(b == 0, b.dtype.type(1), b)))


def _sign(x: Any) -> Any:
    """Floats: zeros keep their sign, and NaN is NaN."""
    return np.where((x < 0) | (x > 0), np.copysign(x.dtype.type(1), x), x)


def _round_half_away(x: Any) -> Any:
    whole = np.trunc(x)
    away = np.copysign((np.abs(x - whole) >= 0.5).astype(x.dtype), x)
    return np.where(np.isfinite(x), np.copysign(np.abs(whole + away), x), x)


def _shift_right_logical(a: Any, b: Any) -> Any:
    bits = np.dtype(f"u{a.dtype.itemsize}")
    return np.right_shift(a.view(bits), b.view(bits)).view(a.dtype)


def _shift_right_arithmetic(a: Any, b: Any) -> Any:
    sign, bits = (np.dtype(f"{kind}{a.dtype.itemsize}") for kind in "iu")
    # A distance is unsigned, and at most the width less one, which leaves the sign.
    distance = np.minimum(b.view(bits), bits.type(8 * bits.itemsize - 1))
    return np.right_shift(a.view(sign), distance.view(sign)).view(a.dtype)


def _leading_zeros(x: Any) -> Any:
    """The width minus the bit length, which is that of each half that is not zero."""
    width = 8 * x.dtype.itemsize
    bits = x.view(f"u{x.dtype.itemsize}").astype(np.uint64)
    high, low = bits >> np.uint64(32), bits & np.uint64(0xFFFF_FFFF)
    # frexp: the exponent of an integer in float64, which is exact, is its bit length.
    lengths = [np.frexp(half.astype(np.float64))[1] for half in (high, low)]
    length = np.where(high > 0, lengths[0] + 32, lengths[1])
    return (width - length).astype(x.dtype)


def _population_count(x: Any) -> Any:
    return np.bitwise_count(x.view(f"u{x.dtype.itemsize}")).astype(x.dtype)


def _logistic(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def _clamp(low: Any, x: Any, high: Any) -> Any:
    return np.minimum(np.maximum(x, low), high)


def _round(eqn: Any) -> Function:
    # lax.RoundingMethod: 0 rounds ties away from zero, 1 to nearest even.
    to_even = int(eqn.params["rounding_method"]) == 1
    return _elementwise(np.rint if to_even else _round_half_away)(eqn)


def _integer_pow(eqn: Any) -> Function:
    """By repeated squaring, as XLA and the emitted code do."""
    exponent = eqn.params["y"]

    def power(x: Any) -> Any:
        result, base, rest = None, x, abs(exponent)
        while rest:
            if rest & 1:
                result = base if result is None else result * base
            rest >>= 1
            if rest:
                base = base * base
        if result is None:
            return np.ones_like(x)
        return 1 / result if exponent < 0 else result

    return _elementwise(power)(eqn)


def _select(eqn: Any) -> Function:
    def select(which: Any, *cases: Any) -> Any:
        if which.ndim == 0:
            return cases[min(max(int(which), 0), len(cases) - 1)]
        # An index outside, as that of poison, selects the nearest case.
        result = cases[0]
        for i, case in enumerate(cases[1:], 1):
            result = np.where(which >= i, case, result)
        return result

    return select


# --- conversions ----------------------------------------------------------------------


def _pow(eqn: Any) -> Function:
    """The exponent may be an integer; it is rounded to the type of the base first."""
    dtype, power = eqn.outvars[0].aval.dtype, _rounded(np.power)(eqn)
    return lambda x, y: power(x, _to(dtype, y))


def _convert(eqn: Any) -> Function:
    src, dst = eqn.invars[0].aval.dtype, np.dtype(eqn.params["new_dtype"])
    if narrow.is_integer(src):
        wide = narrow.held(src)
        return lambda x: _to(dst, x.astype(wide))
    if dst == np.bool_:
        return lambda x: x != 0
    if is_floating(src) and not is_floating(dst):
        return functools.partial(_truncated, dst)
    return lambda x: _to(dst, x.astype(np.float32) if _is_narrow(src) else x)


def _bitcast(eqn: Any) -> Function:
    shape, dst = eqn.outvars[0].aval.shape, np.dtype(eqn.params["new_dtype"])

    if narrow.is_packed(dst) or narrow.is_packed(eqn.invars[0].aval.dtype):
        return functools.partial(narrow.bitcast, dtype=dst, shape=shape)

    def bitcast(x: Any) -> Any:
        bits = np.frombuffer(np.asarray(x).tobytes(), dst).reshape(shape)
        return bits if shape else bits[()]

    return bitcast


def _truncated(dst: np.dtype, x: Any) -> Any:
    """A float as an integer: truncated, saturated, and 0 for NaN."""
    limits, wide = ml_dtypes.iinfo(dst), x.astype(np.float64)
    # The largest float64 that the type contains: 2**63 - 1 is not one.
    most = math.nextafter(float(limits.max) + 1, 0)
    inside = np.clip(np.nan_to_num(wide, nan=0.0), float(limits.min), most)
    return np.where(wide > most, dst.type(limits.max), inside.astype(dst))


# --- reductions and scans -------------------------------------------------------------


def _inner(dtype: Any) -> Any:
    """The type in which elements are combined."""
    if narrow.is_integer(dtype):
        return narrow.held(dtype)
    return np.dtype(np.float32) if _is_narrow(dtype) else np.dtype(dtype)


def _reduce(ufunc: np.ufunc, identity: Callable[[Any], Any] | None = None) -> _Make:
    def make(eqn: Any) -> Function:
        axes, dtype = tuple(eqn.params["axes"]), eqn.outvars[0].aval.dtype
        # A dtype of its own, or NumPy would sum small integers in 64 bits.
        options: dict[str, Any] = {"axis": axes, "dtype": _inner(dtype)}
        if identity is not None:
            options["initial"] = identity(_inner(dtype))
        inner = options["dtype"]
        return lambda x: _to(dtype, ufunc.reduce(x.astype(inner), **options))

    return make


def _lowest(dtype: np.dtype) -> Any:
    return -np.inf if is_floating(dtype) else _limits(dtype)[0]


def _highest(dtype: np.dtype) -> Any:
    return np.inf if is_floating(dtype) else _limits(dtype)[1]


def _limits(dtype: np.dtype) -> tuple[Any, Any]:
    if dtype == np.bool_:
        return False, True
    limits = ml_dtypes.iinfo(dtype)
    return dtype.type(limits.min), dtype.type(limits.max)


def _scan(ufunc: np.ufunc) -> _Make:
    def make(eqn: Any) -> Function:
        axis, dtype = eqn.params["axis"], eqn.outvars[0].aval.dtype
        step = -1 if eqn.params["reverse"] else 1
        along = (*(slice(None),) * axis, slice(None, None, step))

        def scan(x: Any) -> Any:
            wide = x[along].astype(_inner(dtype))
            result = ufunc.accumulate(wide, axis=axis, dtype=wide.dtype)
            return _to(dtype, result[along])

        return scan

    return make


# --- shapes ---------------------------------------------------------------------------


def _same(eqn: Any) -> Function:
    return lambda x: x


def _reshape(eqn: Any) -> Function:
    shape = eqn.outvars[0].aval.shape
    order = eqn.params.get("dimensions")
    if eqn.primitive.name == "squeeze" or order is None:
        return lambda x: x.reshape(shape)
    return lambda x: x.transpose(order).reshape(shape)


def _broadcast_in_dim(eqn: Any) -> Function:
    shape, kept = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    sizes = dict(zip(kept, eqn.invars[0].aval.shape, strict=True))
    aligned = [sizes.get(axis, 1) for axis in range(len(shape))]
    return lambda x, *_: np.broadcast_to(x.reshape(aligned), shape)


def _iota(eqn: Any) -> Function:
    shape, axis = eqn.params["shape"], eqn.params["dimension"]
    aligned = [-1 if i == axis else 1 for i in range(len(shape))]
    numbers = np.arange(shape[axis]).astype(eqn.params["dtype"]).reshape(aligned)
    return lambda: np.broadcast_to(numbers, shape)


def _transpose(eqn: Any) -> Function:
    order = eqn.params["permutation"]
    return lambda x: x.transpose(order)


def _slice(eqn: Any) -> Function:
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * len(starts)
    key = tuple(map(slice, starts, limits, strides))
    return lambda x: x[key]


# --- the table ------------------------------------------------------------------------

_erf = np.frompyfunc(math.erf, 1, 1)
_erfc = np.frompyfunc(math.erfc, 1, 1)


def _log_gamma_of_one(x: float) -> float:
    try:
        return math.lgamma(x)
    except (ValueError, OverflowError):  # at a pole, and where it is too large
        return math.inf


_log_gamma = np.frompyfunc(_log_gamma_of_one, 1, 1)

_TABLE: dict[str, _Make] = {
    "add": _elementwise(np.add),
    "add_any": _elementwise(np.add),
    "sub": _elementwise(np.subtract),
    "mul": _elementwise(np.multiply),
    "div": _elementwise(_quotient, np.divide),
    "rem": _elementwise(_remainder, np.fmod),
    "max": _elementwise(np.maximum),
    "min": _elementwise(np.minimum),
    "neg": _elementwise(np.negative),
    "abs": _elementwise(np.abs),
    "sign": _elementwise(np.sign, _sign),
    "square": _elementwise(np.square),
    "one_minus_square": _rounded(lambda x: (1 + x) * (1 - x)),
    "clamp": _elementwise(_clamp),
    "integer_pow": _integer_pow,
    "and": _elementwise(np.bitwise_and),
    "or": _elementwise(np.bitwise_or),
    "xor": _elementwise(np.bitwise_xor),
    "not": _elementwise(np.invert),
    "shift_left": _elementwise(np.left_shift),
    "shift_right_logical": _of_bits(
        _shift_right_logical, lambda _, a, b: _shift_right_logical(a, b)
    ),
    "shift_right_arithmetic": _of_bits(
        _shift_right_arithmetic, narrow.shift_right_arithmetic
    ),
    "population_count": _of_bits(_population_count, lambda _, x: _population_count(x)),
    "clz": _of_bits(
        _leading_zeros, lambda bits, x: _leading_zeros(x) - np.uint8(8 - bits)
    ),
    "eq": _elementwise(np.equal),
    "ne": _elementwise(np.not_equal),
    "lt": _elementwise(np.less),
    "le": _elementwise(np.less_equal),
    "gt": _elementwise(np.greater),
    "ge": _elementwise(np.greater_equal),
    "is_finite": _elementwise(np.isfinite),
    "select_n": _select,
    "convert_element_type": _convert,
    "bitcast_convert_type": _bitcast,
    "floor": _elementwise(np.floor),
    "ceil": _elementwise(np.ceil),
    "round": _round,
    "pow": _pow,
    "exp": _rounded(np.exp),
    "exp2": _rounded(np.exp2),
    "expm1": _rounded(np.expm1),
    "log": _rounded(np.log),
    "log1p": _rounded(np.log1p),
    "log2": _rounded(np.log2),
    "sqrt": _rounded(np.sqrt),
    "rsqrt": _rounded(lambda x: 1 / np.sqrt(x)),
    "cbrt": _rounded(np.cbrt),
    "tanh": _rounded(np.tanh),
    "logistic": _rounded(_logistic),
    "sin": _rounded(np.sin),
    "cos": _rounded(np.cos),
    "tan": _rounded(np.tan),
    "asin": _rounded(np.arcsin),
    "acos": _rounded(np.arccos),
    "atan": _rounded(np.arctan),
    "atan2": _rounded(np.arctan2),
    "sinh": _rounded(np.sinh),
    "cosh": _rounded(np.cosh),
    "asinh": _rounded(np.arcsinh),
    "acosh": _rounded(np.arccosh),
    "atanh": _rounded(np.arctanh),
    "erf": _rounded(lambda x: np.asarray(_erf(x), np.float64)),
    "erfc": _rounded(lambda x: np.asarray(_erfc(x), np.float64)),
    "lgamma": _rounded(lambda x: np.asarray(_log_gamma(x), np.float64)),
    "nextafter": lambda eqn: np.nextafter,
    "reduce_sum": _reduce(np.add),
    "reduce_prod": _reduce(np.multiply),
    "reduce_max": _reduce(np.maximum, _lowest),
    "reduce_min": _reduce(np.minimum, _highest),
    "reduce_and": _reduce(np.bitwise_and),
    "reduce_or": _reduce(np.bitwise_or),
    "reduce_xor": _reduce(np.bitwise_xor),
    "cumsum": _scan(np.add),
    "cumprod": _scan(np.multiply),
    "cummax": _scan(np.maximum),
    "cummin": _scan(np.minimum),
    "cumlogsumexp": _scan(np.logaddexp),
    "reshape": _reshape,
    "squeeze": _reshape,
    "broadcast_in_dim": _broadcast_in_dim,
    "iota": _iota,
    "transpose": _transpose,
    "slice": _slice,
    **movement.ROWS,
    "copy": _same,
    "stop_gradient": _same,
    "name": _same,
}
