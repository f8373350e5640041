# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of indices: of Python integers as such, of traced int32 by lax.

What can be computed as Python integers is: a kernel then has no branch for it. The
operations of jax.numpy take several times as long to trace as those of lax.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax


def _folded(of_numbers: Callable[..., Any], traced: Callable[..., Any]) -> Any:
    def operation(a: Any, b: Any) -> Any:
        if isinstance(a, int) and isinstance(b, int):
            return of_numbers(a, b)
        return traced(*_alike(a, b))

    return operation


plus, minus = _folded(operator.add, lax.add), _folded(operator.sub, lax.sub)
times, less = _folded(operator.mul, lax.mul), _folded(operator.lt, lax.lt)
minimum, maximum = _folded(min, lax.min), _folded(max, lax.max)
# Of what is not negative: a // b, or a // b and a % b.
divide = _folded(operator.floordiv, lax.div)
split: Callable[[Any, Any], tuple[Any, Any]]
split = _folded(divmod, lambda a, b: (lax.div(a, b), lax.rem(a, b)))


def where(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(condition, bool):
        return a if condition else b
    return jnp.where(condition, a, b)


def _alike(*operands: Any) -> list[Any]:
    given = [np.int32(x) if isinstance(x, int) else x for x in operands]
    shapes = {x.shape for x in given}
    if len(shapes) == 1:
        return given
    shape = np.broadcast_shapes(*shapes)
    return [x if x.shape == shape else jnp.broadcast_to(x, shape) for x in given]
