# SPDX-License-Identifier: Apache-2.0
"""Attention's derivatives: statistics of the rows, the kernel, and what it leaves."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu.ops.flash.backward import hopper, queries
from pallas_gpu.ops.flash.backward.problem import BackwardProblem
from pallas_gpu.ops.flash.problem import Operands


def of_operands(
    p: BackwardProblem,
    x: Operands,
    results: tuple[jax.Array, jax.Array],
    cotangents: tuple[jax.Array, jax.Array | None],
    compiler_params: Any = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the derivatives of q, k and v.

    Args:
      x: the operands.
      results: the forward pass's, out and logsumexp (batch, heads, q_len).
      cotangents: of the results; None is zero.
    """
    q = x.q
    statistics = _statistics(p, results, cotangents)
    kernel = hopper.make_kernel(p, compiler_params, interpret)
    inputs = [q, x.k, x.v, cotangents[0].astype(q.dtype), *statistics]
    if p.scores.alibi:
        inputs.append(x.slopes)
    if p.config.deterministic:
        of_queries = queries.make_kernel(p, compiler_params, interpret)
        return of_queries(*inputs), *kernel(*inputs)
    total = jax.new_ref(jnp.zeros(q.shape, jnp.float32))
    dk, dv = kernel(*inputs, total)
    return (total[...] * p.scores.sm_scale).astype(q.dtype), dk, dv


def _statistics(
    p: BackwardProblem, results: Any, cotangents: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns (batch, heads, padded_q_len): base-2 logsumexp, and dO . O less dlse.

    Where a row has no probabilities, beyond the last one or with nothing to see, the
    logarithm is infinite: its exponentials become 0.
    """
    (out, lse), (do, dlse) = results, cotangents
    products = out.astype(jnp.float32) * do.astype(jnp.float32)
    delta = jnp.swapaxes(jnp.sum(products, axis=3), 1, 2)
    if dlse is not None:
        delta = delta - dlse
    lse = jnp.where(lse == -math.inf, math.inf, lse * math.log2(math.e))
    padding = [(0, 0), (0, 0), (0, p.padded_q_len - p.q_len)]
    lse = jnp.pad(lse, padding, constant_values=math.inf)
    return lse, jnp.pad(delta, padding)
