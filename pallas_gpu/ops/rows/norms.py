# SPDX-License-Identifier: Apache-2.0
"""RMS norm and layer norm over the last axis, with derivatives."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import expect
from pallas_gpu.ops.rows import norms_backward, row_kernel, rows
from pallas_gpu.ops.rows.norms_backward import OnePass
from pallas_gpu.ops.rows.row_kernel import Reduction, Row
from pallas_gpu.ops.rows.rows import Launch, Rows
from pallas_gpu.ops.rules import Array, Interpret, check_array, vary_alike

# Columns that the registers of a warpgroup hold in the backward pass.
_MOST_BACKWARD = 4096


@dataclasses.dataclass(frozen=True)
class _Norm:
    centred: bool
    epsilon: float
    has_scale: bool
    has_bias: bool
    launch: Launch


@expect.arguments()
def rms_norm(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    epsilon: float = 1e-6,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Interpret = None,
) -> jax.Array:
    """Divides each row by the root of the mean of its squares.

    Since: sm_90a. Issued by: the host; composes with `jax.jit`, `jax.vmap` and
    `jax.grad` (reverse mode).

    Args:
      x: (..., columns), float32, float16 or bfloat16.
      scale, bias: (columns,), factors and summands of the columns, of any of these
        types.
      epsilon: what is added to the mean.
      compiler_params, interpret: see `softmax`.

    Returns:
      (..., columns) of the type of x, computed in float32.

    Raises:
      ShapeError, DTypeError: arrays that do not match, or other types.

    Example:
      >>> y = ops.rms_norm(x, scale)
    """
    return _checked(x, scale, bias, False, epsilon, compiler_params, interpret)


@expect.arguments()
def layer_norm(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    epsilon: float = 1e-5,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Interpret = None,
) -> jax.Array:
    """Subtracts each row's mean, and divides by its standard deviation.

    Since: sm_90a. Issued by: the host; composes with `jax.jit`, `jax.vmap` and
    `jax.grad` (reverse mode).

    Args:
      x, scale, bias, compiler_params, interpret: as of `rms_norm`.
      epsilon: what is added to the variance.

    Returns:
      (..., columns) of the type of x, computed in float32.

    Raises:
      ShapeError, DTypeError: arrays that do not match, or other types.

    Example:
      >>> y = ops.layer_norm(x, scale, bias)
    """
    return _checked(x, scale, bias, True, epsilon, compiler_params, interpret)


def _checked(x, scale, bias, centred, epsilon, compiler_params, interpret) -> Any:
    given = {"x": x, "scale": scale, "bias": bias}
    given = {name: array for name, array in given.items() if array is not None}
    name = "layer_norm" if centred else "rms_norm"
    rows.check(name, **given)
    for which in ("scale", "bias"):
        if which in given:
            each = f"{which} has one element a column"
            check_array(name, which, given[which], [x.shape[-1:]], each)
    norm = _Norm(
        centred,
        float(epsilon),
        scale is not None,
        bias is not None,
        Launch(name, rows.params(compiler_params, x.dtype), interpret),
    )
    columns = tuple(v for v in (scale, bias) if v is not None)
    return _norm(*vary_alike((x, columns)), norm)


def _reductions(norm: _Norm) -> list[Reduction]:
    """Returns those that find mean, if it counts, and factor of a row."""

    def add(total: Any, row: Row) -> Any:
        return total + row.sum(row.elements[0])

    def add_square(total: Any, row: Row, *mean: Any) -> Any:
        x = _less(row, *mean)
        return total + row.sum(x * x)

    def factor(total: Any, size: int) -> Any:
        return lax.rsqrt(total / size + norm.epsilon)

    means = [Reduction(0.0, add, lambda total, size: total / size)] * norm.centred
    return [*means, Reduction(0.0, add_square, factor)]


def _less(row: Row, *mean: Any) -> Any:
    x = row.elements[0]
    return x - row.spread(mean[0]) if mean else x


def _normalized(row: Row, moments: Sequence[Any]) -> Any:
    *mean, factor = moments
    return _less(row, *mean) * row.spread(factor)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _norm(x: jax.Array, columns: tuple[jax.Array, ...], norm: _Norm) -> jax.Array:
    def apply(row: Row, *moments: Any) -> Any:
        y = _normalized(row, moments)
        y = y * row.column(0) if norm.has_scale else y
        return y + row.column(norm.has_scale) if norm.has_bias else y

    (y,), _ = row_kernel.call(
        *(Rows(x.shape), _reductions(norm), apply, [x], [x.dtype], norm.launch),
        shared=columns,
    )
    return y


# --- derivatives ----------------------------------------------------------------------


def _forward(x: jax.Array, columns: tuple[jax.Array, ...], norm: _Norm) -> Any:
    return _norm(x, columns, norm), (x, columns)


def _backward(norm: _Norm, saved: Any, d_y: jax.Array) -> Any:
    """Rows in one launch, which also saves their moments; sums over rows in another."""
    x, columns = saved
    r = Rows(x.shape)
    scale = columns[:1] if norm.has_scale else ()
    scale_dtype = scale[0].dtype if scale else None
    one_pass = OnePass(r, x.dtype, scale_dtype, len(columns))
    if one_pass.fits:
        d_x, sums = norms_backward.backward(one_pass, norm, x, d_y, scale)
    else:
        d_x, moments = _d_rows(r, norm, x, d_y, scale)
        sums = _sums_over_rows(norm, x, d_y, moments) if columns else []
    return d_x, tuple(d.astype(c.dtype) for d, c in zip(sums, columns, strict=True))


def _d_rows(r: Rows, norm: _Norm, x, d_y, scale) -> tuple[jax.Array, list[Any]]:
    """Returns the derivative of x, and factor and mean, if it counts, of each row."""
    moments = _reductions(norm)

    def scaled(row: Row) -> Any:
        d = row.elements[1]
        return d * row.column(0) if scale else d

    def add(totals: Any, row: Row, *found: Any) -> Any:
        y, d = _normalized(row, found), scaled(row)
        return totals[0] + row.sum(d * y), totals[1] + row.sum(d)

    def means(totals: Any, size: int) -> Any:
        return totals[0] / size, totals[1] / size

    def apply(row: Row, *found: Any) -> Any:
        *found_moments, (along, total) = found
        d_x = scaled(row) - _normalized(row, found_moments) * row.spread(along)
        d_x = d_x - row.spread(total) if norm.centred else d_x
        return d_x * row.spread(found_moments[-1])

    (d_x,), found = row_kernel.call(
        *(r, [*moments, Reduction((0.0, 0.0), add, means)], apply),
        *([x, d_y], [x.dtype], norm.launch.backward),
        shared=scale,
        most_columns=_MOST_BACKWARD,
        return_reductions=True,
    )
    return d_x, [y[..., None] for y in reversed(found[: len(moments)])]


def _sums_over_rows(norm: _Norm, x, d_y, moments) -> list[jax.Array]:
    """Returns the derivatives of scale and bias, where given: sums over rows."""
    factor, *mean = moments
    x, d = x.astype(jnp.float32), d_y.astype(jnp.float32)
    y = (x - mean[0] if mean else x) * factor
    terms = [d * y] * norm.has_scale + [d] * norm.has_bias
    return [jnp.sum(term, tuple(range(x.ndim - 1))) for term in terms]


_norm.defvjp(_forward, _backward)
