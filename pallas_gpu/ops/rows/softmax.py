# SPDX-License-Identifier: Apache-2.0
"""Softmax and its logarithm along an axis, with derivatives."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from pallas_gpu import errors, expect
from pallas_gpu.ops.rows import row_kernel, rows
from pallas_gpu.ops.rows.row_kernel import Reduction, Row
from pallas_gpu.ops.rows.rows import Columns, Launch, Rows
from pallas_gpu.ops.rules import Array, Interpret

# Columns of two arrays that the registers of a warpgroup hold.
_MOST_OF_TWO = 8192


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
    launch = Launch(name, rows.params(compiler_params, x.dtype), interpret)
    before, n, after = (math.prod(s) for s in _around(x.shape, axis % x.ndim))
    r = Columns((before, n, after))
    if after > 1 and r.fits(x.dtype.itemsize):
        return _softmax(x.reshape(r.shape), r, log, launch).reshape(x.shape)
    last = jnp.moveaxis(x, axis, -1)
    return jnp.moveaxis(_softmax(last, Rows(last.shape), log, launch), -1, axis)


def _around(shape: tuple[int, ...], axis: int) -> tuple[tuple[int, ...], ...]:
    return shape[:axis], shape[axis : axis + 1], shape[axis + 1 :]


def _measure(carry: Any, row: Row) -> tuple[Any, Any]:
    """Adds elements to the maximum of a row, and the sum of exponentials less it."""
    (top, total), x = carry, row.elements[0]
    if isinstance(total, float):
        # Whole rows: there is nothing to scale.
        top = row.max(x)
        return top, row.sum(jnp.exp(x - row.spread(top)))
    new_top = jnp.maximum(top, row.max(x))
    rest = row.sum(jnp.exp(x - row.spread(new_top)))
    return new_top, total * jnp.exp(top - new_top) + rest


# A finite start: infinity minus infinity, of a row of them, is NaN.
_MEASURED = Reduction((float(jnp.finfo(jnp.float32).min), 0.0), _measure)


def _probabilities(row: Row, measured: Any) -> Any:
    top, total = measured
    return jnp.exp(row.elements[0] - row.spread(top)) / row.spread(total)


def _logarithms(row: Row, measured: Any) -> Any:
    top, total = measured
    return row.elements[0] - row.spread(top) - row.spread(jnp.log(total))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _softmax(x: jax.Array, r: Rows, log: bool, launch: Launch) -> Any:
    apply = _logarithms if log else _probabilities
    (y,), _ = row_kernel.call(r, [_MEASURED], apply, [x], [x.dtype], launch)
    return y


def _forward(x: jax.Array, r: Rows, log: bool, launch: Launch) -> Any:
    y = _softmax(x, r, log, launch)
    # A logarithm of 16 bits is too coarse to compute the probability from.
    return y, x if log else y


def _backward(
    r: Rows, log: bool, launch: Launch, saved: Any, d_y: Any
) -> tuple[jax.Array]:
    def add(total: Any, row: Row, *measured: Any) -> Any:
        p, d = row.elements
        return total + row.sum(d if log else p * d)

    def apply(row: Row, *found: Any) -> Any:
        (p, d), total = row.elements, row.spread(found[-1])
        return d - _probabilities(row, found[0]) * total if log else p * (d - total)

    (d_x,), _ = row_kernel.call(
        *(r, [_MEASURED] * log + [Reduction(0.0, add)], apply),
        *([saved, d_y], [d_y.dtype], launch.backward),
        most_columns=_MOST_OF_TWO,
    )
    return (d_x,)


_softmax.defvjp(_forward, _backward)
