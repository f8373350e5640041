# SPDX-License-Identifier: Apache-2.0
"""Rounding to narrow floats with a narrow scale for each block: MX formats and nvf4."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_gpu import errors, expect
from pallas_gpu.ops.narrow.block_scaled import ADMITTED, E2M1, E4M3, E8M0
from pallas_gpu.ops.rules import Array, as_dtype

_DTYPES = E4M3, jnp.dtype(jnp.float8_e5m2), E2M1
# Of float8_e8m0fnu: the exponent of 1, and what is not a number.
_BIAS, _NAN = 127, 255


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
    target = _type(dtype, _DTYPES, "values")
    narrow = target == E2M1
    held = E4M3 if narrow else E8M0
    if scale_dtype is not None:
        held = _type(scale_dtype, (E8M0, E4M3), "scales")
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


def _type(dtype: Any, among: tuple[Any, ...], what: str) -> jnp.dtype:
    found = as_dtype(dtype)
    if found in among:
        return found  # type: ignore[return-value]
    raise errors.DTypeError(
        f"quantize_blocks: {what} cannot have this type",
        expected=", ".join(d.name for d in among),
        got=expect.shown(dtype),
        hint="ops.quantize rounds to integers, with scales of float32",
    )
