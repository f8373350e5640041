# SPDX-License-Identifier: Apache-2.0
"""A product of 8-bit matrices with scales, for Hopper: persistent, warp-specialised.

The schedule is that of `hopper.py`: a producer fills a ring of SMEM buffers, two or
three consumers multiply their parts of a block's rows, clusters of two blocks share an
operand. The tensor core reads 8-bit operands with K in the minor dimension alone, so B
is stored as (N, K).

Sums stay in the tensor core's accumulator, or are promoted: see `promoted.py`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gpu.ops.gemm import hopper, promoted
from pallas_gpu.ops.gemm.epilogue import FACTORS, scaled
from pallas_gpu.ops.gemm.problem import Problem
from pallas_gpu.ops.rules import cached
from pallas_gpu.ops.tiles import starts_inside


@cached
def make_kernel(p: Problem) -> Any:
    """Returns the function of A (M, K), B (N, K) and `Problem.operands`.

    `a_blocks` is (K / 128, M), with M rounded up to a multiple of 4, and `b_blocks`
    (K / 128, N / 128), both rounded up; `a_scale` and `b_scale` are (1,), and the other
    operands have one element for each row or column of all tiles (`extent`).
    """
    out = jax.ShapeDtypeStruct((p.m, p.n), p.out_dtype)
    return hopper.launch(Schedule(p, p.config), "scaled_matmul", _Consumer.of, out)


class Schedule(hopper.Schedule):
    def k_block(self, first_step: Any, step: Any) -> Any:
        """The block of K of a tile's step, given the steps before the tile."""
        if not self.config.zigzag:
            return step
        steps = np.int32(self.steps)
        odd = lax.rem(lax.div(first_step, steps), np.int32(2))
        return lax.select(lax.eq(odd, np.int32(1)), steps - 1 - step, step)

    @property
    def part(self) -> tuple[int, int]:
        """Rows and columns of a consumer's tile that are stored at once."""
        # The bytes of a row of a swizzle; scales of blocks leave less SMEM.
        p = self.problem
        widest = (128 if p.group is None else 64) // p.out_dtype.itemsize
        return promoted.ROWS, math.gcd(self.config.tile_n, widest)

    def is_inside(self, row: Any, column: Any) -> Any:
        """Whether a part has elements of the result; None if all have."""
        return starts_inside(self.problem, self.tiles, self.part, row, column)


@dataclasses.dataclass(frozen=True)
class _Consumer(hopper.Consumer):
    """What one consumer warpgroup does.

    Attributes:
      factors: the scales of A and B. Their product may not be a float32.
    """

    factors: list[Any]
    counts_late = True

    @classmethod
    def of(cls, schedule: Schedule, mem: hopper.Memory, wg: Any) -> _Consumer:
        scales = (mem.get(name) for name in FACTORS)
        factors = [x[0] for x in scales if x is not None]
        return cls(schedule, mem, wg, factors)

    def finisher(self, row: Any, column: Any) -> Any:
        """Returns what multiplies a part by the scales, and adds the bias."""
        p, mem = self.schedule.problem, self.mem
        # Those of blocks are factors of the parts that are added.
        operands = {x: mem.get(x) for x in p.operands if not x.endswith("_blocks")}

        def finish(number, part):
            if p.out_dtype == jnp.int32:
                return part
            i, j = self.parts[number]
            part = part.astype(jnp.float32)
            return scaled(part, operands, row + i, column + j, self.factors)

        return finish
