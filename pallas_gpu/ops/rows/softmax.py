# SPDX-License-Identifier: Apache-2.0
"""Softmax and its logarithm over the last axis, with derivatives."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import expect
from pallas_gpu.ops.rows import rows
from pallas_gpu.ops.rows.rows import Rows
from pallas_gpu.ops.rules import INTERPRET, PARAMS

# Columns that the registers of a warpgroup hold: of one array, and of two.
_MOST_COLUMNS, _MOST_OF_TWO = 16384, 8192


@expect.arguments(x=expect.arrays, compiler_params=PARAMS, interpret=INTERPRET)
def softmax(
    x: Any,
    *,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Computes the softmax over the last axis.

    Since: sm_90a. Issued by: the host; composes with `jax.jit`, `jax.vmap` and
    `jax.grad` (reverse mode).

    Args:
      x: (..., columns), float32, float16 or bfloat16; a row of up to 16384 elements is
        read once, a longer one twice.
      compiler_params: see `pallas_call`; default: approximate exponentials for 16-bit
        types, exact ones for float32.
      interpret: see `pallas_call`.

    Returns:
      (..., columns) of the type of x, computed in float32.

    Raises:
      ShapeError, DTypeError: an empty array, or another type.

    Example:
      >>> y = ops.softmax(x)
    """
    rows.check("softmax", x=x)
    return _softmax(x, False, rows.params(compiler_params, x.dtype), interpret)


@expect.arguments(x=expect.arrays, compiler_params=PARAMS, interpret=INTERPRET)
def log_softmax(
    x: Any,
    *,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Computes the logarithm of the softmax over the last axis.

    Since: sm_90a. Issued by: the host; composes with `jax.jit`, `jax.vmap` and
    `jax.grad` (reverse mode).

    Args:
      x, compiler_params, interpret: as for `softmax`.

    Returns:
      (..., columns) of the type of x, computed in float32.

    Raises:
      ShapeError, DTypeError: an empty array, or another type.

    Example:
      >>> y = ops.log_softmax(x)
    """
    rows.check("log_softmax", x=x)
    return _softmax(x, True, rows.params(compiler_params, x.dtype), interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _softmax(x: jax.Array, log: bool, compiler_params: Any, interpret: Any) -> Any:
    r = Rows(x.shape)
    body = _whole_rows if r.columns <= _MOST_COLUMNS else _rows_in_parts
    (y,) = r.call(
        functools.partial(body, r, log),
        [x],
        [(r.columns, x.dtype)],
        name="log_softmax" if log else "softmax",
        compiler_params=compiler_params,
        interpret=interpret,
    )
    return y


def _whole_rows(r: Rows, log: bool, x_ref: Any, y_ref: Any) -> None:
    del r
    function = jax.nn.log_softmax if log else jax.nn.softmax
    y = function(x_ref[...].astype(jnp.float32), axis=-1)
    y_ref[...] = y.astype(y_ref.dtype)


def _rows_in_parts(r: Rows, log: bool, x_ref: Any, y_ref: Any) -> None:
    """A first pass finds maximum and sum of a row, a second one writes it."""

    def part(start: Any, size: int) -> Any:
        return x_ref[0, plgpu.ds(start, size)].astype(jnp.float32)

    def measure(start: Any, size: int, carry: Any) -> Any:
        top, total = carry
        x = part(start, size)
        new_top = jnp.maximum(top, jnp.max(x))
        return new_top, total * jnp.exp(top - new_top) + jnp.sum(jnp.exp(x - new_top))

    # A finite start: infinity minus infinity, of a row of them, is NaN.
    lowest = jnp.float32(jnp.finfo(jnp.float32).min)
    top, total = r.over_parts(measure, (lowest, jnp.float32(0)))
    shift = top + jnp.log(total) if log else top
    factor = 1 / total

    def write(start: Any, size: int, carry: Any) -> Any:
        shifted = part(start, size) - shift
        y = shifted if log else jnp.exp(shifted) * factor
        y_ref[0, plgpu.ds(start, size)] = y.astype(y_ref.dtype)
        return carry

    r.over_parts(write, jnp.int32(0))


def _forward(x: jax.Array, log: bool, compiler_params: Any, interpret: Any) -> Any:
    y = _softmax(x, log, compiler_params, interpret)
    return y, y


def _backward(
    log: bool, compiler_params: Any, interpret: Any, y: jax.Array, d_y: jax.Array
) -> tuple[jax.Array]:
    r = Rows(y.shape)

    def derivative(y: Any, d_y: Any, total: Any) -> Any:
        return d_y - jnp.exp(y) * total if log else y * (d_y - total)

    def product(y: Any, d_y: Any) -> Any:
        return d_y if log else y * d_y

    def whole_rows(y_ref: Any, d_y_ref: Any, d_x_ref: Any) -> None:
        y, d_y = (ref[...].astype(jnp.float32) for ref in (y_ref, d_y_ref))
        total = lax.broadcast_in_dim(jnp.sum(product(y, d_y), -1), y.shape, (0,))
        d_x_ref[...] = derivative(y, d_y, total).astype(d_x_ref.dtype)

    def in_parts(y_ref: Any, d_y_ref: Any, d_x_ref: Any) -> None:
        def parts(start: Any, size: int) -> Any:
            at = 0, plgpu.ds(start, size)
            return y_ref[at].astype(jnp.float32), d_y_ref[at].astype(jnp.float32)

        def add(start: Any, size: int, total: Any) -> Any:
            y, d_y = parts(start, size)
            return total + jnp.sum(product(y, d_y))

        total = r.over_parts(add, jnp.float32(0))

        def write(start: Any, size: int, carry: Any) -> Any:
            y, d_y = parts(start, size)
            d_x = derivative(y, d_y, total)
            d_x_ref[0, plgpu.ds(start, size)] = d_x.astype(d_x_ref.dtype)
            return carry

        r.over_parts(write, jnp.int32(0))

    (d_x,) = r.call(
        whole_rows if r.columns <= _MOST_OF_TWO else in_parts,
        [y, d_y],
        [(r.columns, y.dtype)],
        name="log_softmax_backward" if log else "softmax_backward",
        compiler_params=compiler_params,
        interpret=interpret,
    )
    return (d_x,)


_softmax.defvjp(_forward, _backward)
