# SPDX-License-Identifier: Apache-2.0
"""Matrix product of a transposed operand, added to an initial value."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

M, N, K = 64, 64, 128
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def body(a_gmem, b_gmem, c_gmem, o_gmem, a_smem, b_smem, barriers):
    plgpu.copy_gmem_to_smem(a_gmem, a_smem, barriers.at[0])
    plgpu.copy_gmem_to_smem(b_gmem, b_smem, barriers.at[1])
    c = plgpu.load(c_gmem, layout=plgpu.Layout.WGMMA, optimized=False)
    for i in range(2):
        plgpu.barrier_wait(barriers.at[i])

    def multiply(acc):
        plgpu.wgmma(acc, a_smem, b_smem.T)

    o_gmem[...] = pl.run_state(multiply)(plgpu.ACC.init(c)).astype(jnp.bfloat16)


kernel = plgpu.kernel(
    body,
    out_type=[jax.ShapeDtypeStruct((M, N), jnp.bfloat16)],
    scratch_types=[
        plgpu.SMEM((M, K), jnp.bfloat16, transforms=SWIZZLED),
        plgpu.SMEM((N, K), jnp.bfloat16, transforms=SWIZZLED),
        plgpu.Barrier(num_barriers=2),
    ],
    compiler_params=plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane
    ),
)


def arguments(random):
    a, b = (random.integers(-2, 3, shape) for shape in ((M, K), (N, K)))
    c = random.integers(-2, 3, (M, N)).astype(np.float32)
    return [a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), c]


def expected(a, b, c):
    return [(c + a.astype(np.float32) @ b.astype(np.float32).T).astype(jnp.bfloat16)]
