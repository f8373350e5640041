# SPDX-License-Identifier: Apache-2.0
"""Softmax of rows: reductions, and broadcasts of their results."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS, COLUMNS = 128, 128


@plgpu.kernel(
    out_type=jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32),
    grid=(ROWS // 64,),
    grid_names=("i",),
)
def kernel(x_gmem, o_gmem):
    rows = pl.ds(lax.axis_index("i") * 64, 64)
    x = plgpu.load(x_gmem.at[rows], layout=plgpu.Layout.WGMMA, optimized=False)
    top = jnp.max(x, axis=1)
    e = jnp.exp(x - lax.broadcast_in_dim(top, x.shape, [0]))
    total = lax.broadcast_in_dim(jnp.sum(e, axis=1), x.shape, [0])
    o_gmem[rows] = e / total


def arguments(random):
    return [random.standard_normal((ROWS, COLUMNS)).astype(np.float32)]


def expected(x):
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)
