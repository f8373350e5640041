# SPDX-License-Identifier: Apache-2.0
"""Layouts by name: loads, casts, iota, and a scalar sum of a block."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

SHAPE = (64, 128)


def body(x_gmem, o_gmem, sums_gmem, x_smem, barrier):
    plgpu.copy_gmem_to_smem(x_gmem, x_smem, barrier)
    plgpu.barrier_wait(barrier)
    x = plgpu.load(x_smem, layout=plgpu.Layout.WG_STRIDED(SHAPE, vec_size=2))
    column = plgpu.broadcasted_iota(
        jnp.int32, SHAPE, 1, layout=plgpu.Layout.WG_STRIDED(SHAPE, vec_size=2)
    )
    even = jnp.where(column % 2 == 0, x, 0.0)
    total = jnp.sum(even)
    sums_gmem[...] = jnp.broadcast_to(total, (128,))
    x_smem[...] = even
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(x_smem, o_gmem)
    plgpu.wait_smem_to_gmem(0)


kernel = plgpu.kernel(
    body,
    out_type=(
        jax.ShapeDtypeStruct(SHAPE, jnp.float32),
        jax.ShapeDtypeStruct((128,), jnp.float32),
    ),
    scratch_types=(plgpu.SMEM(SHAPE, jnp.float32), plgpu.Barrier()),
    compiler_params=plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane
    ),
)


def arguments(random):
    return [random.integers(-9, 10, SHAPE).astype(np.float32)]


def expected(x):
    even = np.where(np.arange(SHAPE[1]) % 2 == 0, x, 0)
    return even, np.full((128,), even.sum(), np.float32)
