# SPDX-License-Identifier: Apache-2.0
"""Reductions that consist of others: positions of extrema, any computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gpu import _jax
from pallas_gpu.composites import pairs
from pallas_gpu.composites.functions import unsigned
from pallas_gpu.entry.expand import Composite, composite


def _position_of(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """The first position of what a reduction gives; NaN exceeds everything."""

    def rule(composite: Composite, x: Any) -> Any:
        (axis,) = composite.params["axes"]
        found = jnp.expand_dims(reduce(x, axes=(axis,)), axis)
        # If there is a NaN, the reduction gives it, and it equals nothing.
        if x.dtype == np.float32:
            candidate = _reaches(reduce, x, found)
        else:
            candidate = (x == found) | (x != x)
        last = np.int32(x.shape[axis] - 1)
        position = lax.broadcasted_iota(np.int32, x.shape, axis)
        first = lax.reduce_min(jnp.where(candidate, position, last), axes=(axis,))
        return first.astype(composite.params["index_dtype"])

    return rule


def _reaches(reduce: Callable[..., Any], x: Any, found: Any) -> Any:
    """Which elements equal what a reduction gives, NaN for NaN: a comparison of each.

    It is an unordered one, with the number before the extremum, which no other element
    exceeds; or with the infinity that only NaN exceeds.
    """
    is_max = reduce is lax.reduce_max
    end = np.float32(np.inf if is_max else -np.inf)
    bound = -_next_above(-found) if is_max else _next_above(found)
    bound = jnp.where(found != found, end, bound)
    return ~(x <= bound if is_max else x >= bound)


def _next_above(x: Any) -> Any:
    """The next number above x; above infinity NaN, with which nothing is in order."""
    # The sum has no -0.
    bits = lax.bitcast_convert_type(x + np.float32(0), np.int32)
    return lax.bitcast_convert_type(bits + ((bits >> 31) | 1), np.float32)


composite("argmax")(_position_of(lax.reduce_max))
composite("argmin")(_position_of(lax.reduce_min))


# --- any computation ------------------------------------------------------------------


@composite("reduce")
def _reduce(composite: Composite, *operands: Any) -> list[Any]:
    """Combines pairs whose indices differ in a bit, the first of them first."""
    count = len(operands) // 2
    arrays, initial = list(operands[:count]), operands[count:]
    function = _on_arrays(composite, count)
    for axis in sorted(composite.params["dimensions"], reverse=True):
        arrays = _folded(function, arrays, initial, axis)
    wide = [jnp.broadcast_to(x, y.shape) for x, y in zip(initial, arrays, strict=True)]
    return function(wide, arrays)


def _on_arrays(composite: Composite, count: int) -> Callable[..., list[Any]]:
    body, consts = composite.params["jaxpr"], composite.params.get("consts", ())

    def function(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
        def scalars(*operands: Any) -> list[Any]:
            if isinstance(body, _jax.ClosedJaxpr):
                return _jax.eval_jaxpr(body.jaxpr, body.consts, *operands)
            return _jax.eval_jaxpr(body, consts, *operands)

        mapped = scalars
        for _ in range(first[0].ndim):
            mapped = jax.vmap(mapped)
        return list(mapped(*first, *second))

    return function


def _folded(
    function: Callable[..., list[Any]],
    arrays: Sequence[Any],
    initial: Sequence[Any],
    axis: int,
) -> list[Any]:
    """Reduces an axis."""
    size = pairs.raised(arrays[0].shape[axis])
    config = [(0, 0, 0)] * arrays[0].ndim
    config[axis] = (0, size - arrays[0].shape[axis], 0)
    if size != arrays[0].shape[axis]:
        arrays = [lax.pad(x, i, config) for x, i in zip(arrays, initial, strict=True)]
    distance = 1
    while distance < size:
        index = lax.broadcasted_iota(np.int32, arrays[0].shape, axis)
        is_second = (index & distance) != 0
        others = [
            _from_bits(pairs.partner(_bits(x), axis, distance), x) for x in arrays
        ]
        both = list(zip(others, arrays, strict=True))
        first = [jnp.where(is_second, other, x) for other, x in both]
        second = [jnp.where(is_second, x, other) for other, x in both]
        arrays = function(first, second)
        distance *= 2
    # All elements along the axis are equal.
    return [_from_bits(lax.reduce_or(_bits(x), axes=(axis,)), x) for x in arrays]


def _bits(x: Any) -> Any:
    return x.astype(np.uint8) if x.dtype == np.bool_ else unsigned(x)


def _from_bits(raw: Any, like: Any) -> Any:
    if like.dtype == np.bool_:
        return raw != 0
    return lax.bitcast_convert_type(raw, like.dtype)
