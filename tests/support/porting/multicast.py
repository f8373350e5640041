# SPDX-License-Identifier: Apache-2.0
"""A cluster whose CTAs share what TMA loads, and wait for each other."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

SHAPE = (64, 64)


def body(x_gmem, o_gmem, x_smem, loaded, done):
    plgpu.copy_gmem_to_smem(x_gmem, x_smem, loaded, collective_axes="c")
    plgpu.barrier_wait(loaded)
    c = lax.axis_index("c")
    o_gmem[c] = x_smem[...] + c
    plgpu.barrier_arrive(done)
    plgpu.barrier_wait(done)


kernel = plgpu.kernel(
    body,
    out_type=jax.ShapeDtypeStruct((2, *SHAPE), jnp.float32),
    scratch_types=[
        plgpu.SMEM(SHAPE, jnp.float32),
        plgpu.Barrier(),
        plgpu.ClusterBarrier(collective_axes=("c",)),
    ],
    cluster=(2,),
    cluster_names=("c",),
)


def arguments(random):
    return [random.standard_normal(SHAPE).astype(np.float32)]


def expected(x):
    return np.stack([x, x + 1])
