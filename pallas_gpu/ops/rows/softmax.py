# SPDX-License-Identifier: Apache-2.0
"""Softmax and its logarithm along an axis, with derivatives."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors, expect
from pallas_gpu.ops.rows import rows
from pallas_gpu.ops.rows.rows import Columns, Rows
from pallas_gpu.ops.rules import Array, Interpret

# Columns that the registers of a warpgroup hold: of one array, and of two.
_MOST_COLUMNS, _MOST_OF_TWO = 16384, 8192


@expect.arguments()
def softmax(
    x: Array,
    *,
    axis: int = -1,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Interpret = None,
) -> jax.Array:
    """Computes the softmax along an axis.

    Since: sm_90a. Issued by: the host; composes with `jax.jit`, `jax.vmap` and
    `jax.grad` (reverse mode).

    Args:
      x: float32, float16 or bfloat16. Up to 16384 elements along the axis are read
        once, more of them twice.
      axis: the sum along it is one. If it is not the last, and too long for blocks of
        8192 elements and of 32 bytes along the axes after it, x is transposed before
        and after the kernel.
      compiler_params: see `pallas_call`; default: approximate exponentials for 16-bit
        types, exact ones for float32.
      interpret: see `pallas_call`.

    Returns:
      An array of the shape and type of x, computed in float32.

    Raises:
      ShapeError, DTypeError, ArgumentError: an empty array, another type, or an axis
        out of range.

    Example:
      >>> y = ops.softmax(x)
    """
    return _checked(x, axis, False, compiler_params, interpret)


@expect.arguments()
def log_softmax(
    x: Array,
    *,
    axis: int = -1,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Interpret = None,
) -> jax.Array:
    """Computes the logarithm of the softmax along an axis.

    Since: sm_90a. Issued by: the host; composes with `jax.jit`, `jax.vmap` and
    `jax.grad` (reverse mode).

    Args:
      x, axis, compiler_params, interpret: as for `softmax`.

    Returns:
      An array of the shape and type of x, computed in float32.

    Raises:
      ShapeError, DTypeError, ArgumentError: an empty array, another type, or an axis
        out of range.

    Example:
      >>> y = ops.log_softmax(x)
    """
    return _checked(x, axis, True, compiler_params, interpret)


def _checked(x: Any, axis: int, log: bool, compiler_params: Any, interpret: Any) -> Any:
    name = "log_softmax" if log else "softmax"
    rows.check(name, x=x)
    if not -x.ndim <= axis < x.ndim:
        raise errors.ArgumentError(
            f"{name}: x has no such axis",
            expected=f"axis from {-x.ndim} to {x.ndim - 1}",
            got=axis,
            hint="-1 is the last axis",
        )
    options = log, rows.params(compiler_params, x.dtype), interpret
    before, n, after = (math.prod(s) for s in _around(x.shape, axis % x.ndim))
    r = Columns((before, n, after))
    if after > 1 and r.fits(x.dtype.itemsize):
        return _softmax(x.reshape(r.shape), r, *options).reshape(x.shape)
    last = jnp.moveaxis(x, axis, -1)
    return jnp.moveaxis(_softmax(last, Rows(last.shape), *options), -1, axis)


def _around(shape: tuple[int, ...], axis: int) -> tuple[tuple[int, ...], ...]:
    return shape[:axis], shape[axis : axis + 1], shape[axis + 1 :]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _softmax(
    x: jax.Array, r: Rows, log: bool, compiler_params: Any, interpret: Any
) -> Any:
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
    function = jax.nn.log_softmax if log else jax.nn.softmax
    y = function(x_ref[...].astype(jnp.float32), axis=r.axis)
    y_ref[...] = y.astype(y_ref.dtype)


def _part(ref: Any, start: Any, size: int) -> Any:
    return ref[0, plgpu.ds(start, size)].astype(jnp.float32)


def _measured(r: Rows, x_ref: Any) -> tuple[Any, Any]:
    """Returns the maximum of a row, and the sum of exponentials less it."""

    def measure(start: Any, size: int, carry: Any) -> Any:
        top, total = carry
        x = _part(x_ref, start, size)
        new_top = jnp.maximum(top, jnp.max(x))
        return new_top, total * jnp.exp(top - new_top) + jnp.sum(jnp.exp(x - new_top))

    # A finite start: infinity minus infinity, of a row of them, is NaN.
    lowest = jnp.float32(jnp.finfo(jnp.float32).min)
    top, total = r.over_parts(measure, (lowest, jnp.float32(0)))
    return top, total


def _rows_in_parts(r: Rows, log: bool, x_ref: Any, y_ref: Any) -> None:
    """A first pass finds maximum and sum of a row, a second one writes it."""
    top, total = _measured(r, x_ref)
    shift = top + jnp.log(total) if log else top
    factor = 1 / total

    def write(start: Any, size: int, carry: Any) -> Any:
        shifted = _part(x_ref, start, size) - shift
        y = shifted if log else jnp.exp(shifted) * factor
        y_ref[0, plgpu.ds(start, size)] = y.astype(y_ref.dtype)
        return carry

    r.over_parts(write, jnp.int32(0))


def _forward(
    x: jax.Array, r: Rows, log: bool, compiler_params: Any, interpret: Any
) -> Any:
    y = _softmax(x, r, log, compiler_params, interpret)
    # A logarithm of 16 bits is too coarse to compute the probability from.
    return y, x if log else y


def _backward(
    r: Rows, log: bool, compiler_params: Any, interpret: Any, saved: Any, d_y: Any
) -> tuple[jax.Array]:
    body = _d_whole_rows if r.columns <= _MOST_OF_TWO else _d_rows_in_parts
    (d_x,) = r.call(
        functools.partial(body, r, log),
        [saved, d_y],
        [(r.columns, d_y.dtype)],
        name="log_softmax_backward" if log else "softmax_backward",
        compiler_params=compiler_params,
        interpret=interpret,
    )
    return (d_x,)


def _derivative(log: bool, p: Any, d_y: Any, total: Any) -> Any:
    """Returns the derivative from probabilities and the sum of a row."""
    return d_y - p * total if log else p * (d_y - total)


def _d_whole_rows(
    r: Rows, log: bool, saved_ref: Any, d_y_ref: Any, d_x_ref: Any
) -> None:
    saved, d_y = (ref[...].astype(jnp.float32) for ref in (saved_ref, d_y_ref))
    p = jax.nn.softmax(saved, axis=r.axis) if log else saved
    total = jnp.sum(d_y if log else p * d_y, r.axis)
    total = lax.broadcast_in_dim(total, d_y.shape, (1 - r.axis % 2,))
    d_x_ref[...] = _derivative(log, p, d_y, total).astype(d_x_ref.dtype)


def _d_rows_in_parts(
    r: Rows, log: bool, saved_ref: Any, d_y_ref: Any, d_x_ref: Any
) -> None:
    if log:
        top, denominator = _measured(r, saved_ref)
        factor = 1 / denominator

    def parts(start: Any, size: int) -> tuple[Any, Any]:
        saved, d_y = (_part(ref, start, size) for ref in (saved_ref, d_y_ref))
        return jnp.exp(saved - top) * factor if log else saved, d_y

    def add(start: Any, size: int, total: Any) -> Any:
        p, d_y = parts(start, size)
        return total + jnp.sum(d_y if log else p * d_y)

    total = r.over_parts(add, jnp.float32(0))

    def write(start: Any, size: int, carry: Any) -> Any:
        d_x = _derivative(log, *parts(start, size), total)
        d_x_ref[0, plgpu.ds(start, size)] = d_x.astype(d_x_ref.dtype)
        return carry

    r.over_parts(write, jnp.int32(0))


_softmax.defvjp(_forward, _backward)
