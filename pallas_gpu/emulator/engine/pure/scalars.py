# SPDX-License-Identifier: Apache-2.0
"""Integer and bool scalars: indices, loop counters, conditions.

Functions of Python's numbers where those of arrays would be slow.
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
    """Returns a function for an equation over scalars, if one is quick."""
    if len(eqn.outvars) != 1 or not is_scalar(eqn.outvars[0].aval):
        return None
    if not all(is_scalar(v.aval) for v in eqn.invars):
        return None
    make = _TABLE.get(eqn.primitive.name)
    return make(eqn) if make is not None else None


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


def _select(eqn: Any) -> Callable[..., Any]:
    # An index outside, as that of poison, selects the nearest case.
    last = len(eqn.invars) - 2
    return lambda which, *cases: cases[min(max(int(which), 0), last)]


def _same(eqn: Any) -> Callable[..., Any]:
    return lambda x: x


_TABLE: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "div": _div,
    "rem": _rem,
    "convert_element_type": _convert,
    "select_n": _select,
    "squeeze": _same,
    "reshape": _same,
    "broadcast_in_dim": _same,
}
