# SPDX-License-Identifier: Apache-2.0
"""Attention's derivatives: statistics of the rows, the kernel, and what it leaves."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from pallas_gpu.ops.flash import masks
from pallas_gpu.ops.flash.backward import bias, hopper, queries, rows
from pallas_gpu.ops.flash.backward.problem import SHIFTS, BackwardProblem, schedule
from pallas_gpu.ops.flash.operands import padded
from pallas_gpu.ops.flash.problem import Operands, packed_tiles


def of_operands(
    p: BackwardProblem,
    x: Operands,
    results: tuple[jax.Array, jax.Array],
    cotangents: tuple[jax.Array, jax.Array | None],
    compiler_params: Any = None,
    interpret: Any = None,
    *,
    with_bias: bool = False,
) -> tuple[Any, ...]:
    """Returns the derivatives of q, k and v, and that of the bias, or None.

    Args:
      x: the operands.
      results: the forward pass's, out and logsumexp (batch, heads, q_len).
      cotangents: of the results; None is zero.
    """
    (out, lse), (do, dlse) = results, cotangents
    if p.packed:
        one = jax.tree.map(lambda y: y[None], (x.q, x.k, x.v, out, lse, do, dlse))
        q, k, v, out, lse, do, dlse = one
        x = x._replace(q=q, k=k, v=v)
        starts = x.kv_starts, p.kv_tiles, p.block_kv
        of_tiles = {"of_tiles": packed_tiles(*starts)}
    else:
        of_tiles = {}
    do = do.astype(x.q.dtype)
    of_rows = rows.make_kernel(p, dlse is not None, compiler_params, interpret)
    sums = [lse] if dlse is None else [lse, dlse]
    lse, delta, *zeros = of_rows(out, do, *sums)
    arrays = x._asdict() | of_tiles | {"do": do, "lse": lse, "delta": delta}
    tile = p.block_kv, p.config.block_q
    if p.mask.segments:
        sizes = p.padded_q_len, plgpu.align_to(p.kv_len, p.block_kv)
        ids = [padded(x.q_ids, sizes[0]), padded(x.kv_ids, sizes[1])]
        arrays |= {"q_ids": ids[0], "kv_ids": ids[1]}
        arrays["of_segments"] = masks.segment_blocks(x.kv_ids, x.q_ids, *tile)
    if p.bias is not None:
        arrays["bias"] = bias.padded(p, x.bias)
    if p.persistent:
        arrays["schedule"] = jnp.asarray(schedule(p))
    kernel = hopper.make_kernel(p, compiler_params, interpret)
    shifted = {x: _shifted(arrays[x]) for x in ("lse", "delta")} if p.packed else {}
    inputs = [(arrays | shifted)[name] for name in p.inputs]
    if p.config.deterministic:
        of_queries = queries.make_kernel(p, compiler_params, interpret)
        results = kernel(*inputs)
        if p.mask.segments:
            tile = queries.BLOCK_Q, queries.BLOCK_KV
            arrays["of_segments"] = masks.segment_blocks(x.q_ids, x.kv_ids, *tile)
        if p.packed:
            tiles = p.tiles_of(p.q_len, queries.BLOCK_Q)
            arrays["of_tiles"] = packed_tiles(x.q_starts, tiles, queries.BLOCK_Q)
        inputs = [arrays[name] for name in p.inputs]
        dq, dbias = of_queries(*inputs), None
        if with_bias:
            dbias = bias.derivative(p, inputs, compiler_params, interpret)
        return *_unpacked(p, dq, *results), dbias
    if p.parts > 1:
        zeros += [jnp.zeros(y.shape, jnp.float32) for y in (x.k, x.v)]
    totals = {name: jax.new_ref(y) for name, y in zip(p.added, zeros, strict=True)}
    found = dict(zip(p.returned, kernel(*inputs, *totals.values()), strict=True))
    found |= {name: ref[...] for name, ref in totals.items()}
    found["dq"] *= p.scores.sm_scale
    narrow = [found[name].astype(x.q.dtype) for name in ("dq", "dk", "dv")]
    return *_unpacked(p, *narrow), None


def _unpacked(p: BackwardProblem, *found: jax.Array) -> Any:
    return tuple(y[0] for y in found) if p.packed else found


def _shifted(numbers: jax.Array) -> jax.Array:
    """Returns copies, each of which begins an element further than the one before."""
    copies = [
        jnp.pad(numbers, ((0, 0), (0, 0), (n, SHIFTS - n))) for n in range(SHIFTS)
    ]
    return jnp.concatenate(copies)
