# SPDX-License-Identifier: Apache-2.0
"""Copies through SMEM by TMA, two stages ahead, with an array of barriers."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

STEPS, STAGES, TILE = 6, 2, (32, 64)
SHAPE = (STEPS * TILE[0], TILE[1])


def body(x_gmem, o_gmem, x_smem, o_smem, loaded):
    def load(step, slot):
        plgpu.copy_gmem_to_smem(
            x_gmem.at[pl.ds(step * TILE[0], TILE[0])],
            x_smem.at[slot],
            loaded.at[slot],
        )

    for slot in range(STAGES):
        load(slot, slot)

    @pl.loop(0, STEPS)
    def _(step):
        slot = lax.rem(step, STAGES)
        plgpu.barrier_wait(loaded.at[slot])
        value = x_smem[slot]

        @pl.when(step + STAGES < STEPS)
        def _():
            plgpu.commit_smem()
            load(step + STAGES, slot)

        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        o_smem[slot] = 2 * value
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(
            o_smem.at[slot], o_gmem.at[pl.ds(step * TILE[0], TILE[0])]
        )

    plgpu.wait_smem_to_gmem(0)


kernel = plgpu.kernel(
    body,
    out_type=jax.ShapeDtypeStruct(SHAPE, jnp.float32),
    scratch_types=[
        plgpu.SMEM((STAGES, *TILE), jnp.float32),
        plgpu.SMEM((STAGES, *TILE), jnp.float32),
        plgpu.Barrier(num_barriers=STAGES),
    ],
)


def arguments(random):
    return [random.standard_normal(SHAPE).astype(np.float32)]


def expected(x):
    return 2 * x
