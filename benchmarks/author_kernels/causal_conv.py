# SPDX-License-Identifier: Apache-2.0
"""Mamba's convolution: causal, of four steps in each channel, with silu."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from benchmarks.author_kernels import normal

WIDTH = 4
# Steps and channels of a block.
CONFIGS = [(16, 512), (32, 512), (16, 256), (32, 256), (8, 1024)]


def causal_conv(x, weights, bias, config=CONFIGS[0]):
    """Returns silu(bias + the sum over k of weights[k] * x[:, t - 3 + k]).

    Args:
      x: (sequences, time, channels), bfloat16.
      weights: (4, channels), float32.
      bias: (channels,), float32.
    """
    sequences, time, channels = x.shape
    steps, width = config

    def body(x_ref, w_ref, bias_ref, o_ref):
        columns = plgpu.ds(plgpu.program_id(0) * width, width)
        first, sequence = plgpu.program_id(1) * steps, plgpu.program_id(2)
        rows = first - WIDTH + 1 + jnp.arange(steps + WIDTH - 1)[:, None]
        block = plgpu.load(
            x_ref,
            (sequence, rows, plgpu.program_id(0) * width + jnp.arange(width)[None]),
            mask=rows >= 0,
        ).astype(jnp.float32)
        weights = w_ref[:, columns]
        y = bias_ref[columns][None]
        for k in range(WIDTH):
            y += weights[k][None] * block[k : k + steps]
        o_ref[sequence, plgpu.ds(first, steps), columns] = jax.nn.silu(y).astype(
            x.dtype
        )

    return plgpu.pallas_call(
        body,
        out_shape=x,
        grid=(channels // width, time // steps, sequences),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(x, weights, bias)


def reference(x, weights, bias):
    padded = jnp.pad(x.astype(jnp.float32), ((0, 0), (WIDTH - 1, 0), (0, 0)))
    steps = x.shape[1]
    y = bias + sum(weights[k] * padded[:, k : k + steps] for k in range(WIDTH))
    return jax.nn.silu(y).astype(x.dtype)


SMALL, FULL = (2, 64, 1024), (8, 4096, 4096)


def arrays(sequences, time, channels):
    x, weights = normal(0, sequences, time, channels), normal(1, WIDTH, channels)
    return x, weights.astype(jnp.float32), normal(2, channels).astype(jnp.float32)


function = causal_conv
