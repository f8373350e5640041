# SPDX-License-Identifier: Apache-2.0
"""Attention of blocks of queries to the blocks of keys that a table names.

The blocks of keys and values are copied ahead without a change of the loop.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from examples import Case, integers, normal

BLOCK = 64
F32 = jnp.float32


def sparse_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    table: jax.Array,
    num_stages: int | None = None,
    compiler_params: plgpu.CompilerParams | None = None,
) -> jax.Array:
    """Returns softmax(q @ k.T / sqrt(d)) @ v over some blocks of 64 keys.

    Args:
      q: (heads, queries, d).
      k, v: (heads, keys, d).
      table: (heads, queries // 64, n), int32: the blocks for each block of queries.
      num_stages: stages of the loop over these blocks.
      compiler_params: of the kernel.
    """
    heads, queries, d = q.shape
    scale = d**-0.5

    def body(q_ref, k_ref, v_ref, table_ref, o_ref):
        head, i = plgpu.program_id(0), plgpu.program_id(1)
        mine = q_ref[head, plgpu.ds(i * BLOCK, BLOCK), :]
        start = (jnp.zeros((BLOCK, d)), jnp.full(BLOCK, -jnp.inf), jnp.zeros(BLOCK))

        @plgpu.loop(0, table.shape[2], init_carry=start, num_stages=num_stages)
        def last(j, carry):
            acc, high, total = carry
            rows = plgpu.ds(table_ref[head, i, j] * BLOCK, BLOCK)
            keys, values = k_ref[head, rows, :], v_ref[head, rows, :]
            scores = jnp.dot(mine, keys.T, preferred_element_type=F32) * scale
            new = jnp.maximum(high, scores.max(1))
            p, faded = jnp.exp(scores - new[:, None]), jnp.exp(high - new)
            part = jnp.dot(p.astype(v.dtype), values, preferred_element_type=F32)
            return acc * faded[:, None] + part, new, total * faded + p.sum(1)

        acc, _, total = last
        out = (acc / total[:, None]).astype(q.dtype)
        o_ref[head, plgpu.ds(i * BLOCK, BLOCK), :] = out

    # Blocks that run at a time are of one head, whose keys and values are in L2.
    grid = (heads, queries // BLOCK)
    call = plgpu.pallas_call(
        body, out_shape=q, grid=grid, compiler_params=compiler_params
    )
    return call(q, k, v, table)


def reference(q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array) -> jax.Array:
    """Computes the same in plain JAX."""

    def one(q: jax.Array, k: jax.Array, v: jax.Array, blocks: jax.Array) -> jax.Array:
        """One block of queries of a head."""
        d = q.shape[-1]
        keys, values = (x.reshape(-1, BLOCK, d)[blocks].reshape(-1, d) for x in (k, v))
        scores = jnp.dot(q, keys.T, preferred_element_type=F32) * d**-0.5
        p = jax.nn.softmax(scores).astype(q.dtype)
        return jnp.dot(p, values, preferred_element_type=F32).astype(q.dtype)

    blocks = q.reshape(q.shape[0], -1, BLOCK, q.shape[-1])
    of_head = jax.vmap(one, (0, None, None, 0))
    return jax.vmap(of_head)(blocks, k, v, table).reshape(q.shape)


_Q, _K, _V = (normal(i, 2, 256, 64, dtype=jnp.bfloat16) for i in range(3))
_TABLE = integers(3, 0, 4, 2, 4, 3)
CASES = [
    Case(sparse_attention, reference, (_Q, _K, _V, _TABLE), 0.03),
    Case(
        functools.partial(sparse_attention, num_stages=2),
        reference,
        (_Q, _K, _V, _TABLE[..., :1]),
        0.03,
    ),
]
