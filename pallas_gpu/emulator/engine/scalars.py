# SPDX-License-Identifier: Apache-2.0
"""Integer and bool scalars in NumPy: indices, loop counters, conditions.

A numpy operation costs about a microsecond, a call of compiled code more than ten.
Floats are left to JAX, whose rounding is the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np


def is_scalar(aval: Any) -> bool:
    """True for an integer or bool of shape ()."""
    return (
        getattr(aval, "shape", None) == ()
        and hasattr(aval, "dtype")
        and (aval.dtype == np.bool_ or jnp.issubdtype(aval.dtype, jnp.integer))
        and aval.dtype.kind in "biu"
        and aval.dtype.itemsize <= 8
    )


def function(eqn: Any) -> Callable[..., Any] | None:
    """Returns a numpy function for an equation over scalars, if there is one."""
    if len(eqn.outvars) != 1 or not is_scalar(eqn.outvars[0].aval):
        return None
    if not all(is_scalar(v.aval) for v in eqn.invars):
        return None
    make = _TABLE.get(eqn.primitive.name)
    return make(eqn) if make is not None else None


def _ufunc(fn: Callable[..., Any]) -> Callable[[Any], Callable[..., Any]]:
    return lambda eqn: fn


def _div(eqn: Any) -> Callable[..., Any]:
    cast = eqn.outvars[0].aval.dtype.type

    def div(a, b):
        # XLA: the quotient is truncated; division by zero returns all ones.
        a, b = int(a), int(b)
        quotient = (
            -1 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        )
        return np.array(quotient).astype(cast)[()]

    return div


def _rem(eqn: Any) -> Callable[..., Any]:
    cast = eqn.outvars[0].aval.dtype.type

    def rem(a, b):
        # XLA: the sign is the dividend's; the remainder by zero is the dividend.
        a, b = int(a), int(b)
        return cast(a if b == 0 else abs(a) % abs(b) * (1 if a >= 0 else -1))

    return rem


def _convert(eqn: Any) -> Callable[..., Any]:
    cast = eqn.params["new_dtype"]
    return lambda x: np.asarray(x).astype(cast)[()]


def _integer_pow(eqn: Any) -> Callable[..., Any] | None:
    y = eqn.params["y"]
    return None if y < 0 else lambda x: np.power(x, x.dtype.type(y))


def _select(eqn: Any) -> Callable[..., Any]:
    return lambda which, *cases: cases[int(which)]


def _clamp(eqn: Any) -> Callable[..., Any]:
    return lambda low, x, high: np.minimum(np.maximum(x, low), high)


def _same(eqn: Any) -> Callable[..., Any]:
    return lambda x: x


def _not(eqn: Any) -> Callable[..., Any]:
    return np.invert


_TABLE: dict[str, Callable[[Any], Callable[..., Any] | None]] = {
    "add": _ufunc(np.add),
    "sub": _ufunc(np.subtract),
    "mul": _ufunc(np.multiply),
    "neg": _ufunc(np.negative),
    "abs": _ufunc(np.abs),
    "sign": _ufunc(np.sign),
    "max": _ufunc(np.maximum),
    "min": _ufunc(np.minimum),
    "and": _ufunc(np.bitwise_and),
    "or": _ufunc(np.bitwise_or),
    "xor": _ufunc(np.bitwise_xor),
    "not": _not,
    "eq": _ufunc(np.equal),
    "ne": _ufunc(np.not_equal),
    "lt": _ufunc(np.less),
    "le": _ufunc(np.less_equal),
    "gt": _ufunc(np.greater),
    "ge": _ufunc(np.greater_equal),
    "div": _div,
    "rem": _rem,
    "convert_element_type": _convert,
    "integer_pow": _integer_pow,
    "select_n": _select,
    "clamp": _clamp,
    "squeeze": _same,
    "reshape": _same,
    "broadcast_in_dim": _same,
    "copy": _same,
    "stop_gradient": _same,
}
