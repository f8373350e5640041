# SPDX-License-Identifier: Apache-2.0
"""Attention of one new token to keys and values that lie in pages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu
from examples import Case, normal


def paged_decode(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
) -> jax.Array:
    """Returns softmax(q k^T / sqrt(d)) v for each sequence and head.

    Args:
      q: (sequences, heads, group, d): the queries that share a head's keys.
      k_pages, v_pages: (pages, heads, positions, d).
      table: (sequences, most pages), int32: a sequence's pages, in order.
      lengths: (sequences,), int32: its number of keys, at least 1.
    """
    sequences, heads, group, d = q.shape
    positions = k_pages.shape[2]

    def body(q_ref, k_ref, v_ref, table_ref, lengths_ref, o_ref):
        sequence, head = plgpu.program_id(0), plgpu.program_id(1)
        q, length = q_ref[0, 0], lengths_ref[sequence]

        def page(i, carry):
            top, total, acc = carry
            at = table_ref[sequence, i]
            k, v = k_ref[at, head], v_ref[at, head]
            s = jnp.dot(q, k.T, preferred_element_type=jnp.float32) * d**-0.5
            column = plgpu.broadcasted_iota(jnp.int32, s.shape, 1)
            s = jnp.where(i * positions + column < length, s, -jnp.inf)
            new_top = jnp.maximum(top, s.max(1))
            p, decay = jnp.exp(s - new_top[:, None]), jnp.exp(top - new_top)
            total = total * decay + p.sum(1)
            new = jnp.dot(p.astype(v.dtype), v, preferred_element_type=jnp.float32)
            return new_top, total, acc * decay[:, None] + new

        zeros = jnp.zeros((group,), jnp.float32)
        start = zeros - jnp.inf, zeros, jnp.zeros((group, d), jnp.float32)
        pages = (length + positions - 1) // positions
        _, total, acc = jax.lax.fori_loop(0, pages, page, start)
        o_ref[0, 0] = (acc / total[:, None]).astype(o_ref.dtype)

    own = plgpu.BlockSpec(
        (1, 1, group, d), lambda i, j: (i, j, 0, 0), memory_space=plgpu.GMEM
    )
    whole = plgpu.BlockSpec(memory_space=plgpu.GMEM)
    return plgpu.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(sequences, heads),
        in_specs=[own, whole, whole, whole, whole],
        out_specs=own,
    )(q, k_pages, v_pages, table, lengths)


def reference(q, k_pages, v_pages, table, lengths):
    def one(q, table, length):
        k, v = (x[table].swapaxes(0, 1) for x in (k_pages, v_pages))
        k, v = (x.reshape(x.shape[0], -1, x.shape[-1]) for x in (k, v))
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        s = jnp.einsum("hgd,hkd->hgk", q, k) * q.shape[-1] ** -0.5
        s = jnp.where(jnp.arange(s.shape[-1]) < length, s, -jnp.inf)
        return jnp.einsum("hgk,hkd->hgd", jax.nn.softmax(s, -1), v)

    return jax.vmap(one)(q, table, lengths).astype(q.dtype)


_BF16 = jnp.bfloat16
CASES = [
    Case(
        paged_decode,
        reference,
        (
            normal(0, 3, 2, 8, 64, dtype=_BF16),
            normal(1, 12, 2, 32, 64, dtype=_BF16),
            normal(2, 12, 2, 32, 64, dtype=_BF16),
            np.array([[3, 1, 0, 0], [5, 7, 9, 11], [2, 0, 0, 0]], np.int32),
            np.array([40, 128, 1], np.int32),
        ),
        2e-2,
    )
]
