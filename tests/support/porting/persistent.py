# SPDX-License-Identifier: Apache-2.0
"""A persistent kernel: each CTA loops over its tiles, and counts them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

TILES, CTAS, TILE = 7, 3, (32, 128)


def body(x_gmem, o_gmem, counts_gmem):
    @plgpu.nd_loop((TILES,), collective_axes="cta", init_carry=jnp.int32(0))
    def count(info, carry):
        (tile,) = info.index
        o_gmem[tile] = x_gmem[tile] * info.local_index.astype(jnp.float32)
        return carry + 1

    counts_gmem[lax.axis_index("cta")] = count


kernel = plgpu.kernel(
    body,
    out_type=[
        jax.ShapeDtypeStruct((TILES, *TILE), jnp.float32),
        jax.ShapeDtypeStruct((CTAS,), jnp.int32),
    ],
    grid=(CTAS,),
    grid_names=("cta",),
)


def arguments(random):
    return [random.standard_normal((TILES, *TILE)).astype(np.float32)]


def expected(x):
    local = (np.arange(TILES) // CTAS).astype(np.float32)
    return [x * local[:, None, None], np.array([3, 2, 2], np.int32)]
