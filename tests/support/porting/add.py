# SPDX-License-Identifier: Apache-2.0
"""Sum of two arrays: a grid of blocks, read and written in GMEM."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

SHAPE = (256, 256)


@plgpu.kernel(
    out_type=jax.ShapeDtypeStruct(SHAPE, jnp.float32),
    grid=(4, 2),
    grid_names=("row", "column"),
)
def kernel(x_gmem, y_gmem, o_gmem):
    rows = pl.ds(lax.axis_index("row") * 64, 64)
    columns = pl.ds(lax.axis_index("column") * 128, 128)
    o_gmem[rows, columns] = x_gmem[rows, columns] + y_gmem[rows, columns]


def arguments(random):
    return [random.standard_normal(SHAPE).astype(np.float32) for _ in range(2)]


def expected(x, y):
    return x + y
