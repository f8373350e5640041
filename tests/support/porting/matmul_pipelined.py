# SPDX-License-Identifier: Apache-2.0
"""Matrix product whose blocks a pipeline loads, a grid of output tiles."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

M, N, K = 128, 128, 256
TILE_M, TILE_N, TILE_K = 64, 64, 64
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def body(a_gmem, b_gmem, o_gmem, o_smem):
    i, j = lax.axis_index("i"), lax.axis_index("j")

    def step(_, a_smem, b_smem):
        plgpu.wgmma(acc_ref, a_smem, b_smem)
        plgpu.wgmma_wait(1)

    def scope(acc):
        nonlocal acc_ref
        acc_ref = acc
        plgpu.emit_pipeline(
            step,
            grid=(K // TILE_K,),
            in_specs=[
                plgpu.BlockSpec(
                    (TILE_M, TILE_K),
                    lambda k: (i, k),
                    transforms=SWIZZLED,
                    delay_release=1,
                ),
                plgpu.BlockSpec(
                    (TILE_K, TILE_N),
                    lambda k: (k, j),
                    transforms=SWIZZLED,
                    delay_release=1,
                ),
            ],
            max_concurrent_steps=3,
        )(a_gmem, b_gmem)
        return acc[...]

    acc_ref = None
    o_smem[...] = pl.run_scoped(scope, plgpu.ACC((TILE_M, TILE_N))).astype(jnp.float16)
    plgpu.commit_smem()
    tile = pl.ds(i * TILE_M, TILE_M), pl.ds(j * TILE_N, TILE_N)
    plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[tile])
    plgpu.wait_smem_to_gmem(0)


kernel = plgpu.kernel(
    body,
    out_type=jax.ShapeDtypeStruct((M, N), jnp.float16),
    scratch_types=[plgpu.SMEM((TILE_M, TILE_N), jnp.float16, transforms=SWIZZLED)],
    grid=(M // TILE_M, N // TILE_N),
    grid_names=("i", "j"),
)


def arguments(random):
    shapes = (M, K), (K, N)
    return [random.integers(-2, 3, shape).astype(np.float16) for shape in shapes]


def expected(a, b):
    return (a.astype(np.float32) @ b.astype(np.float32)).astype(np.float16)
