# SPDX-License-Identifier: Apache-2.0
"""Operations that do what upstream's do where another choice was possible."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from tests.support import everywhere

F32 = jnp.float32
X = np.arange(32 * 128, dtype=np.float32).reshape(32, 128)


def test_a_copy_that_a_predicate_skips_still_arrives():
    def make(interpret):
        def body(x, o, tile, barrier):
            i = lax.axis_index("i")
            tile[...] = jnp.full((32, 128), -1.0)
            plgpu.commit_smem()
            plgpu.copy_gmem_to_smem(x, tile, barrier, predicate=i > 0)
            plgpu.barrier_wait(barrier)
            o[i] = tile[...]

        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((2, 32, 128), F32),
            scratch_types=[plgpu.SMEM((32, 128), F32), plgpu.Barrier()],
            grid=(2,),
            grid_names=("i",),
            interpret=interpret,
        )

    everywhere.check(make, [X], np.stack([np.full_like(X, -1), X]))
