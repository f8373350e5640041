# SPDX-License-Identifier: Apache-2.0
"""Symmetric rounding of a matrix to 8 or 4 bits, with scales."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from pallas_gpu import errors, expect
from pallas_gpu.ops.rules import Array, result_type

_DTYPES = tuple(
    map(jnp.dtype, (jnp.int8, jnp.int4, jnp.float8_e4m3fn, jnp.float8_e5m2))
)


@expect.arguments(axis=expect.integer(-2, 1), group=expect.optional(expect.integer(1)))
def quantize(
    w: Array, dtype: Any = jnp.int8, *, axis: int = 0, group: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Rounds a matrix to a narrow type: `w` is about `values * scale`.

    The largest magnitude of what shares a scale becomes the largest number of the type;
    -128 and -8 are not used. It consists of operations of JAX, and is not fast.

    Args:
      w: matrix of a floating-point type.
      dtype: int8, int4, float8_e4m3fn or float8_e5m2.
      axis: the dimension that a product adds over: 0 for weights (K, N), 1 for weights
        (N, K) or tokens (M, K).
      group: number of elements along `axis` that share a scale; None: all of them.

    Returns:
      The values, like `w`, and the scales, float32: (other,) with an element for each
      index of the other dimension, or with `group` (groups, other), where the last
      group may be shorter. `ops.linear` takes them as they are.

    Raises:
      ShapeError, DTypeError: `w` is not a matrix of floats, or the type is another one.

    Example:
      >>> values, scale = quantize(w, jnp.int4, group=64)
      >>> y = linear(x, values, w_scale=scale)
    """
    if len(w.shape) != 2 or not jnp.issubdtype(w.dtype, jnp.floating):
        kind = errors.ShapeError if len(w.shape) != 2 else errors.DTypeError
        raise kind(
            "quantize: not a matrix of floats",
            expected="two dimensions, of a floating-point type",
            got=expect.shown(w),
            hint="use jax.vmap for a batch of matrices",
        )
    target = result_type(
        "quantize", dtype, _DTYPES, "jnp.int8 loses the least", what="values"
    )
    wide = jnp.asarray(w, jnp.float32)
    wide = wide if axis % 2 == 0 else wide.T
    depth, others = wide.shape
    size = depth if group is None else min(group, max(depth, 1))
    groups = plgpu.cdiv(depth, size) if depth else 0
    padded = jnp.pad(wide, ((0, groups * size - depth), (0, 0)))
    split = padded.reshape(groups, size, others)
    largest = jnp.max(jnp.abs(split), axis=1, initial=0.0)
    integer = jnp.issubdtype(target, jnp.integer)
    limit = float(jnp.iinfo(target).max if integer else jnp.finfo(target).max)
    scale = jnp.where(largest > 0, largest / limit, 1.0)
    values = jnp.clip(split / scale[:, None], -limit, limit)
    values = (jnp.round(values) if integer else values).astype(target)
    values = values.reshape(groups * size, others)[:depth]
    values = values if axis % 2 == 0 else values.T
    return values, scale.reshape(others) if group is None else scale
