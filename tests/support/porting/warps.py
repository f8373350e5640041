# SPDX-License-Identifier: Apache-2.0
"""Four warps that copy a row block each, in a kernel over a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

SHAPE = (64, 128)
MESH = plgpu.Mesh(grid=(2,), grid_names=("i",))


@pl.kernel(
    out_type=jax.ShapeDtypeStruct((128, 128), jnp.float32),
    mesh=MESH,
)
def kernel(x_gmem, o_gmem):
    start = pl.multiple_of(64 * lax.axis_index("i"), 64)

    @pl.with_scoped(plgpu.SMEM(SHAPE, jnp.float32), plgpu.Barrier(num_arrivals=4))
    def negative(x_smem, barrier):
        @pl.kernel(mesh=plgpu.WarpMesh(axis_name="warp"))
        def load():
            warp = lax.axis_index("warp")
            plgpu.copy_gmem_to_smem(
                x_gmem.at[pl.ds(start + 16 * warp, 16)],
                x_smem.at[pl.ds(16 * warp, 16)],
                barrier,
            )

        load()
        plgpu.barrier_wait(barrier)
        return -x_smem[...]

    o_gmem[pl.ds(start, 64)] = negative()


def arguments(random):
    return [random.standard_normal((128, 128)).astype(np.float32)]


def expected(x):
    return -x
