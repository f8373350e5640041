# SPDX-License-Identifier: Apache-2.0
"""Arrays and kernels of the tests of accesses by elements."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu
from tests.support import everywhere

WARPGROUP = (plgpu.LoweringSemantics.Warpgroup,)
SWIZZLED = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
X = np.arange(64 * 128, dtype=np.float32).reshape(64, 128)
ROWS = np.random.default_rng(0).permutation(64).astype(np.int32)
COLUMNS = np.random.default_rng(1).permutation(128).astype(np.int32)


def kernel(body, shape, dtype=np.float32, **options):
    """Returns `make` for a kernel with one result."""
    return everywhere.kernel(body, jax.ShapeDtypeStruct(shape, dtype), **options)


def in_smem(transforms=(), dtype=jnp.float32, shape=(64, 128)):
    return {"scratch_types": [plgpu.SMEM(shape, dtype, transforms=transforms)]}
