# SPDX-License-Identifier: Apache-2.0
"""Narrow types in NumPy: integers of 2 and 4 bits, and floats of 4 and 8 bits.

ml_dtypes gives them a byte each. Its integers have few of NumPy's functions, so they
are computed in int8 or uint8, and lose the upper bits afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

_EXPONENT, _FLOAT4 = np.dtype(jnp.float8_e8m0fnu), np.dtype(jnp.float4_e2m1fn)
_INTEGERS = tuple(map(np.dtype, (jnp.int4, jnp.int2, jnp.uint4, jnp.uint2)))


def is_integer(dtype: Any) -> bool:
    """True for an integer of 2 or 4 bits."""
    return dtype in _INTEGERS


def is_packed(dtype: Any) -> bool:
    """True for a type of less than 8 bits."""
    return dtype in _INTEGERS or dtype == _FLOAT4


def held(dtype: Any) -> np.dtype:
    """The type in which an integer is computed: int8 or uint8."""
    return np.dtype(np.int8 if ml_dtypes.iinfo(dtype).min < 0 else np.uint8)


def in_bytes(function: Callable[..., Any], result: Any) -> Callable[..., Any]:
    """A function of integers, computed in bytes."""

    def compute(*operands: Any) -> Any:
        wide = [x.astype(held(x.dtype)) if is_integer(x.dtype) else x for x in operands]
        return np.asarray(function(*wide)).astype(result)

    return compute


def by_bits(function: Callable[..., Any], result: Any) -> Callable[..., Any]:
    """A function of bit patterns, which are zero above the elements' bits.

    Args:
      function: of a pattern's width, and of the patterns as uint8.
      result: the result's type.
    """

    def compute(*operands: Any) -> Any:
        bits = int(ml_dtypes.iinfo(operands[0].dtype).bits)
        patterns = [x.view(np.uint8) & np.uint8((1 << bits) - 1) for x in operands]
        return np.asarray(function(bits, *patterns)).astype(result)

    return compute


def shift_right_arithmetic(bits: int, a: Any, b: Any) -> Any:
    """Shifts patterns right; the sign's bit fills, of unsigned integers, too."""
    sign = np.int8(1 << bits - 1)
    extended = (a.view(np.int8) ^ sign) - sign
    return np.right_shift(extended, np.minimum(b, np.uint8(7)).view(np.int8))


def bitcast(x: Any, *, dtype: np.dtype, shape: tuple[int, ...]) -> Any:
    """The bits of some elements as elements of a shape and another type."""
    own, other = _bits(x.dtype), _bits(dtype)
    raw = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    bits = np.unpackbits(raw, bitorder="little").reshape(raw.size, 8)[:, : min(own, 8)]
    parts = np.zeros((bits.size // min(other, 8), 8), np.uint8)
    parts[:, : min(other, 8)] = bits.reshape(-1, min(other, 8))
    packed = np.packbits(parts, axis=1, bitorder="little")
    return packed.reshape(-1).view(dtype).reshape(shape)[()]


def _bits(dtype: Any) -> int:
    if is_integer(dtype):
        return int(ml_dtypes.iinfo(dtype).bits)
    return 4 if dtype == _FLOAT4 else 8 * dtype.itemsize


def to_float(dtype: np.dtype, x: Any) -> Any:
    """Numbers as narrow floats, as lax rounds them.

    Of float8 what is too large is NaN or infinity; of float4_e2m1fn it is the largest
    number, and NaN is -0.
    """
    if x.dtype == dtype:
        return x
    tiny = x.dtype == np.float64 and dtype == _EXPONENT and x < 2.0**-127
    if x.dtype == np.float64:
        x = _rounded_to_odd(x)
    if is_integer(x.dtype):
        x = x.astype(held(x.dtype))
    with np.errstate(all="ignore"):
        result = x.astype(np.float32).astype(dtype)
    if dtype == _FLOAT4 and jnp.issubdtype(x.dtype, jnp.floating):
        return np.where(np.isnan(x), dtype.type(-0.0), result)
    return np.where(tiny, dtype.type(np.nan), result) if np.any(tiny) else result


def _rounded_to_odd(x: Any) -> Any:
    """float64 as float32, from which a second rounding gives that of the float64."""
    x = np.asarray(x)
    with np.errstate(all="ignore"):
        near = x.astype(np.float32)
        inexact = (near.astype(np.float64) != x) & ~np.isnan(x)
        away = inexact & (np.abs(near.astype(np.float64)) > np.abs(x))
        below = np.where(away, np.nextafter(near, np.float32(0)), near)
    return (below.view(np.uint32) | inexact.astype(np.uint32)).view(np.float32)
