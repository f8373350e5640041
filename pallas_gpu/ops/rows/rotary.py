# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: pairs of a head's elements, rotated by position."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors, expect
from pallas_gpu.ops.rows import rows
from pallas_gpu.ops.rows.rows import Launch
from pallas_gpu.ops.rules import Array, Interpret, as_int32, check_array, vary_alike

# Elements of a block: 16 a thread. Twice or half as many were slower on an H200.
_BLOCK = 2048


@expect.arguments()
def rotary_embedding(
    x: Array,
    positions: Array | None = None,
    *,
    base: float = 10000.0,
    interleaved: bool = False,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Interpret = None,
) -> jax.Array:
    """Rotates pairs of elements of each head by angles that grow with the position.

    Since: sm_90a. Issued by: the host; composes with `jax.jit`, `jax.vmap` and
    `jax.grad` (reverse mode, with respect to x).

    Pair i of n turns by `position * base ** (-i / n)`. Sines and cosines are computed
    once for all heads, in float32, before the kernel.

    Args:
      x: (batch, length, heads, head_dim), float32, float16 or bfloat16; head_dim even.
      positions: (length,) or (batch, length), integers; default: 0, 1, 2, ...
      base: the longest wavelength divided by 2 pi.
      interleaved: pairs are neighbours, (0, 1), (2, 3), ...; otherwise halves apart,
        (0, head_dim / 2), (1, head_dim / 2 + 1), ...
      compiler_params, interpret: see `pallas_call`.

    Returns:
      (batch, length, heads, head_dim) of the type of x, computed in float32.

    Raises:
      ShapeError, DTypeError, ArgumentError: arrays that do not match, another type, a
        base that is not positive.

    Example:
      >>> q = ops.rotary_embedding(q)
    """
    _check(x, positions, base)
    _, length, _, head_dim = x.shape
    if positions is None:
        positions = jnp.arange(length, dtype=jnp.int32)
    pairs = head_dim // 2
    frequency = base ** (-jnp.arange(pairs, dtype=jnp.float32) / pairs)
    # Sequences with the same positions share one table, which stays in the L2 cache.
    angle = positions.reshape(-1, 1).astype(jnp.float32) * frequency
    launch = Launch("rotary_embedding", compiler_params, interpret)
    operands = vary_alike((x, jnp.cos(angle), jnp.sin(angle)))
    return _rotate(*operands, interleaved, launch)


def _check(x: Any, positions: Any, base: Any) -> None:
    rows.check("rotary_embedding", x=x)
    if len(x.shape) != 4 or x.shape[3] % 2:
        raise errors.ShapeError(
            "rotary_embedding: x has another shape",
            expected="(batch, length, heads, head_dim), head_dim even",
            got=tuple(x.shape),
            hint="heads come before head_dim, the sequence before heads",
        )
    if not base > 0:
        raise errors.ArgumentError(
            "rotary_embedding: base is not positive",
            expected="a positive number, e.g. 10000.0",
            got=base,
            hint="omit base",
        )
    if positions is None:
        return
    as_int32("rotary_embedding", "positions", positions)
    shapes = [x.shape[1:2], x.shape[:2]]
    each = "one position for each element of the sequence"
    check_array("rotary_embedding", "positions", positions, shapes, each)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _rotate(
    x: jax.Array, cos: jax.Array, sin: jax.Array, interleaved: bool, launch: Launch
) -> jax.Array:
    """Rotates (batch, length, heads, head_dim) by angles of (tokens, pairs).

    The tokens are those of all sequences, or of one, whose angles all of them have.
    """
    batch, length, heads, head_dim = x.shape
    tokens, (positions, pairs) = batch * length, cos.shape
    some_heads = rows.together(heads, head_dim, _BLOCK)
    some_tokens = rows.together(positions, some_heads * head_dim, _BLOCK)
    tables = positions // some_tokens
    halves: Any = (slice(0, None, 2), slice(1, None, 2))
    if not interleaved:
        halves = (slice(0, pairs), slice(pairs, head_dim))

    def body(x_ref, cos_ref, sin_ref, y_ref) -> None:
        shape = some_tokens, some_heads, pairs
        cos, sin = (
            lax.broadcast_in_dim(ref[...], shape, (0, 2)) for ref in (cos_ref, sin_ref)
        )
        a, b = (x_ref[:, :, half].astype(jnp.float32) for half in halves)
        rotated = a * cos - b * sin, a * sin + b * cos
        for half, part in zip(halves, rotated, strict=True):
            y_ref[:, :, half] = part.astype(y_ref.dtype)

    def spec(index: Any, *block: int) -> plgpu.BlockSpec:
        return plgpu.BlockSpec(block, index, memory_space=plgpu.GMEM)

    whole = spec(lambda i, j: (i, j, 0), some_tokens, some_heads, head_dim)
    table = spec(lambda i, j: (lax.rem(i, tables), 0), some_tokens, pairs)
    y = plgpu.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((tokens, heads, head_dim), x.dtype),
        grid=(tokens // some_tokens, heads // some_heads),
        in_specs=[whole, table, table],
        out_specs=whole,
        **launch._asdict(),
    )(x.reshape(tokens, heads, head_dim), cos, sin)
    return y.reshape(x.shape)


def _forward(x, cos, sin, *options):
    return _rotate(x, cos, sin, *options), (cos, sin)


def _backward(interleaved, launch, saved, d_y):
    cos, sin = saved
    # Angles depend on positions alone, which are integers.
    d_x = _rotate(d_y, cos, -sin, interleaved, launch)
    return d_x, jnp.zeros_like(cos), jnp.zeros_like(sin)


_rotate.defvjp(_forward, _backward)
