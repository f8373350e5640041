# SPDX-License-Identifier: Apache-2.0
"""SwiGLU, with the result in float8 and a scale for each row."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from benchmarks.author_kernels import normal

# Rows of a block, stages.
CONFIGS = [(1, 1), (4, 2), (8, 2), (8, 3)]
LARGEST = 448.0


def swiglu_fp8(x, config=CONFIGS[0]):
    """Returns silu(x[:, :n]) * x[:, n:] / scale as float8_e4m3fn, and the scales.

    Args:
      x: (rows, 2 * n), bfloat16.
    """
    rows, n = x.shape[0], x.shape[1] // 2
    block, stages = config

    def body(x_ref, o_ref, scale_ref):
        @plgpu.loop(0, block, num_stages=stages)
        def _(step):
            i = plgpu.program_id(0) * block + step
            gate = x_ref[i, plgpu.ds(0, n)].astype(jnp.float32)
            up = x_ref[i, plgpu.ds(n, n)].astype(jnp.float32)
            y = jax.nn.silu(gate) * up
            scale = jnp.maximum(jnp.abs(y).max(), 1e-10) / LARGEST
            o_ref[i] = (y * (1 / scale)).astype(o_ref.dtype)
            scale_ref[i] = scale

    return plgpu.pallas_call(
        body,
        out_shape=(
            jax.ShapeDtypeStruct((rows, n), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ),
        grid=rows // block,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(x)


def reference(x):
    gate, up = jnp.split(x.astype(jnp.float32), 2, 1)
    y = jax.nn.silu(gate) * up
    scale = jnp.maximum(jnp.abs(y).max(1), 1e-10) / LARGEST
    return (y / scale[:, None]).astype(jnp.float8_e4m3fn), scale


SMALL, FULL = (8, 512), (16384, 4096)


def arrays(rows, n):
    return (normal(0, rows, 2 * n),)


function = swiglu_fp8
