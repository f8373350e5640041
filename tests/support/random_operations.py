# SPDX-License-Identifier: Apache-2.0
"""Steps of random bodies: scans, order, positions, products, bits, narrow types.

The order of equal elements is defined; products and sums of small whole numbers are
exact.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from tests.support.random_bodies import BF16, BOOL, F16, F32, I8, I32, U32, Body, step
from tests.support.random_steps import element

SCANS = {
    "sum": (np.cumsum, lax.cumsum),
    "prod": (np.cumprod, lax.cumprod),
    "max": (np.maximum.accumulate, lax.cummax),
    "min": (np.minimum.accumulate, lax.cummin),
}
NARROW = tuple(
    np.dtype(getattr(ml_dtypes, name))
    for name in ("float8_e4m3fn", "float8_e5m2", "int4", "uint4")
)
# Sums of whole numbers up to LIMIT that a type represents exactly.
_EXACT = {F16: 256, BF16: 32}


def _traced(b: Body) -> bool:
    return b.api.np is jnp


def _has_axes(x: Any) -> bool:
    return len(x.shape) > 0 and x.size > 0


def _numbers(b: Body) -> Any:
    return b.any(lambda x: x.dtype != BOOL and _has_axes(x))


@step(1.5)
def scan(b: Body) -> Any:
    """A cumulative operation; products are of signs."""
    x = _numbers(b)
    if x is None:
        return None
    axis, reverse = b.rng.randrange(len(x.shape)), b.rng.random() < 0.4
    names = ["max", "min", "prod"]
    if x.shape[axis] <= _EXACT.get(np.dtype(x.dtype), 1 << 16):
        names += ["sum"] * 2
    name = b.rng.choice(names)
    if name == "prod":
        x = b.api.np.sign(x)
    own, traced = SCANS[name]
    if _traced(b):
        return b.small(traced(x, axis, reverse=reverse))
    x = np.flip(x, axis) if reverse else x
    options = {"dtype": x.dtype} if name in ("sum", "prod") else {}
    result = own(x, axis, **options)
    return b.small(np.flip(result, axis) if reverse else result)


@step(1)
def ordered(b: Body) -> Any:
    """A sorted array, or its largest elements or their positions."""
    x = _numbers(b)
    # Lockstep takes a minute to sort 4096 elements.
    if x is None or x.size > 1 << 9:
        return None
    axis, last = b.rng.randrange(len(x.shape)), len(x.shape) - 1
    k = b.rng.randint(1, min(4, x.shape[last]))
    match b.rng.choice(["sort", "values", "positions"]):
        case "sort":
            return b.api.np.sort(x, axis=axis)
        case "values" if _traced(b):
            return lax.top_k(x, k)[0]
        case "values":
            return np.flip(np.sort(x, axis=-1), -1)[..., :k]
        case "positions" if _traced(b):
            return lax.top_k(x, k)[1]
    order = np.argsort(-x.astype(np.float64), axis=-1, kind="stable")
    return order[..., :k].astype(I32)


@step(1)
def position(b: Body) -> Any:
    """The first position of an extremum."""
    x = b.any(_has_axes)
    if x is None or len(x.shape) < 2:
        return None
    axis = b.rng.randrange(len(x.shape))
    function = b.rng.choice([b.api.np.argmax, b.api.np.argmin])
    return function(x, axis=axis, keepdims=True).astype(I32)


@step(1)
def along(b: Body) -> Any:
    """Elements at positions that are values, in each row of their own."""
    x = b.any(_has_axes)
    if x is None:
        return None
    axis = b.rng.randrange(len(x.shape))
    at = b.api.np.broadcast_to(b.partner(x, I32), x.shape)
    at = abs(at) % np.int32(x.shape[axis])
    return b.api.np.take_along_axis(x, at, axis=axis)


@step(1)
def window(b: Body) -> Any:
    """A part, or the update of a part, whose start is a value."""
    x = b.any(_has_axes)
    if x is None:
        return None
    axis = b.rng.randrange(len(x.shape))
    n = x.shape[axis]
    size, update = b.rng.randint(1, n), b.rng.random() < 0.5
    start = abs(b.as_type(element(b), I32)) % np.int32(n - size + 1)
    at = (slice(None),) * axis
    if not update:
        if _traced(b):
            return lax.dynamic_slice_in_dim(x, start, size, axis)
        return x[(*at, slice(start, start + size))]
    part = b.api.np.broadcast_to(b.partner(x), x.shape)[(*at, slice(n - size, n))]
    if _traced(b):
        return lax.dynamic_update_slice_in_dim(x, part, start, axis)
    x = np.array(x)
    x[(*at, slice(start, start + size))] = part
    return x


@step(1)
def dot(b: Body) -> Any:
    """A product of matrices of small whole numbers."""
    x = b.any(lambda x: x.dtype in (F32, F16, BF16, I8) and len(x.shape) == 2)
    if x is None or x.dtype not in (F32, F16, BF16, I8) or len(x.shape) != 2:
        return None
    y = b.any(lambda y: y.dtype == x.dtype and len(y.shape) == 2)
    if b.rng.random() < 0.5 or x.shape[1] != y.shape[0]:
        y = y.T if y.shape[1] == x.shape[1] else x.T
    if x.shape[0] * x.shape[1] * y.shape[1] > 1 << 18:
        return None
    wide = I32 if x.dtype == I8 else F32
    if _traced(b):
        return b.small(jnp.matmul(x, y, preferred_element_type=wide))
    return b.small(x.astype(wide) @ y.astype(wide))


@step(1)
def bits(b: Body) -> Any:
    """Bits as another type, and their number."""
    x = b.any(lambda x: x.dtype in (F32, I32, U32))
    if x is None or x.dtype not in (F32, I32, U32):
        return None
    match b.rng.choice(["count", "leading", "view"]):
        case "view":
            # The sign of zero is not the same in every order of operations.
            x = abs(x) if x.dtype == F32 else x
            word = lax.bitcast_convert_type(x, U32) if _traced(b) else x.view(U32)
            return (word >> np.uint32(20)).astype(I32)
        case "count":
            x = b.as_type(x, I32)
            # NumPy counts the bits of the absolute value.
            if _traced(b):
                return lax.population_count(x)
            return np.bitwise_count(x.view(U32)).astype(I32)
    x = b.as_type(x, I32)
    if _traced(b):
        return lax.clz(x)
    lengths = np.frexp((x.astype(np.int64) % 2**32).astype(np.float64))[1]
    return (32 - lengths).astype(I32)


@step(1.5)
def narrow(b: Body) -> Any:
    """A value in a type of 4 or 8 bits, and an operation in that type."""
    x = b.any(lambda x: x.dtype != BOOL)
    if x is None or x.dtype == BOOL:
        return None
    kind = b.rng.choice(NARROW)
    low = 0 if kind.name == "uint4" else -4
    x = b.api.np.clip(b.as_type(x, I32), np.int32(low), np.int32(4)).astype(kind)
    if b.rng.random() < 0.5 and kind.name.startswith("float8"):
        x = x + x
    return b.as_type(x.astype(I32), b.rng.choice([F32, I32, F16]))
