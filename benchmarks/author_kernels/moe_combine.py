# SPDX-License-Identifier: Apache-2.0
"""The weighted sum of what a token's experts have computed, gathered by position."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu
from benchmarks.author_kernels import normal

# Tokens and columns of a block, stages.
CONFIGS = [(1, 1024, 1), (4, 1024, 3), (8, 512, 3), (8, 512, 4), (4, 1024, 4)]


def moe_combine(y, positions, weights, config=CONFIGS[0]):
    """Returns the sum over k of weights[t, k] * y[positions[t, k]].

    Args:
      y: (tokens * experts of a token, hidden), bfloat16.
      positions: (tokens, experts of a token), int32.
      weights: (tokens, experts of a token), float32.
    """
    (tokens, chosen), hidden = positions.shape, y.shape[1]
    rows, width, stages = config

    def body(y_ref, positions_ref, weights_ref, o_ref):
        mine = plgpu.ds(plgpu.program_id(0) * rows, rows)
        columns = plgpu.ds(plgpu.program_id(1) * width, width)

        @plgpu.loop(0, chosen, init_carry=jnp.zeros((rows, width)), num_stages=stages)
        def total(k, acc):
            part = y_ref[positions_ref[mine, k], columns]
            return acc + weights_ref[mine, k][:, None] * part.astype(jnp.float32)

        o_ref[mine, columns] = total.astype(o_ref.dtype)

    return plgpu.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((tokens, hidden), y.dtype),
        grid=(tokens // rows, hidden // width),
    )(y, positions, weights)


def reference(y, positions, weights):
    def one(now):
        positions, weights = now
        return weights @ y[positions].astype(jnp.float32)

    with jax.default_matmul_precision("highest"):
        return jax.lax.map(one, (positions, weights), batch_size=64).astype(y.dtype)


SMALL, FULL = (16, 4, 1024), (8192, 8, 4096)


def arrays(tokens, chosen, hidden):
    rng = np.random.default_rng(0)
    positions = rng.permutation(tokens * chosen).reshape(tokens, chosen)
    y = normal(1, tokens * chosen, hidden)
    weights = jnp.abs(normal(2, tokens, chosen, dtype=jnp.float32))
    return y, positions.astype(np.int32), weights / weights.sum(1, keepdims=True)


function = moe_combine
