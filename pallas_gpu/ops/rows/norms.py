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
from pallas_gpu.ops.rows import norms_backward, rows
from pallas_gpu.ops.rows.norms_backward import OnePass
from pallas_gpu.ops.rows.rows import Rows
from pallas_gpu.ops.rules import Array, Interpret, vary_alike

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
    return _norm(*vary_alike((x, columns)), norm)


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
    y, *_ = _normalized(norm, x_ref[...].astype(jnp.float32))
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


def _normalized(norm: _Norm, x: Any) -> tuple[Any, Any, Any]:
    """Returns normalized rows, the factor of each, and its mean if that counts."""
    mean = None
    if norm.centred:
        mean = _mean(x)
        x = x - mean
    factor = lax.rsqrt(_mean(x * x) + norm.epsilon)
    return x * factor, factor, mean


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
    scale_dtype = scale[0].dtype if scale else None
    one_pass = OnePass(r, x.dtype, scale_dtype, len(columns))
    if one_pass.fits:
        d_x, sums = norms_backward.backward(one_pass, norm, x, d_y, scale)
        return d_x, tuple(d.astype(c.dtype) for d, c in zip(sums, columns, strict=True))
    body = _d_whole_rows if r.columns <= _MOST_BACKWARD else _d_rows_in_parts
    number = 2 if norm.centred else 1
    d_x, *moments = r.call(
        functools.partial(body, r, norm),
        [x, d_y],
        [(r.columns, x.dtype), *[(1, jnp.float32)] * number],
        shared=scale,
        name=f"{norm.name}_backward",
        compiler_params=norm.compiler_params,
        interpret=norm.interpret,
    )
    if not columns:
        return d_x, ()
    sums = _sums_over_rows(r, norm, x, d_y, moments)
    return d_x, tuple(d.astype(c.dtype) for d, c in zip(sums, columns, strict=True))


def _d_refs(norm: _Norm, refs: Any) -> tuple[Any, Any, Any]:
    """Returns the scale, if any, the derivative, and factor and mean, if it counts."""
    number = 1 if norm.has_scale else 0
    return refs[:number], refs[number], refs[number + 1 :]


def _d_whole_rows(r: Rows, norm: _Norm, x_ref: Any, d_y_ref: Any, *refs: Any) -> None:
    del r
    scale, d_x_ref, moments = _d_refs(norm, refs)
    y, *found = _normalized(norm, x_ref[...].astype(jnp.float32))
    factor, _ = found
    for ref, moment in zip(moments, found, strict=False):
        ref[:, 0] = jnp.max(moment, -1)
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
    scale, d_x_ref, moments = _d_refs(norm, refs)
    mean, factor = _moments(r, norm, x_ref)
    for ref, moment in zip(moments, (factor, mean), strict=False):
        ref[0, 0] = moment

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


def _sums_over_rows(r: Rows, norm: _Norm, x, d_y, moments) -> list[jax.Array]:
    """Returns the derivatives of scale and bias, where given: sums over rows.

    A block adds some columns of every `blocks`-th group of rows; the blocks' sums are
    few, and added outside.
    """
    groups = plgpu.cdiv(r.count, _SUM_ROWS)
    blocks = min(groups, _SUM_BLOCKS)
    exact = r.count % (_SUM_ROWS * blocks) == 0 and r.columns % _SUM_COLUMNS == 0
    shape = _SUM_ROWS, _SUM_COLUMNS
    number = norm.has_scale + norm.has_bias

    def body(x_ref, d_y_ref, *refs) -> None:
        moment_refs, sum_refs = refs[: len(moments)], refs[len(moments) :]
        first = plgpu.program_id(1) * _SUM_COLUMNS
        column = first + jnp.arange(_SUM_COLUMNS)

        def group(i: Any, totals: Any) -> Any:
            start = (i * blocks + plgpu.program_id(0)) * _SUM_ROWS
            row = start + jnp.arange(_SUM_ROWS)

            def load(ref: Any) -> Any:
                if exact:
                    at = plgpu.ds(start, _SUM_ROWS), plgpu.ds(first, _SUM_COLUMNS)
                    return ref[at].astype(jnp.float32)
                at = row[:, None], column[None, :]
                mask = (row < r.count)[:, None] & (column < r.columns)[None, :]
                return plgpu.load(ref, at, mask=mask, other=0).astype(jnp.float32)

            def of_rows(ref: Any) -> Any:
                masked = {} if exact else {"mask": row < r.count, "other": 0}
                of_row = plgpu.load(ref, (row, 0), **masked)
                return lax.broadcast_in_dim(of_row, shape, (0,))

            d = load(d_y_ref)
            terms = []
            if norm.has_scale:
                factor, *mean = map(of_rows, moment_refs)
                y = load(x_ref)
                terms.append(d * (y - mean[0] if mean else y) * factor)
            if norm.has_bias:
                terms.append(d)
            return tuple(map(lax.add, totals, terms))

        zeros = (jnp.zeros(shape, jnp.float32),) * number
        totals = lax.fori_loop(0, plgpu.cdiv(groups, blocks), group, zeros)
        at, mask = (plgpu.program_id(0), column), column < r.columns
        for ref, total in zip(sum_refs, totals, strict=True):
            plgpu.store(ref, at, total.sum(0), mask=mask)

    whole = plgpu.BlockSpec(memory_space=plgpu.GMEM)
    sums = plgpu.pallas_call(
        body,
        out_shape=[jax.ShapeDtypeStruct((blocks, r.columns), jnp.float32)] * number,
        grid=(blocks, plgpu.cdiv(r.columns, _SUM_COLUMNS)),
        in_specs=[whole] * (2 + len(moments)),
        out_specs=[whole] * number,
        name=f"{norm.name}_sums",
        compiler_params=norm.compiler_params,
        interpret=norm.interpret,
    )(*map(r.matrix, (x, d_y, *moments)))
    return [partial.sum(0) for partial in sums]


_norm.defvjp(_forward, _backward)
