# SPDX-License-Identifier: Apache-2.0
"""A warpgroup that copies, and one that computes, by two arrays of barriers."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

STEPS, SLOTS, TILE = 5, 2, (64, 64)


def body(x_gmem, o_gmem, x_smem, full, empty):
    thread = lax.axis_index("thread")

    @pl.when(thread == 0)
    def _():
        plgpu.set_max_registers(40, action="decrease")

        @pl.loop(0, STEPS)
        def _(step):
            slot = lax.rem(step, SLOTS)

            @pl.when(step >= SLOTS)
            def _():
                plgpu.barrier_wait(empty.at[slot])

            plgpu.copy_gmem_to_smem(x_gmem.at[step], x_smem.at[slot], full.at[slot])

    @pl.when(thread == 1)
    def _():
        plgpu.set_max_registers(232, action="increase")

        @pl.loop(0, STEPS, init_carry=jnp.zeros(TILE, jnp.float32))
        def total(step, carry):
            slot = lax.rem(step, SLOTS)
            plgpu.barrier_wait(full.at[slot])
            carry = carry + x_smem[slot]
            plgpu.barrier_arrive(empty.at[slot])
            return carry

        o_gmem[...] = total


kernel = plgpu.kernel(
    body,
    out_type=jax.ShapeDtypeStruct(TILE, jnp.float32),
    scratch_types=[
        plgpu.SMEM((SLOTS, *TILE), jnp.float32),
        plgpu.Barrier(num_barriers=SLOTS),
        plgpu.Barrier(num_barriers=SLOTS),
    ],
    num_threads=2,
    thread_name="thread",
)


def arguments(random):
    return [random.integers(-9, 10, (STEPS, *TILE)).astype(np.float32)]


def expected(x):
    return x.sum(axis=0)
