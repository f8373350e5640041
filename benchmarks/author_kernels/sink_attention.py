# SPDX-License-Identifier: Apache-2.0
"""Causal attention within a window, with a sink for each head, as in gpt-oss."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

import pallas_gpu as plgpu
from benchmarks.author_kernels import normal

# Queries and keys of a block, stages.
CONFIGS = [(64, 64, 2), (64, 64, 3), (64, 32, 3), (128, 64, 2)]
WINDOW, LOG2_E = 128, 1.4426950408889634


def sink_attention(q, k, v, sinks, config=CONFIGS[0]):
    """Returns softmax of the scores of the last 128 keys and of a sink, times v.

    Args:
      q: (heads, length, d), bfloat16.
      k, v: (kv heads, length, d), bfloat16.
      sinks: (heads,), float32: a score that has no value.
    """
    heads, length, d = q.shape
    group = heads // len(k)
    rows, columns, stages = config
    # Scores are powers of 2, which the hardware computes.
    f32, scale = jnp.float32, d**-0.5 * LOG2_E

    def body(q_ref, k_ref, v_ref, sinks_ref, o_ref):
        head, first = plgpu.program_id(1), plgpu.program_id(0) * rows
        mine = q_ref[0]
        position = first + plgpu.broadcasted_iota(jnp.int32, (rows, columns), 0)
        sink = sinks_ref[head] * LOG2_E
        start = jnp.zeros((rows, d)), jnp.full(rows, sink), jnp.full(rows, 1.0)
        begin = lax.max(first - WINDOW + 1, 0) // columns
        end = plgpu.cdiv(first + rows, columns)

        @plgpu.loop(begin, end, init_carry=start, num_stages=stages)
        def last(j, carry):
            acc, high, total = carry
            part = plgpu.ds(j * columns, columns)
            keys, values = k_ref[head // group, part, :], v_ref[head // group, part, :]
            scores = jnp.dot(mine, keys.T, preferred_element_type=f32) * scale
            key = j * columns + plgpu.broadcasted_iota(jnp.int32, scores.shape, 1)
            seen = (key <= position) & (key > position - WINDOW)
            scores = jnp.where(seen, scores, -jnp.inf)
            new = jnp.maximum(high, scores.max(1))
            p, faded = jnp.exp2(scores - new[:, None]), jnp.exp2(high - new)
            more = jnp.dot(p.astype(v.dtype), values, preferred_element_type=f32)
            return acc * faded[:, None] + more, new, total * faded + p.sum(1)

        acc, _, total = last
        o_ref[0] = (acc / total[:, None]).astype(q.dtype)

    block = plgpu.BlockSpec((1, rows, d), lambda i, head: (head, i, 0))
    whole = plgpu.BlockSpec(memory_space=plgpu.GMEM)
    return plgpu.pallas_call(
        body,
        out_shape=q,
        grid=(length // rows, heads),
        in_specs=[block, whole, whole, whole],
        out_specs=block,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, k, v, sinks)


def reference(q, k, v, sinks):
    def one(q, k, v, sink):
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        s = jnp.dot(q, k.T, precision="highest") * q.shape[-1] ** -0.5
        age = jnp.arange(len(q))[:, None] - jnp.arange(len(k))
        s = jnp.where((age >= 0) & (age < WINDOW), s, -jnp.inf)
        s = jnp.concatenate([s, jnp.full((len(q), 1), sink)], 1)
        return jnp.dot(jax.nn.softmax(s)[:, :-1], v, precision="highest")

    group = len(q) // len(k)
    k, v = (jnp.repeat(x, group, 0) for x in (k, v))
    return lax.map(lambda x: one(*x), (q, k, v, sinks)).astype(q.dtype)


SMALL, FULL = (2, 1, 256, 64), (64, 8, 8192, 64)


def arrays(heads, kv_heads, length, d):
    q, k, v = (
        normal(i, n, length, d) for i, n in enumerate((heads, kv_heads, kv_heads))
    )
    return q, k, v, normal(3, heads, dtype=jnp.float32)


function = sink_attention
