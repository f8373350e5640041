# SPDX-License-Identifier: Apache-2.0
"""For each group the product of two arrays over its rows, for Hopper: `x.T @ y`.

The derivative of a ragged dot with respect to its matrices. The warpgroups are those of
`hopper`, but the depth of a product is the number of rows of its group. Both operands
are stored transposed, or not, as the tensor core reads them. Where the last step of a
group reaches into the rows of the next one, the consumers overwrite these rows in SMEM
with zeros, those of both operands, as there may be infinities among them.

With many groups a product has few steps, and loads from the L2 cache compete with the
stores of the results. So a block computes several tiles with the same columns one after
the other, and keeps their part of the right operand in SMEM where it fits there; and of
the last step of a group it loads no more rows than it has, rounded up.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import arch
from pallas_gpu.ops.gemm import hopper
from pallas_gpu.ops.gemm.config import CONSUMERS
from pallas_gpu.ops.memory import Memory, launch
from pallas_gpu.ops.moe.groups import GroupedProblem, Groups, Rows, table
from pallas_gpu.ops.rules import cached
from pallas_gpu.ops.tiles import tiles

# Registers per thread of the producer and of a consumer, by whether all threads of the
# producer gather rows: (40 + 2 * 232) * 128 threads use 64512 of an SM's 65536.
_REGISTERS = {False: (40, 232), True: (72, 216)}
# Rows of a tile in SMEM: the fewest that a copy to there has.
_EIGHT = 8
# Columns of tiles that are visited together.
_WIDTH = 8


@dataclasses.dataclass(frozen=True)
class Schedule(hopper.Schedule):
    """The order of the tiles: products over the rows of each group, K of all."""

    @property
    def plane(self) -> tuple[int, int]:
        """Strips of one group along M, and tiles along N."""
        columns = plgpu.cdiv(self.problem.n, self.config.tile_n)
        return plgpu.cdiv(self.heights, self.strip), columns

    @property
    def strip(self) -> int:
        """Tiles of a strip; fewer where there would be a strip for some blocks only."""
        p, c = self.problem, self.config
        tiles = p.matrices * self.heights * plgpu.cdiv(p.n, c.tile_n)
        return min(c.strip, self.heights, max(tiles // c.blocks, 1))

    @property
    def heights(self) -> int:
        return plgpu.cdiv(self.problem.m, self.config.block_m)

    @property
    def rings(self) -> int:
        """Rings of buffers: one for both operands if neither stays."""
        return 1 if self.strip == 1 else 2

    @property
    def store_hint(self) -> str | None:
        """Results that do not fit in the L2 cache leave it to the operands."""
        p = self.problem
        size = p.matrices * p.m * p.n * jnp.dtype(p.out_dtype).itemsize
        return "evict_first" if size > arch.SM_90A.l2_bytes else None

    @property
    def blocks(self) -> int:
        return min(self.config.blocks, self.problem.matrices * math.prod(self.plane))

    def is_inside(self, row: Any, column: Any) -> Any:
        return (row < self.problem.m) & (column < self.problem.n)


@cached
def make_kernel(p: GroupedProblem) -> Any:
    c = p.config
    schedule = Schedule(p, c)
    rings = range(schedule.rings)
    full = plgpu.Barrier(num_arrivals=2 // len(rings), num_barriers=c.stages)
    empty = plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=c.stages)
    scratch = {
        "a_smem": tiles((c.stages, c.tile_k, c.block_m), p.dtype),
        "b_smem": tiles((c.stages, c.tile_k, c.tile_n), p.dtype),
        "out_smem": tiles((CONSUMERS, 2, c.tile_m, c.epilogue_n), p.out_dtype),
        "tables": table(p.groups, CONSUMERS + 1),
        "full": [full for _ in rings],
        "empty": [empty for _ in rings],
        "cleared": plgpu.Barrier(num_arrivals=CONSUMERS),
    }
    return launch(
        *(p, "ragged_dot_contracted", functools.partial(_body, schedule)),
        (*p.of_groups, "a", "b"),
        jax.ShapeDtypeStruct((p.matrices, p.m, p.n), p.out_dtype),
        scratch,
        grid={"worker": schedule.blocks},
        warpgroups=CONSUMERS + 1,
    )


def _body(schedule: Schedule, mem: Memory) -> None:
    p, c = schedule.problem, schedule.config
    wg = lax.axis_index("wg")
    mem.operands = (
        plgpu.Ring(mem.a_smem, mem.empty[0], mem.full[0]),
        plgpu.Ring(mem.b_smem, mem.empty[-1], mem.full[-1]),
    )
    mem.rows = Rows(mem.get("indices"))

    def for_each_strip(visit: Any) -> None:
        groups = Groups.of(mem, p.matrices, p.k, c.tile_k, wg)
        _for_each_strip(schedule, groups, visit)

    def consume() -> None:
        for_each_strip(_Consumer(schedule, mem, wg).visit_strip)
        plgpu.wait_smem_to_gmem(0)

    roles = plgpu.Roles(CONSUMERS, _REGISTERS[p.gathered])
    produce = functools.partial(_produce, schedule, mem)
    roles.run(wg, lambda: for_each_strip(produce), consume)


@dataclasses.dataclass(frozen=True)
class _Strip:
    """Tiles of one group with the same columns, that a block computes one by one.

    Their part of the right operand is loaded for the first of them, and stays in SMEM
    where it fits there.

    Attributes:
      rows: the group's first row, and the end of its rows.
      first, number: the first tile along M, and how many there are.
      stays: whether the right operand does.
      loaded: steps of both operands that the strips before have loaded.
    """

    group: Any
    rows: tuple[Any, Any]
    first: Any
    number: Any
    column: Any
    steps: Any
    stays: Any
    loaded: tuple[Any, Any]

    def step(self, tile: Any, ki: Any) -> tuple[Any, Any]:
        """Returns the step of each operand in the order of loads."""
        left = lax.add(lax.mul(tile, self.steps), ki)
        right = lax.select(self.stays, ki, left)
        return lax.add(self.loaded[0], left), lax.add(self.loaded[1], right)

    def is_loaded(self, tile: Any) -> Any:
        """Whether the right operand is loaded for a tile."""
        return jnp.logical_not(self.stays) | (tile == 0)

    def is_released(self, tile: Any) -> Any:
        """Whether the right operand is not needed after a tile."""
        return jnp.logical_not(self.stays) | (tile == self.number - 1)


def _for_each_strip(schedule: Schedule, groups: Groups, visit: Any) -> None:
    c = schedule.config

    @plgpu.nd_loop(
        (schedule.problem.matrices, math.prod(schedule.plane)),
        collective_axes="worker",
        init_carry=(jnp.int32(0), jnp.int32(0)),
    )
    def _(info, carry):
        group, linear = info.index
        mi, ni = plgpu.planar_snake(linear, schedule.plane, 1, _WIDTH)
        rows = groups.rows_of(lax.add(groups.first, group))
        most = np.int32(schedule.strip)
        first = lax.mul(mi, most)
        steps = plgpu.cdiv(lax.sub(rows[1], rows[0]), np.int32(c.tile_k))
        strip = _Strip(
            group,
            rows,
            first=first,
            number=lax.min(np.int32(schedule.heights) - first, most),
            column=lax.mul(ni, np.int32(c.tile_n)),
            steps=steps,
            stays=steps <= c.stages,
            loaded=carry,
        )
        visit(strip)
        left = lax.mul(strip.number, steps)
        return tuple(
            lax.add(before, number)
            for before, number in zip(
                carry, (left, lax.select(strip.stays, steps, left)), strict=True
            )
        )


def _slots(rings, steps) -> list[Any]:
    return [ring.slot(step) for ring, step in zip(rings, steps, strict=True)]


def _produce(schedule, mem, strip) -> None:
    c, rings = schedule.config, mem.operands
    columns = plgpu.ds(strip.column, c.tile_n)

    def load(array, part, row, depth, columns, step, operand):
        ring = rings[operand]
        # Of one ring, a slot has been waited for with the first operand.
        waited = operand == schedule.rings
        slot = ring.slot(step) if waited else ring.fill(step)

        def copy(depth):
            source = array.at[part(row, depth), columns]
            buffer = slot.buffers.at[plgpu.ds(0, depth)]
            plgpu.copy_gmem_to_smem(source, buffer, slot.full)

        _by_depth(c.tile_k, depth, copy, schedule.problem.gathered and operand == 0)

    @plgpu.loop(0, strip.number)
    def _(tile):
        own = plgpu.ds((strip.first + tile) * c.block_m, c.block_m)

        @plgpu.loop(0, strip.steps)
        def _(ki):
            left, right = strip.step(tile, ki)
            row = strip.rows[0] + ki * c.tile_k
            depth = strip.rows[1] - row
            load(mem.a, mem.rows.part, row, depth, own, left, 0)

            def load_right(row=row, depth=depth, right=right):
                load(mem.b, plgpu.ds, row, depth, columns, right, 1)

            if schedule.rings == 1:
                load_right()
            else:
                plgpu.when(strip.is_loaded(tile))(load_right)


def _by_depth(most: int, depth: Any, copy: Any, is_whole: bool) -> None:
    """Copies the rows of a step: a quarter of them, half or all, as many as it has."""
    half, quarter = most // 2, most // 4
    if is_whole or quarter % _EIGHT:
        copy(most)
        return
    plgpu.when(depth > half)(lambda: copy(most))
    plgpu.when((depth <= half) & (depth > quarter))(lambda: copy(half))
    plgpu.when(depth <= quarter)(lambda: copy(quarter))


@dataclasses.dataclass(frozen=True)
class _Consumer(hopper.Consumer):
    schedule: Schedule

    def visit_strip(self, strip: _Strip) -> None:
        c = self.schedule.config

        @plgpu.loop(0, strip.number)
        def _(tile):
            product = plgpu.run_scoped(
                functools.partial(self.multiply, strip, tile),
                plgpu.ACC((c.tile_m, c.tile_n)),
            )
            row = (strip.first + tile) * c.block_m + self.wg * c.tile_m
            product = product.astype(self.mem.out.dtype)
            self.store([product], strip.group, row, strip.column)

    def multiply(self, strip, tile, acc) -> Any:
        c, rings = self.schedule.config, self.mem.operands
        own = plgpu.ds(self.wg * c.tile_m, c.tile_m)

        @plgpu.loop(0, strip.steps)
        def _(ki):
            left, right = _slots(rings, strip.step(tile, ki))
            a, b = left.buffers.at[:, own], right.buffers
            is_loaded = strip.is_loaded(tile)
            plgpu.barrier_wait(left.full)
            if self.schedule.rings == 2:
                plgpu.when(is_loaded)(lambda: plgpu.barrier_wait(right.full))

            valid = strip.rows[1] - strip.rows[0] - ki * c.tile_k
            plgpu.when(valid < c.tile_k)(lambda: self.clear(a, b, valid, is_loaded))
            plgpu.wgmma(acc, plgpu.transpose_ref(a, (1, 0)), b)
            # One product stays under way; the buffers of the one before are free.
            plgpu.wgmma_wait(1)

            plgpu.when(ki > 0)(lambda: self.release(strip, tile, ki - 1))

        product = acc[...]
        last = strip.steps - 1
        plgpu.when(strip.steps > 0)(lambda: self.release(strip, tile, last))
        return product

    def clear(self, a, b, valid, both) -> None:
        """Overwrites the rows from `valid` on; each consumer takes a part of B."""
        c = self.schedule.config
        half = plgpu.ds(self.wg * (c.tile_n // CONSUMERS), c.tile_n // CONSUMERS)
        beyond = (jnp.arange(c.tile_k, dtype=jnp.int32) >= valid)[:, None]

        def overwrite(ref):
            plgpu.store(ref, (), jnp.zeros(ref.shape, ref.dtype), mask=beyond)

        overwrite(a)
        plgpu.when(both)(lambda: overwrite(b.at[:, half]))
        plgpu.commit_smem()
        plgpu.when(both)(lambda: plgpu.barrier_arrive_and_wait(self.mem.cleared))

    def release(self, strip, tile, ki) -> None:
        left, right = _slots(self.mem.operands, strip.step(tile, ki))
        plgpu.barrier_arrive(left.empty)
        if self.schedule.rings == 2:
            is_released = strip.is_released(tile)
            plgpu.when(is_released)(lambda: plgpu.barrier_arrive(right.empty))
