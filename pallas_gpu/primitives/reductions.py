# SPDX-License-Identifier: Apache-2.0
"""Reductions of arrays in registers, by upstream's names; `jax.numpy` has them too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_gpu import _jax, errors, expect
from pallas_gpu.types import values

_ARGUMENTS = expect.arguments(
    x=values.array,
    axis=expect.optional(expect.integers()),
    keepdims=expect.boolean,
    accumulator_ilp=expect.optional(expect.integer(1, unit="accumulators")),
)


@_ARGUMENTS
def max(
    x: Any,
    axis: int | Sequence[int] | None = None,
    keepdims: bool = False,
    *,
    accumulator_ilp: int | None = None,
) -> jax.Array:
    """Returns the largest elements along axes.

    PTX: max in the registers of a thread, shfl.sync in a warp, and st.shared,
    barrier.sync and ld.shared between warps, in scratch that
    `CompilerParams.reduction_scratch_bytes` reserves. Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp; complete when it returns.

    Args:
      x: array of integers or floats.
      axis: the axes to reduce; None for all.
      keepdims: whether they remain, of size 1.
      accumulator_ilp: a hint that this compiler does not use: the number of partial
        results of a thread.

    Returns:
      An array of the element type of `x`.

    Raises:
      ArgumentError: an axis does not exist, or is named twice.
      DTypeError: there is no such reduction of the element type.

    Example:
      >>> o_ref[...] = plgpu.max(x_ref[...], axis=1)
    """
    return _reduced(lax.reduce_max, "max", x, axis, keepdims)


@_ARGUMENTS
def min(
    x: Any,
    axis: int | Sequence[int] | None = None,
    keepdims: bool = False,
    *,
    accumulator_ilp: int | None = None,
) -> jax.Array:
    """Returns the smallest elements along axes.

    PTX: min, and the rest as `max`. Since: sm_90.

    Issued as `max`.

    Args:
      x, axis, keepdims: as of `max`.
      accumulator_ilp: a hint, as of `max`.

    Returns:
      An array of the element type of `x`.

    Raises:
      ArgumentError, DTypeError: as `max`.
    """
    return _reduced(lax.reduce_min, "min", x, axis, keepdims)


@_ARGUMENTS
def sum(
    x: Any,
    axis: int | Sequence[int] | None = None,
    keepdims: bool = False,
    *,
    accumulator_ilp: int | None = None,
) -> jax.Array:
    """Returns the sums of elements along axes; narrow integers wrap.

    PTX: add, and the rest as `max`. Since: sm_90.

    Issued as `max`.

    Args:
      x, axis, keepdims: as of `max`.
      accumulator_ilp: a hint, as of `max`.

    Returns:
      An array of the element type of `x`, also where `jnp.sum` has a wider one.

    Raises:
      ArgumentError, DTypeError: as `max`.
    """
    return _reduced(lax.reduce_sum, "sum", x, axis, keepdims)


@_ARGUMENTS
def prod(
    x: Any,
    axis: int | Sequence[int] | None = None,
    keepdims: bool = False,
    *,
    accumulator_ilp: int | None = None,
) -> jax.Array:
    """Returns the products of elements along axes; narrow integers wrap.

    PTX: mul, and the rest as `max`. Since: sm_90.

    Issued as `max`.

    Args:
      x, axis, keepdims: as of `max`.
      accumulator_ilp: a hint, as of `max`.

    Returns:
      An array of the element type of `x`, also where `jnp.prod` has a wider one.

    Raises:
      ArgumentError, DTypeError: as `max`.
    """
    return _reduced(lax.reduce_prod, "prod", x, axis, keepdims)


def _reduced(reduce: Any, who: str, x: Any, axis: Any, keepdims: bool) -> jax.Array:
    given = tuple(range(x.ndim)) if axis is None else axis
    axes = {i % x.ndim for i in given if -x.ndim <= i < x.ndim}
    if len(axes) != len(given):
        raise errors.ArgumentError(
            f"{who}: invalid axes",
            expected=f"different axes of an array of shape {x.shape}",
            got=axis,
            hint="leave axis out for all of them",
            where=_jax.where_now(),
        )
    if x.dtype == jnp.bool_:
        raise errors.DTypeError(
            f"{who}: the elements are bools",
            expected="integers or floats",
            got=f"bool{list(x.shape)}",
            hint="jnp.any and jnp.all reduce bools; convert to count: "
            "x.astype(jnp.int32)",
            where=_jax.where_now(),
        )
    result = reduce(x, axes=tuple(sorted(axes)))
    return jnp.expand_dims(result, tuple(sorted(axes))) if keepdims else result
