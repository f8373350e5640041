# SPDX-License-Identifier: Apache-2.0
"""Rounding to narrow types with scales: symmetric ones, MX formats and nvf4."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors, expect
from pallas_gpu.ops.narrow.block_scaled import ADMITTED, E2M1, E4M3, E8M0
from pallas_gpu.ops.rules import FLOAT8, Array, result_type

_DTYPES = jnp.dtype(jnp.int8), jnp.dtype(jnp.int4), *FLOAT8
# Of float8_e8m0fnu: the exponent of 1, and what is not a number.
_BIAS, _NAN = 127, 255


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


@expect.arguments(block=expect.optional(expect.integer(1)))
def quantize_blocks(
    x: Array,
    dtype: Any = jnp.float8_e4m3fn,
    *,
    scale_dtype: Any = None,
    block: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Rounds to a narrow type with a scale for each block of the last dimension.

    `x` is about `values * jnp.repeat(scales, block, -1)`. A scale of float8_e8m0fnu is
    the smallest power of two with which no value is clipped; one of float8_e4m3fn is
    the largest magnitude of the block over that of the type, rounded. The latter
    represents magnitudes of up to 2688 and of at least 0.006: scale `x` to them, and
    pass the inverse factor to `block_scaled_matmul`. It consists of operations of JAX.

    Args:
      x: (..., K), of a floating-point type; K is a multiple of the block.
      dtype: float8_e4m3fn, float8_e5m2 or float4_e2m1fn.
      scale_dtype: float8_e8m0fnu, or for float4_e2m1fn also float8_e4m3fn; None: the
        latter for float4_e2m1fn, else the former.
      block: elements that share a scale; None: 16 for scales of float8_e4m3fn, else 32.

    Returns:
      The values, like `x`, and the scales, (..., K / block). A block with what is not
      finite has a scale that is not a number.

    Raises:
      ShapeError: K is not a multiple of the block.
      DTypeError: `x` is not of floats, or the tensor core has no such product.

    Example:
      >>> values, scales = quantize_blocks(x, jnp.float4_e2m1fn)
    """
    who, hint = (
        "quantize_blocks",
        "ops.quantize rounds to integers, with scales of float32",
    )
    target = result_type(who, dtype, (*FLOAT8, E2M1), hint, what="values")
    narrow = target == E2M1
    held = E4M3 if narrow else E8M0
    if scale_dtype is not None:
        held = result_type(who, scale_dtype, (E8M0, E4M3), hint, what="scales")
    size = block or (16 if held == E4M3 else 32)
    admitted = ADMITTED[4 if narrow else 8]
    if (held, size) not in admitted:
        raise errors.DTypeError(
            "quantize_blocks: the tensor core does not multiply such blocks",
            expected=f"for {target.name} "
            + " or ".join(f"{t.name} for each {b} elements" for t, b in admitted),
            got=f"{held.name} for each {size} elements",
            hint="omit scale_dtype and block",
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise errors.DTypeError(
            "quantize_blocks: not an array of floats",
            expected="a floating-point type",
            got=expect.shown(x),
            hint="convert it with astype",
        )
    if not x.shape or x.shape[-1] % size:
        raise errors.ShapeError(
            "quantize_blocks: the last dimension does not consist of whole blocks",
            expected=f"a multiple of {size}",
            got=tuple(x.shape),
            hint="pad it with zeros",
        )
    blocks = jnp.asarray(x, jnp.float32).reshape(
        *x.shape[:-1], x.shape[-1] // size, size
    )
    limit = float(jnp.finfo(target).max)
    largest = jnp.max(jnp.abs(blocks), axis=-1, initial=0.0)
    make = _powers if held == E8M0 else _fractions
    scales, divided = make(blocks, largest, limit)
    values = jnp.clip(divided, -limit, limit).astype(target)
    return values.reshape(x.shape), scales


def _powers(blocks: Any, largest: Any, limit: float) -> tuple[Any, Any]:
    """Scales of float8_e8m0fnu, and what is divided by them."""
    mantissa, exponent = jnp.frexp(largest / limit)
    # The mantissa is in [0.5, 1): a half is a power of two itself.
    exponent = jnp.where(mantissa == 0.5, exponent - 1, exponent)
    exponent = jnp.clip(jnp.where(largest > 0, exponent, 0), -_BIAS, _BIAS)
    bits = jnp.where(jnp.isfinite(largest), exponent + _BIAS, _NAN).astype(jnp.uint8)
    divided = jnp.ldexp(blocks, -exponent[..., None])
    return lax.bitcast_convert_type(bits, E8M0), divided


def _fractions(blocks: Any, largest: Any, limit: float) -> tuple[Any, Any]:
    """Scales of float8_e4m3fn, and what is divided by them."""
    most = float(jnp.finfo(E4M3).max)
    # `minimum` keeps what is not a number, and a magnitude without bound is one.
    wanted = jnp.where(jnp.isinf(largest), jnp.nan, largest / limit)
    scales = jnp.minimum(wanted, most).astype(E4M3)
    wide = scales.astype(jnp.float32)[..., None]
    divided = jnp.where(wide == 0, 0, blocks / jnp.where(wide == 0, 1, wide))
    return scales, divided
