# SPDX-License-Identifier: Apache-2.0
"""The Hadamard transform of rows of 4096, as two products with a matrix of 64 x 64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu
from benchmarks.author_kernels import normal

N = 64
# Rows of a step, steps of a block, stages.
CONFIGS = [(1, 1, 1), (1, 8, 2), (1, 8, 3), (2, 8, 2), (2, 4, 2)]


def matrix():
    """The Hadamard matrix of 64 x 64, divided by 8."""
    bits = np.arange(N)
    signs = np.bitwise_count(bits[:, None] & bits) % 2
    return jnp.asarray((1 - 2.0 * signs) / 8, jnp.bfloat16)


def hadamard(x, config=CONFIGS[0]):
    """Returns the orthonormal Hadamard transform of each row; x is (rows, 4096)."""
    rows, steps, stages = config
    f32 = jnp.float32

    def body(x_ref, h_ref, o_ref):
        for i in range(rows):
            right = jnp.dot(x_ref[i], h_ref[...], preferred_element_type=f32)
            both = jnp.dot(
                h_ref[...], right.astype(x.dtype), preferred_element_type=f32
            )
            o_ref[i] = both.astype(x.dtype)

    spec = plgpu.BlockSpec((rows, N, N), lambda i, j: (i * steps + j, 0, 0))
    return plgpu.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((len(x), N, N), x.dtype),
        grid=(len(x) // (rows * steps), steps),
        in_specs=[spec, plgpu.BlockSpec((N, N), lambda i, j: (0, 0))],
        out_specs=spec,
        compiler_params=plgpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            max_concurrent_steps=stages,
        ),
    )(x.reshape(-1, N, N), matrix()).reshape(x.shape)


def reference(x):
    h = matrix().astype(jnp.float32)
    y = x.astype(jnp.float32).reshape(-1, N, N)
    y = jnp.einsum("ij,rjk,kl->ril", h, y, h, precision="highest")
    return y.reshape(x.shape).astype(x.dtype)


SMALL, FULL = (16,), (16384,)


def arrays(rows):
    return (normal(0, rows, N * N),)


function = hadamard
