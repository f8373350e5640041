# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy fused with the last linear layer: no array of all logits."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors, expect
from pallas_gpu.ops.gemm.matmul import matmul
from pallas_gpu.ops.gemm.problem import Problem
from pallas_gpu.ops.rows import logits
from pallas_gpu.ops.rules import (
    Array,
    Interpret,
    aligned,
    as_int32,
    no_types,
    vary_alike,
)

_WHO = "linear_cross_entropy"
# The derivatives of logits that exist at one time, in bytes.
_WORKSPACE = 256 * 2**20
_ALIGNED = 8


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
    labels = as_int32("linear_cross_entropy", "labels", labels)
    operands = rows, w, labels.reshape(-1)
    loss, logsumexp = _losses(problem, *vary_alike(operands))
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
        raise no_types("linear_cross_entropy", "float16 or bfloat16 for x and w", x, w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(p: Problem, x: jax.Array, w: jax.Array, labels: jax.Array) -> Any:
    function = logits.statistics(p, _WHO)
    operands = aligned(x)[None], aligned(w)[None]
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
        d_logits = logits.derivative(of_part, f"{_WHO}_backward")(
            *(aligned(x)[None], aligned(part)[None], _padded(labels - start, -1)),
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
    most = max(1, _WORKSPACE // (2 * rows * logits.CONFIG.tile_n))
    size = most * logits.CONFIG.tile_n
    return [(i, min(size, classes - i)) for i in range(0, classes, size)]


def _padded(rows: jax.Array, value: Any) -> jax.Array:
    missing = logits.padded_rows(rows.shape[0]) - rows.shape[0]
    return jnp.pad(rows, (0, missing), constant_values=value)
