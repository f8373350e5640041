# SPDX-License-Identifier: Apache-2.0
"""Many tokens times weights of 8 or 4 bits: persistent, warp-specialised, clustered.

The product is `gemm/hopper.py`'s, computed transposed, as in `mixed_few.py`: weights
become the tensor core's left operand in registers, tokens are its right one in SMEM.
Each of two consumers loads its rows of the next step's weights while the tensor core
multiplies those of the step before, and converts them then or after. The blocks of a
cluster need the same tokens: each loads one half and multicasts it to both.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.ops.gemm import hopper
from pallas_gpu.ops.gemm.config import LinearManyConfig
from pallas_gpu.ops.gemm.problem import Problem
from pallas_gpu.ops.memory import Memory
from pallas_gpu.ops.narrow import widen
from pallas_gpu.ops.rules import bits, cached
from pallas_gpu.ops.tiles import tiles


def columns(p: Problem, config: LinearManyConfig) -> int:
    """Columns of all tiles: those of the result, and more."""
    return Schedule(p.transposed, config).tiles.extent[0]


class Schedule(hopper.Schedule):
    def prepared(self, mem: Memory) -> Memory:
        """Returns the memory, with units in which consumers load weights."""
        *scale, weights, tokens = mem.ring.buffers
        is_same = widen.unit_type(self.problem.dtype) == self.problem.dtype
        packed, units = (weights, weights) if is_same else weights
        buffers = [packed, tokens, *scale, units]
        return mem.but(operands=dataclasses.replace(mem.ring, buffers=buffers))

    def copy_scales(self, mem: Any, slot: Any, block: Any, row: Any, copy: Any) -> Any:
        p, depth = self.problem, self.config.depth
        if p.group is not None:
            group = lax.div(block * depth, np.int32(p.group))
            groups = plgpu.ds(group, widen.groups(p, depth))
            rows = plgpu.ds(row, self.config.block_m)
            copy(mem.group_scale.at[groups, rows], slot.buffers[2])


@cached
def make_kernel(p: Problem) -> Any:
    """Returns the function of x (tokens, K), w (N, K) and `Problem.operands`.

    `group_scale` is (K / group, N); scale and bias are (N,), with `columns` elements.
    """
    c, (x_type, w_type) = p.config, p.types
    packed = tiles((c.stages, c.block_m, c.depth), w_type)
    unit = widen.unit_type(w_type)
    units = tiles((c.stages, c.block_m, widen.units(w_type, c.depth)), unit)
    buffers = [
        packed if unit == w_type else plgpu.RefUnion(packed, units),
        tiles((c.stages, c.tokens, c.depth), x_type),
    ]
    if p.group is not None:
        shape = (c.stages, widen.groups(p, c.depth), c.block_m)
        buffers = [plgpu.SMEM(shape, jnp.float32), *buffers]
    schedule = Schedule(p.transposed, c)
    scratch = hopper.scratch_of(schedule, buffers=buffers)
    # Memory is in the order of names: the ring is behind the buffers of stores.
    scratch["ring"] = scratch.pop("operands")
    out = jax.ShapeDtypeStruct((p.m, p.n), p.out_dtype)
    return hopper.launch(schedule, "linear_many", _Consumer, out, scratch=scratch)


@dataclasses.dataclass(frozen=True)
class _Consumer(hopper.Consumer):
    converter: Any = None

    @property
    def ahead(self) -> bool:
        """Whether weights are converted beside the product before.

        Those of 8 bits with scales of groups are; for those of 4 an H200 takes 4 to 13%
        more time so.
        """
        p = self.schedule.problem
        return p.group is not None and bits(p.dtype) == 8

    def scales_at(self, step: Any) -> Any:
        rows = plgpu.ds(self.wg * self.schedule.config.tile_m, 64)
        return self.mem.operands.slot(step).buffers[2].at[:, rows]

    def accumulate(self, first_step, *accumulators) -> list[Any]:
        w, x = self.schedule.problem.types
        converter = widen.converter(w, x, self.mem.get("masks"))
        own = dataclasses.replace(self, converter=converter)
        return own.accumulate_converted(first_step, *accumulators)

    def load(self, step: Any) -> Any:
        rows = plgpu.ds(self.wg * self.schedule.config.tile_m, 64)
        *_, units = self.mem.operands.take(step).buffers
        loaded = self.converter.load(units.at[rows])
        if not self.ahead:
            return loaded
        # Only the product with the scales writes the tensor core's operand.
        exact = self.converter.finish(loaded)
        return exact, widen.factors(self.scales_at(step), exact.dtype)

    def convert(self, step: Any, loaded: Any) -> Any:
        if self.ahead:
            return widen.multiplied(*loaded)
        wide = self.converter.finish(loaded)
        if self.schedule.problem.group is None:
            return wide
        return widen.scaled(wide, self.scales_at(step))

    def finisher(self, row: Any, column: Any) -> Any:
        """Returns what scales the sums of a part when its buffer is free."""
        columns = plgpu.ds(row, self.schedule.config.tile_m)
        finish = widen.finisher(self.schedule.problem, self.mem, columns)
        return lambda _, sums: functools.partial(finish, sums)
