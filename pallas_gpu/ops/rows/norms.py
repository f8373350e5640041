# SPDX-License-Identifier: Apache-2.0
"""RMS norm and layer norm over the last axis, with derivatives."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors, expect
from pallas_gpu.ops.rows import rows
from pallas_gpu.ops.rows.rows import Rows
from pallas_gpu.ops.rules import INTERPRET, PARAMS

# Columns that the registers of a warpgroup hold, forward and backward.
_MOST_COLUMNS, _MOST_BACKWARD = 16384, 4096
# The sums of scale and bias over rows: columns and rows of one block.
_SUM_COLUMNS, _SUM_ROWS = 128, 32
_SUM_BLOCKS = 8


@dataclasses.dataclass(frozen=True)
class _Norm:
    """What is computed: static facts."""

    centred: bool
    epsilon: float
    has_scale: bool
    has_bias: bool
    compiler_params: Any
    interpret: Any

    @property
    def name(self) -> str:
        return "layer_norm" if self.centred else "rms_norm"


@expect.arguments(
    x=expect.arrays,
    scale=expect.optional(expect.arrays),
    epsilon=expect.number,
    compiler_params=PARAMS,
    interpret=INTERPRET,
)
def rms_norm(
    x: Any,
    scale: Any = None,
    *,
    epsilon: float = 1e-6,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Divides each row by the root of the mean of its squares.

    Since: sm_90a. Issued by: the host; composes with `jax.jit`, `jax.vmap` and
    `jax.grad` (reverse mode).

    Args:
      x: (..., columns), float32, float16 or bfloat16.
      scale: (columns,), factors of the columns, of any of these types.
      epsilon: what is added to the mean.
      compiler_params, interpret: see `softmax`.

    Returns:
      (..., columns) of the type of x, computed in float32.

    Raises:
      ShapeError, DTypeError: arrays that do not match, or other types.

    Example:
      >>> y = ops.rms_norm(x, scale)
    """
    return _checked(x, scale, None, False, epsilon, compiler_params, interpret)


@expect.arguments(
    x=expect.arrays,
    scale=expect.optional(expect.arrays),
    bias=expect.optional(expect.arrays),
    epsilon=expect.number,
    compiler_params=PARAMS,
    interpret=INTERPRET,
)
def layer_norm(
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    epsilon: float = 1e-5,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Subtracts each row's mean, and divides by its standard deviation.

    Since: sm_90a. Issued by: the host; composes with `jax.jit`, `jax.vmap` and
    `jax.grad` (reverse mode).

    Args:
      x: (..., columns), float32, float16 or bfloat16.
      scale, bias: (columns,), factors and summands of the columns, of any of these
        types.
      epsilon: what is added to the variance.
      compiler_params, interpret: see `softmax`.

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
        if which in given and given[which].shape != x.shape[-1:]:
            raise errors.ShapeError(
                f"{name}: {which} does not match the columns of x",
                expected=tuple(x.shape[-1:]),
                got=tuple(given[which].shape),
                hint=f"{which} has one element a column",
            )
    norm = _Norm(
        centred,
        float(epsilon),
        scale is not None,
        bias is not None,
        rows.params(compiler_params, x.dtype),
        interpret,
    )
    columns = tuple(v for v in (scale, bias) if v is not None)
    return _norm(x, columns, norm)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _norm(x: jax.Array, columns: tuple[jax.Array, ...], norm: _Norm) -> jax.Array:
    """Returns normalized rows; `columns` holds scale and bias, where given."""
    r = Rows(x.shape)
    body = _whole_rows if r.columns <= _MOST_COLUMNS else _rows_in_parts
    (y,) = r.call(
        functools.partial(body, r, norm),
        [x],
        [(r.columns, x.dtype)],
        shared=columns,
        name=norm.name,
        compiler_params=norm.compiler_params,
        interpret=norm.interpret,
    )
    return y


def _whole_rows(r: Rows, norm: _Norm, x_ref: Any, *refs: Any) -> None:
    del r
    *columns, y_ref = refs
    y, _ = _normalized(norm, x_ref[...].astype(jnp.float32))
    scale, bias = _scale_and_bias(norm, columns)
    if scale is not None:
        y = y * _to_rows(scale[...].astype(jnp.float32), y.shape)
    if bias is not None:
        y = y + _to_rows(bias[...].astype(jnp.float32), y.shape)
    y_ref[...] = y.astype(y_ref.dtype)


def _rows_in_parts(r: Rows, norm: _Norm, x_ref: Any, *refs: Any) -> None:
    """Two passes measure a row, the mean first; a third one writes it."""
    *columns, y_ref = refs
    mean, factor = _moments(r, norm, x_ref)
    scale, bias = _scale_and_bias(norm, columns)

    def write(start: Any, size: int, carry: Any) -> Any:
        at = plgpu.ds(start, size)
        y = (x_ref[0, at].astype(jnp.float32) - mean) * factor
        if scale is not None:
            y = y * scale[at].astype(jnp.float32)
        if bias is not None:
            y = y + bias[at].astype(jnp.float32)
        y_ref[0, at] = y.astype(y_ref.dtype)
        return carry

    r.over_parts(write, jnp.int32(0))


def _scale_and_bias(norm: _Norm, columns: Any) -> tuple[Any, Any]:
    given = iter(columns)
    return (
        next(given) if norm.has_scale else None,
        next(given) if norm.has_bias else None,
    )


def _to_rows(x: Any, shape: tuple[int, int]) -> Any:
    return lax.broadcast_in_dim(x, shape, (1,))


def _mean(x: Any) -> Any:
    """Returns the mean of each row in all of its columns."""
    return lax.broadcast_in_dim(jnp.sum(x, -1) / x.shape[-1], x.shape, (0,))


def _normalized(norm: _Norm, x: Any) -> tuple[Any, Any]:
    """Returns normalized rows, and the factor that normalized each of them."""
    if norm.centred:
        x = x - _mean(x)
    factor = lax.rsqrt(_mean(x * x) + norm.epsilon)
    return x * factor, factor


def _moments(r: Rows, norm: _Norm, x_ref: Any) -> tuple[Any, Any]:
    """Returns mean, 0 for RMS norm, and factor of a long row."""

    def part(start: Any, size: int) -> Any:
        return x_ref[0, plgpu.ds(start, size)].astype(jnp.float32)

    def add(start: Any, size: int, total: Any) -> Any:
        return total + jnp.sum(part(start, size))

    mean = jnp.float32(0)
    if norm.centred:
        mean = r.over_parts(add, jnp.float32(0)) / r.columns

    def add_square(start: Any, size: int, total: Any) -> Any:
        x = part(start, size) - mean
        return total + jnp.sum(x * x)

    variance = r.over_parts(add_square, jnp.float32(0)) / r.columns
    return mean, lax.rsqrt(variance + norm.epsilon)


# --- derivatives ----------------------------------------------------------------------


def _forward(x: jax.Array, columns: tuple[jax.Array, ...], norm: _Norm) -> Any:
    return _norm(x, columns, norm), (x, columns)


def _backward(norm: _Norm, saved: Any, d_y: jax.Array) -> Any:
    """Rows in one launch, which also saves their moments; sums over rows in another."""
    x, columns = saved
    r = Rows(x.shape)
    scale = columns[:1] if norm.has_scale else ()
    body = _d_whole_rows if r.columns <= _MOST_BACKWARD else _d_rows_in_parts
    d_x, mean, factor = r.call(
        functools.partial(body, r, norm),
        [x, d_y],
        [(r.columns, x.dtype), (1, jnp.float32), (1, jnp.float32)],
        shared=scale,
        name=f"{norm.name}_backward",
        compiler_params=norm.compiler_params,
        interpret=norm.interpret,
    )
    if not columns:
        return d_x, ()
    d_scale, d_bias = _sums_over_rows(r, norm, x, d_y, mean, factor)
    sums = ([d_scale] if norm.has_scale else []) + ([d_bias] if norm.has_bias else [])
    return d_x, tuple(d.astype(c.dtype) for d, c in zip(sums, columns, strict=True))


def _d_whole_rows(r: Rows, norm: _Norm, x_ref: Any, d_y_ref: Any, *refs: Any) -> None:
    del r
    *scale, d_x_ref, mean_ref, factor_ref = refs
    x = x_ref[...].astype(jnp.float32)
    mean_ref[:, 0] = jnp.sum(x, -1) / x.shape[-1]
    y, factor = _normalized(norm, x)
    factor_ref[:, 0] = jnp.max(factor, -1)
    d = d_y_ref[...].astype(jnp.float32)
    if scale:
        d = d * _to_rows(scale[0][...].astype(jnp.float32), d.shape)
    d_x = d - y * _mean(d * y)
    if norm.centred:
        d_x = d_x - _mean(d)
    d_x_ref[...] = (d_x * factor).astype(d_x_ref.dtype)


def _d_rows_in_parts(
    r: Rows, norm: _Norm, x_ref: Any, d_y_ref: Any, *refs: Any
) -> None:
    *scale, d_x_ref, mean_ref, factor_ref = refs
    mean, factor = _moments(r, norm, x_ref)
    mean_ref[0, 0], factor_ref[0, 0] = mean, factor

    def parts(start: Any, size: int) -> Any:
        at = plgpu.ds(start, size)
        d = d_y_ref[0, at].astype(jnp.float32)
        if scale:
            d = d * scale[0][at].astype(jnp.float32)
        return (x_ref[0, at].astype(jnp.float32) - mean) * factor, d

    def add(start: Any, size: int, totals: Any) -> Any:
        y, d = parts(start, size)
        return totals[0] + jnp.sum(d * y), totals[1] + jnp.sum(d)

    along, total = r.over_parts(add, (jnp.float32(0), jnp.float32(0)))
    along, total = along / r.columns, total / r.columns

    def write(start: Any, size: int, carry: Any) -> Any:
        y, d = parts(start, size)
        d_x = d - y * along
        if norm.centred:
            d_x = d_x - total
        d_x_ref[0, plgpu.ds(start, size)] = (d_x * factor).astype(d_x_ref.dtype)
        return carry

    r.over_parts(write, jnp.int32(0))


def _sums_over_rows(r: Rows, norm: _Norm, x, d_y, mean, factor) -> tuple[Any, Any]:
    """Returns the derivatives of scale and bias: sums over rows.

    A block adds some columns of every `blocks`-th group of rows; the blocks' sums are
    few, and added outside.
    """
    groups = plgpu.cdiv(r.count, _SUM_ROWS)
    blocks = min(groups, _SUM_BLOCKS)

    exact = r.count % (_SUM_ROWS * blocks) == 0 and r.columns % _SUM_COLUMNS == 0
    shape = _SUM_ROWS, _SUM_COLUMNS

    def body(x_ref, d_y_ref, mean_ref, factor_ref, d_scale_ref, d_bias_ref) -> None:
        first = plgpu.program_id(1) * _SUM_COLUMNS
        column = first + jnp.arange(_SUM_COLUMNS)

        def group(i: Any, totals: Any) -> Any:
            start = (i * blocks + plgpu.program_id(0)) * _SUM_ROWS
            row = start + jnp.arange(_SUM_ROWS)
            inside = None if exact else row < r.count
            mask = None
            if inside is not None:
                mask = inside[:, None] & (column < r.columns)[None, :]

            def load(ref: Any) -> Any:
                if exact:
                    at = plgpu.ds(start, _SUM_ROWS), plgpu.ds(first, _SUM_COLUMNS)
                    return ref[at].astype(jnp.float32)
                at = row[:, None], column[None, :]
                return plgpu.load(ref, at, mask=mask, other=0).astype(jnp.float32)

            def of_rows(ref: Any) -> Any:
                other = None if inside is None else 0
                of_row = plgpu.load(ref, (row, 0), mask=inside, other=other)
                return lax.broadcast_in_dim(of_row, shape, (0,))

            d, x = load(d_y_ref), load(x_ref)
            y = (x - of_rows(mean_ref) if norm.centred else x) * of_rows(factor_ref)
            return totals[0] + d * y, totals[1] + d

        zeros = jnp.zeros(shape, jnp.float32)
        d_scale, d_bias = lax.fori_loop(
            0, plgpu.cdiv(groups, blocks), group, (zeros, zeros)
        )
        at, mask = (plgpu.program_id(0), column), column < r.columns
        plgpu.store(d_scale_ref, at, d_scale.sum(0), mask=mask)
        plgpu.store(d_bias_ref, at, d_bias.sum(0), mask=mask)

    whole = plgpu.BlockSpec(memory_space=plgpu.GMEM)
    sums = plgpu.pallas_call(
        body,
        out_shape=[jax.ShapeDtypeStruct((blocks, r.columns), jnp.float32)] * 2,
        grid=(blocks, plgpu.cdiv(r.columns, _SUM_COLUMNS)),
        in_specs=[whole] * 4,
        out_specs=[whole] * 2,
        name=f"{norm.name}_sums",
        compiler_params=norm.compiler_params,
        interpret=norm.interpret,
    )(*map(r.matrix, (x, d_y, mean, factor)))
    return sums[0].sum(0), sums[1].sum(0)


_norm.defvjp(_forward, _backward)
