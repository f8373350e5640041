# SPDX-License-Identifier: Apache-2.0
"""Attention's derivatives: two numbers for each row of Q, and a dQ of zeros."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.ops.flash.backward.config import ROWS
from pallas_gpu.ops.flash.backward.problem import BackwardProblem
from pallas_gpu.ops.flash.problem import launch
from pallas_gpu.ops.folded import minus, split, times
from pallas_gpu.ops.memory import Memory
from pallas_gpu.ops.rules import cached
from pallas_gpu.ops.tiles import tiles

_ROW = plgpu.Layout.WGMMA_ROW


@cached
def make_kernel(p: BackwardProblem, inputs: tuple[str, ...]) -> Any:
    """Returns the function of out, dO, logsumexp and, if there is one, its cotangent.

    It returns logsumexp in base 2 and D = dO . O less the cotangent of logsumexp, both
    (batch, heads, padded_q_len), and zeros for dQ unless that is deterministic. Where a
    row has no probabilities, beyond the last one or with nothing to see, the logarithm
    is infinite: its exponentials become 0.
    """
    numbers = jax.ShapeDtypeStruct((p.outer, p.heads, p.padded_q_len), jnp.float32)
    shape = p.outer, p.q_len, p.heads, p.head_dim
    results = {"lse2": numbers, "delta": numbers}
    if not p.config.deterministic:
        results["dq"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    tile = tiles((ROWS, p.v_dim), p.dtype)
    scratch = {"both": (tile, tile), "full": plgpu.Barrier(num_arrivals=2)}
    body, name = functools.partial(_body, p), "attention_backward_rows"
    return launch(
        *(p, name, body, inputs, results, scratch),
        grid={"block": p.outer * p.heads * (p.padded_q_len // ROWS)},
        warpgroups=1,
    )


def _body(p: BackwardProblem, mem: Memory) -> None:
    # Neighbours have the same rows of neighbouring heads, which are adjacent in GMEM.
    place, head = split(lax.axis_index("block"), p.heads)
    batch, tile = split(place, p.padded_q_len // ROWS)
    start = times(tile, ROWS)
    rows = plgpu.ds(start, ROWS)
    outside = plgpu.OOBFillMode.ZEROS
    for source, smem in zip((mem.out, mem.do), mem.both, strict=True):
        part = source.at[batch, rows, head]
        plgpu.copy_gmem_to_smem(part, smem, mem.full, oob_mode=outside)
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=_ROW)
    inside = row < minus(p.q_len, start) if p.padded_q_len > p.q_len else None
    if not p.config.deterministic:
        _store_zeros(p, mem.dq, (batch, rows, head), minus(p.q_len, start))

    def load(ref):
        at = batch, head, rows
        return plgpu.load(ref, at, mask=inside, layout=_ROW, optimized=False)

    sums = load(mem.lse)
    seen = sums > -math.inf
    seen = seen if inside is None else seen & inside
    plgpu.barrier_wait(mem.full)
    products = [
        plgpu.load(smem, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
        for smem in mem.both
    ]
    d = jnp.sum(products[0] * products[1], axis=1)
    dlse = mem.get("dlse")
    d = d if dlse is None else d - load(dlse)
    logarithms = jnp.where(seen, sums * math.log2(math.e), math.inf)
    mem.lse2[batch, head, rows] = logarithms
    mem.delta[batch, head, rows] = jnp.where(seen, d, 0.0)


def _store_zeros(p: BackwardProblem, ref: Any, at: Any, count: Any) -> None:
    """Stores zeros to the first rows, as many as there are, of a tile of dQ."""
    shape = ROWS, p.head_dim
    zeros = jnp.zeros(shape, jnp.float32)
    if p.q_len % ROWS == 0 and p.padded_q_len == p.q_len:
        ref[at] = zeros
        return
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0)
    plgpu.store(ref, at, zeros, mask=lax.lt(row, jnp.broadcast_to(count, shape)))
