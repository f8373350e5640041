# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy fused with the last linear layer: no array of all logits.

The kernels are `ops.gemm.hopper`'s product with another end: `_statistics` reduces each
row of a tile to its maximum, the sum of its exponentials, and the logit of the row's
label; `_derivative` turns a tile into the derivative of the loss with respect to it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors, expect
from pallas_gpu.ops import rules
from pallas_gpu.ops.gemm import hopper
from pallas_gpu.ops.gemm.config import MatmulConfig
from pallas_gpu.ops.gemm.matmul import matmul
from pallas_gpu.ops.gemm.problem import Problem
from pallas_gpu.ops.rules import Array, Interpret

_WHO = "linear_cross_entropy"
# The derivatives of logits that exist at one time, in bytes.
_WORKSPACE = 256 * 2**20
_ALIGNED = 8
# A consumer's tile and its exponentials fit in the registers.
_CONFIG = MatmulConfig(tile_m=64, tile_n=128, stages=5, cluster=None)
_ROW = plgpu.Layout.WGMMA_ROW
# Below all logits, and finite: the difference of two of them is a number.
_LOWEST = float(jnp.finfo(jnp.float32).min)
# Results of `_statistics`, and operands of `_derivative`.
_FOUND, _FACTORS = ("tops", "totals", "picked"), ("d_top", "d_label", "logsumexp")


@expect.arguments()
def linear_cross_entropy(
    x: Array,
    w: Array,
    labels: Array,
    *,
    transpose_w: bool = False,
    return_logsumexp: bool = False,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Interpret = None,
) -> Any:
    """Computes `logsumexp(x @ w) - (x @ w)[label]` for each row, without the logits.

    Since: sm_90a; on Hopper alone. Issued by: the host; composes with `jax.jit`,
    `jax.vmap` and `jax.grad` (reverse mode).

    The forward pass keeps three numbers for each row and 128 classes. The backward
    pass multiplies again, some classes at a time, whose derivatives take 256 MiB at
    most.

    Args:
      x: (..., depth), float16 or bfloat16.
      w: (depth, classes), or (classes, depth) if `transpose_w`, of the same type.
      labels: (...), integers; rows whose label is no class have loss 0 and do not
        count in any derivative.
      transpose_w: whether the dimensions of `w` are exchanged.
      return_logsumexp: whether to return it as well, as for a penalty on it.
      compiler_params: see `kernel`; default: approximate exponentials.
      interpret: see `kernel`.

    Returns:
      (...), float32: the losses; with `return_logsumexp` a pair of them and of the
      logarithms of sums, 0 where a label is no class.

    Raises:
      ShapeError, DTypeError: arrays that do not match each other, or other types.

    Example:
      >>> loss = ops.linear_cross_entropy(hidden, head, labels).mean()
    """
    _check(x, w, labels, transpose_w)
    rows = x.reshape(-1, x.shape[-1])
    sizes = rows.shape[0], w.shape[0 if transpose_w else 1], rows.shape[1]
    problem = Problem(
        *(*sizes, jnp.dtype(x.dtype), jnp.dtype(x.dtype)),
        transpose_b=transpose_w,
        compiler_params=compiler_params or plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    labels = rules.as_int32("linear_cross_entropy", "labels", labels)
    operands = rows, w, labels.reshape(-1)
    loss, logsumexp = _losses(problem, *rules.vary_alike(operands))
    loss, logsumexp = (r.reshape(labels.shape) for r in (loss, logsumexp))
    return (loss, logsumexp) if return_logsumexp else loss


def _check(x: Any, w: Any, labels: Any, transpose_w: bool) -> None:
    depth = w.shape[-1 if transpose_w else 0] if len(w.shape) == 2 else None
    fits = len(x.shape) > 0 and 0 not in (*x.shape, *w.shape)
    if not fits or depth != x.shape[-1] or tuple(labels.shape) != x.shape[:-1]:
        order = "(classes, depth)" if transpose_w else "(depth, classes)"
        raise errors.ShapeError(
            "linear_cross_entropy: the shapes do not match",
            expected=f"x (..., depth), w {order}, labels (...), none of them empty",
            got=f"{tuple(x.shape)}, {tuple(w.shape)} and {tuple(labels.shape)}",
            hint="transpose_w says that w is (classes, depth)",
        )
    if x.dtype != w.dtype or x.dtype not in (jnp.float16, jnp.bfloat16):
        raise rules.no_types(
            "linear_cross_entropy", "float16 or bfloat16 for x and w", x, w
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(p: Problem, x: jax.Array, w: jax.Array, labels: jax.Array) -> Any:
    function = _statistics(p, _WHO)
    operands = rules.aligned(x)[None], rules.aligned(w)[None]
    tops, totals, picked = function(*operands, _padded(labels, -1))
    top = jnp.max(tops, 0)
    logsumexp = top + jnp.log(jnp.sum(totals * jnp.exp(tops - top), 0))
    has_loss = (labels >= 0) & (labels < p.n)
    rows = slice(p.m)
    loss = logsumexp[rows] - jnp.sum(picked, 0)[rows]
    return jnp.where(has_loss, loss, 0.0), jnp.where(has_loss, logsumexp[rows], 0.0)


def _forward(p: Problem, x: Any, w: Any, labels: Any) -> Any:
    loss, logsumexp = _losses(p, x, w, labels)
    return (loss, logsumexp), (x, w, labels, logsumexp)


def _backward(p: Problem, saved: Any, d: Any) -> Any:
    x, w, labels, logsumexp = saved
    d_loss, d_logsumexp = d
    has_loss = (labels >= 0) & (labels < p.n)
    # Padded rows, too, have factors of zero.
    d_label = _padded(jnp.where(has_loss, d_loss, 0.0), 0.0)
    d_top = d_label + _padded(jnp.where(has_loss, d_logsumexp, 0.0), 0.0)
    d_x: Any = None
    d_w = []
    common = {"compiler_params": p.compiler_params, "interpret": p.interpret}
    for start, count in _chunks(p.m, p.n):
        part = lax.slice_in_dim(w, start, start + count, axis=1 - p.transpose_b)
        # Its rows are multiples of 16 bytes, too; what the last columns hold is
        # dropped.
        of_part = p.but(n=count + -count % _ALIGNED)
        d_logits = _derivative(of_part, f"{_WHO}_backward")(
            *(
                rules.aligned(x)[None],
                rules.aligned(part)[None],
                _padded(labels - start, -1),
            ),
            *(d_top, d_label, _padded(logsumexp, 0.0)),
        )[0, :, :count]
        d_x = matmul(
            d_logits, part, transpose_b=not p.transpose_b, residual=d_x,
            out_dtype=jnp.float32, **common,
        )  # fmt: skip
        a, b = (d_logits, x) if p.transpose_b else (x, d_logits)
        d_w.append(matmul(a, b, transpose_a=True, **common))
    joined = jnp.concatenate(d_w, axis=1 - p.transpose_b)
    return d_x.astype(x.dtype), joined, None


_losses.defvjp(_forward, _backward)


def _chunks(rows: int, classes: int) -> list[tuple[int, int]]:
    most = max(1, _WORKSPACE // (2 * rows * _CONFIG.tile_n))
    size = most * _CONFIG.tile_n
    return [(i, min(size, classes - i)) for i in range(0, classes, size)]


def _padded(rows: jax.Array, value: Any) -> jax.Array:
    missing = _padded_rows(rows.shape[0]) - rows.shape[0]
    return jnp.pad(rows, (0, missing), constant_values=value)


# --- the kernels ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Reduced(hopper.Consumer):
    """A consumer that stores what its tiles' rows are reduced to."""

    def inputs(self, row: Any, column: Any) -> tuple[Any, Any, Any]:
        """Returns the labels of the rows, each element's column, and what is inside."""
        c, p = self.schedule.config, self.schedule.problem
        labels = self.of_rows(self.mem.labels, row)
        columns = plgpu.broadcasted_iota(jnp.int32, (c.tile_m, c.tile_n), 1) + column
        inside = columns < p.n if p.n % c.tile_n else None
        return labels, columns, inside

    def of_rows(self, ref: Any, row: Any) -> Any:
        window = ref.at[plgpu.ds(row, self.schedule.config.tile_m)]
        return plgpu.load(window, layout=_ROW, optimized=False)

    def to_columns(self, rows: Any) -> Any:
        c = self.schedule.config
        return lax.broadcast_in_dim(rows, (c.tile_m, c.tile_n), (0,))


class _Statistics(_Reduced):
    def store(self, products: Sequence[Any], batch: Any, row: Any, column: Any) -> None:
        del batch
        c, (x,) = self.schedule.config, products
        labels, columns, inside = self.inputs(row, column)
        if inside is not None:
            x = jnp.where(inside, x, _LOWEST)
        is_label = columns == self.to_columns(labels)
        picked = jnp.sum(jnp.where(is_label, x, 0.0), axis=1)
        top = jnp.max(x, axis=1)
        total = jnp.sum(jnp.exp(x - self.to_columns(top)), axis=1)
        at = lax.div(column, jnp.int32(c.tile_n)), plgpu.ds(row, c.tile_m)
        for name, rows in zip(_FOUND, (top, total, picked), strict=True):
            self.mem.get(name)[at] = rows


class _Derivative(_Reduced):
    def store(self, products: Sequence[Any], batch: Any, row: Any, column: Any) -> None:
        (x,) = products
        labels, columns, inside = self.inputs(row, column)
        d_top, d_label, logsumexp = (
            self.of_rows(self.mem.get(name), row) for name in _FACTORS
        )
        d = jnp.exp(x - self.to_columns(logsumexp)) * self.to_columns(d_top)
        is_label = columns == self.to_columns(labels)
        d = d - jnp.where(is_label, self.to_columns(d_label), 0.0)
        if inside is not None:
            d = jnp.where(inside, d, 0.0)
        super().store([d], batch, row, column)


def _call(p: Problem, name: str, consumer: Any, results: Any, *factors: str) -> Any:
    schedule, inputs = hopper.Schedule(p, _CONFIG), ("a", "b", "labels", *factors)
    return hopper.launch(schedule, name, consumer, results, inputs=inputs)


def _padded_rows(m: int) -> int:
    return plgpu.cdiv(m, _CONFIG.block_m) * _CONFIG.block_m


@rules.cached
def _statistics(p: Problem, name: str) -> Any:
    """Returns a function of x, w and labels.

    Its results are, for each tile of columns and each row, the largest logit, the sum
    of the exponentials of all less that one, and the logit of the label, or 0 where it
    is of another tile: float32 (column tiles, padded rows).
    """
    shape = plgpu.cdiv(p.n, _CONFIG.tile_n), _padded_rows(p.m)
    out = jax.ShapeDtypeStruct(shape, jnp.float32)
    return _call(p, name, _Statistics, dict.fromkeys(_FOUND, out))


@rules.cached
def _derivative(p: Problem, name: str) -> Any:
    """Returns a function of x, w, labels and three factors of each row.

    Its result, (1, M, N), is exp(logits - logsumexp) * d_top, less d_label in the
    column of the label.
    """
    out = jax.ShapeDtypeStruct(p.out_shape, p.out_dtype)
    return _call(p, name, _Derivative, out, *_FACTORS)
