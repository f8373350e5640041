# SPDX-License-Identifier: Apache-2.0
"""Attention's derivatives: statistics of the rows, the kernel, and what it leaves."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from pallas_gpu.ops.flash import masks
from pallas_gpu.ops.flash.backward import hopper, queries, rows
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
    (out, lse), (do, dlse) = results, cotangents
    do = do.astype(x.q.dtype)
    of_rows = rows.make_kernel(p, dlse is not None, compiler_params, interpret)
    sums = [lse] if dlse is None else [lse, dlse]
    lse, delta, *zeros = of_rows(out, do, *sums)
    arrays = x._asdict() | {"do": do, "lse": lse, "delta": delta}
    tile = p.block_kv, p.config.block_q
    if p.mask.segments:
        sizes = p.padded_q_len, plgpu.align_to(p.kv_len, p.block_kv)
        ids = [_padded(x.q_ids, sizes[0]), _padded(x.kv_ids, sizes[1])]
        arrays |= {"q_ids": ids[0], "kv_ids": ids[1]}
        arrays["of_segments"] = masks.segment_blocks(x.kv_ids, x.q_ids, *tile)
    kernel = hopper.make_kernel(p, compiler_params, interpret)
    inputs = [arrays[name] for name in p.inputs]
    if p.config.deterministic:
        of_queries = queries.make_kernel(p, compiler_params, interpret)
        results = kernel(*inputs)
        if p.mask.segments:
            tile = queries.BLOCK_Q, queries.BLOCK_KV
            arrays["of_segments"] = masks.segment_blocks(x.q_ids, x.kv_ids, *tile)
        return of_queries(*(arrays[name] for name in p.inputs)), *results
    total = jax.new_ref(zeros[0])
    dk, dv = kernel(*inputs, total)
    return (total[...] * p.scores.sm_scale).astype(x.q.dtype), dk, dv


def _padded(ids: jax.Array, length: int) -> jax.Array:
    return jnp.pad(ids, ((0, 0), (0, length - ids.shape[1])))
