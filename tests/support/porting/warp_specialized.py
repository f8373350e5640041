# SPDX-License-Identifier: Apache-2.0
"""A pipeline with a warpgroup that copies and two that compute."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS, COLUMNS, STEPS = 128, 64, 4


def body(x_gmem, o_gmem):
    def step(indices, x_smem):
        (i,) = indices
        start = lax.axis_index("wg") * 64
        o_gmem[pl.ds(i * ROWS + start, 64)] = jnp.exp(-x_smem[pl.ds(start, 64)])

    block = plgpu.BlockSpec((ROWS, COLUMNS), lambda i: (i, 0))
    plgpu.emit_pipeline_warp_specialized(
        step,
        grid=(STEPS,),
        memory_registers=40,
        in_specs=[block],
        max_concurrent_steps=2,
        num_compute_wgs=2,
        wg_axis="wg",
    )(x_gmem)


kernel = plgpu.kernel(
    body,
    out_type=jax.ShapeDtypeStruct((STEPS * ROWS, COLUMNS), jnp.float32),
    num_threads=3,
    thread_name="wg",
)


def arguments(random):
    return [random.standard_normal((STEPS * ROWS, COLUMNS)).astype(np.float32)]


def expected(x):
    return np.exp(-x)
