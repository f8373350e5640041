# SPDX-License-Identifier: Apache-2.0
"""Attention of new tokens to keys and values in pages, which a ring loads ahead."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

import pallas_gpu as plgpu
from examples import paged_decode
from examples.chunked_scan import product

_TILES = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
# Rows of a product by wgmma.
ROWS = 64


def ring_decode(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
) -> jax.Array:
    """Returns softmax(q k^T / sqrt(d)) v for each sequence and head.

    Args:
      q: (sequences, heads, group, d): the queries that share a head's keys, at most 64.
      k_pages, v_pages: (pages, heads, positions, d), d = 64, 64 positions or fewer.
      table: (sequences, most pages), int32: a sequence's pages, in order.
      lengths: (sequences,), int32: its number of keys, at least 1.
    """
    sequences, heads, group, d = q.shape
    positions = k_pages.shape[2]
    roles = plgpu.Roles(consumers=1)
    page = plgpu.SMEM((4, positions, d), q.dtype, transforms=_TILES)
    ring = plgpu.Ring.of((page, page))
    queries = plgpu.SMEM((ROWS, d), q.dtype, transforms=_TILES)

    def body(q, k_pages, v_pages, table, lengths, o, ring, queries):
        sequence, head = lax.axis_index("sequence"), lax.axis_index("head")
        length = lengths[sequence]
        pages = (length + positions - 1) // positions

        def produce():
            @plgpu.loop(0, pages)
            def _(i):
                slot, at = ring.fill(i), table[sequence, i]
                for source, buffer in zip(
                    (k_pages, v_pages), slot.buffers, strict=True
                ):
                    plgpu.copy_gmem_to_smem(source.at[at, head], buffer, slot.full)

        def consume():
            queries[...] = jnp.zeros((ROWS, d), q.dtype)
            queries[:group] = q[sequence, head]
            plgpu.commit_smem()

            def attend(i, carry):
                top, total, acc = carry
                k, v = ring.take(i).buffers
                s = product(queries, plgpu.transpose_ref(k, (1, 0))) * d**-0.5
                column = plgpu.broadcasted_iota(jnp.int32, s.shape, 1)
                s = jnp.where(i * positions + column < length, s, -jnp.inf)
                new_top = jnp.maximum(top, s.max(1))
                p, decay = jnp.exp(s - new_top[:, None]), jnp.exp(top - new_top)
                acc = acc * decay[:, None] + product(p.astype(v.dtype), v)
                ring.release(i)
                return new_top, total * decay + p.sum(1), acc

            zeros = jnp.zeros((ROWS,), jnp.float32)
            start = zeros - jnp.inf, zeros, jnp.zeros((ROWS, d), jnp.float32)
            _, total, acc = lax.fori_loop(0, pages, attend, start)
            queries[...] = (acc / total[:, None]).astype(q.dtype)
            o[sequence, head] = queries[:group]

        roles.run(lax.axis_index("wg"), produce, consume)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=[ring, queries],
        grid=(sequences, heads),
        grid_names=("sequence", "head"),
        num_threads=roles.num_threads,
        thread_name="wg",
    )(q, k_pages, v_pages, table, lengths)


CASES = [dataclasses.replace(case, function=ring_decode) for case in paged_decode.CASES]
