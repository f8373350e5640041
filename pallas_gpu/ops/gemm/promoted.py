# SPDX-License-Identifier: Apache-2.0
"""Sums of the tensor core that are added in float32 after each step along K.

Each step has an accumulator of its own, whose contents are multiplied by the scales of
the step's blocks and added in registers. A consumer has registers for the sums and for
64 of its rows at a time in the accumulator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.ops.gemm.config import BLOCK

ROWS = 64


def products(
    consumer: Any, first_step: Any, of_b: Callable[[Any], Any] | None = None
) -> jax.Array:
    """Returns a consumer's rows of a product, summed in registers.

    Args:
      consumer: a `Consumer`.
      first_step: steps before those of the tile.
      of_b: `of_b(step)` returns the scale of a step's block of B; None: no scales.
    """
    p, c, mem = consumer.schedule.problem, consumer.schedule.config, consumer.mem
    shape = ROWS, c.tile_n
    starts = range(0, c.tile_m, ROWS)

    def step(ki, sums):
        slot = mem.operands.slot(first_step + ki)
        a, b = slot.buffers
        b_scale = None if of_b is None else of_b(ki)
        mem.operands.take(first_step + ki)
        result = []
        for start, total in zip(starts, sums, strict=True):
            rows = plgpu.ds(consumer.wg * c.tile_m + start, ROWS)

            def multiply(acc, rows=rows):
                plgpu.wgmma(acc, a.at[rows], b.T)
                return acc[...]

            part = plgpu.run_scoped(multiply, plgpu.ACC(shape, p.accumulator))
            part = part.astype(jnp.float32)
            if b_scale is not None:
                scale = consumer.scale_of_a(slot, rows) * b_scale
                part = part * lax.broadcast_in_dim(scale, shape, (0,))
            # The sums need the registers that the next product accumulates in.
            result.append(lax.optimization_barrier(total + part))
        mem.operands.release(first_step + ki)
        return tuple(result)

    zeros = tuple(jnp.zeros(shape, jnp.float32) for _ in starts)
    sums = plgpu.loop(0, consumer.schedule.steps, init_carry=zeros)(step)
    return jnp.concatenate(sums)


def block_of(column: Any) -> Any:
    # A shift: a division would allow for negative columns.
    return lax.shift_right_logical(column, np.int32(BLOCK.bit_length() - 1))
