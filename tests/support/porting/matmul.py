# SPDX-License-Identifier: Apache-2.0
"""Matrix product on the tensor core, with an accumulator carried by a loop."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

M, N, K, BLOCK_K = 64, 128, 192, 64
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def body(a_gmem, b_gmem, o_gmem, a_smem, b_smem, barrier):
    def scope(acc):
        @pl.loop(0, K // BLOCK_K)
        def _(k):
            part = pl.ds(k * BLOCK_K, BLOCK_K)
            plgpu.copy_gmem_to_smem(a_gmem.at[:, part], a_smem, barrier)
            plgpu.copy_gmem_to_smem(b_gmem.at[part, :], b_smem, barrier)
            plgpu.barrier_wait(barrier)
            plgpu.wgmma(acc, a_smem, b_smem)
            plgpu.wgmma_wait(0)

        return acc[...]

    o_gmem[...] = pl.run_scoped(scope, plgpu.ACC((M, N), jnp.float32))


kernel = plgpu.kernel(
    body,
    out_type=jax.ShapeDtypeStruct((M, N), jnp.float32),
    scratch_types={
        "a_smem": plgpu.SMEM((M, BLOCK_K), jnp.float16, transforms=SWIZZLED),
        "b_smem": plgpu.SMEM((BLOCK_K, N), jnp.float16, transforms=SWIZZLED),
        "barrier": plgpu.Barrier(num_arrivals=2),
    },
)


def arguments(random):
    shapes = (M, K), (K, N)
    return [random.integers(-4, 5, shape).astype(np.float16) for shape in shapes]


def expected(a, b):
    return a.astype(np.float32) @ b.astype(np.float32)
