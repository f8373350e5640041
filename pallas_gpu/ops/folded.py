# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of indices: of Python integers as such, of traced int32 by lax.

What can be computed as Python integers is: a kernel then has no branch for it. The
operations of jax.numpy take several times as long to trace as those of lax.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax


def plus(a: Any, b: Any) -> Any:
    return a + b if _static(a, b) else lax.add(*_alike(a, b))


def minus(a: Any, b: Any) -> Any:
    return a - b if _static(a, b) else lax.sub(*_alike(a, b))


def times(a: Any, b: Any) -> Any:
    return a * b if _static(a, b) else lax.mul(*_alike(a, b))


def divide(a: Any, b: Any) -> Any:
    """Returns a // b for a that is not negative."""
    return a // b if _static(a, b) else lax.div(*_alike(a, b))


def split(a: Any, b: Any) -> tuple[Any, Any]:
    """Returns a // b and a % b for a that is not negative."""
    if _static(a, b):
        return divmod(a, b)
    a, b = _alike(a, b)
    return lax.div(a, b), lax.rem(a, b)


def minimum(a: Any, b: Any) -> Any:
    return min(a, b) if _static(a, b) else lax.min(*_alike(a, b))


def maximum(a: Any, b: Any) -> Any:
    return max(a, b) if _static(a, b) else lax.max(*_alike(a, b))


def less(a: Any, b: Any) -> Any:
    return a < b if _static(a, b) else lax.lt(*_alike(a, b))


def where(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(condition, bool):
        return a if condition else b
    return jnp.where(condition, a, b)


def _static(a: Any, b: Any) -> bool:
    return isinstance(a, int) and isinstance(b, int)


def _alike(*operands: Any) -> list[Any]:
    given = [np.int32(x) if isinstance(x, int) else x for x in operands]
    shapes = {x.shape for x in given}
    if len(shapes) == 1:
        return given
    shape = np.broadcast_shapes(*shapes)
    return [x if x.shape == shape else jnp.broadcast_to(x, shape) for x in given]
