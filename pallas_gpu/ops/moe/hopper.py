# SPDX-License-Identifier: Apache-2.0
"""Rows of groups times the group's matrix, for Hopper: persistent, warp-specialised.

A block has three warpgroups, or four. The last one copies tiles of both operands into a
ring of SMEM buffers; the others multiply, each its part of the block's rows. Each
computes the table of groups and tiles for itself, and finds the group of a tile in it.
Blocks, or clusters of two, claim tiles one by one, as some are less work. Loads may
reach into the rows of the next tile; stores do not: of a tile's last rows TMA stores
eight at a time, and up to seven are stored under a mask. A warpgroup whose part of a
tile has no rows does not multiply, so that the tensor core works for the others.

Tiles of one group and the same columns come one after the other, so that blocks read
the matrix at the same time, and memory only once: with many groups that is the bound.
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
from pallas_gpu.ops.gemm import hopper, promoted
from pallas_gpu.ops.memory import Memory, launch
from pallas_gpu.ops.moe.groups import GroupedProblem, Groups, Rows, table
from pallas_gpu.ops.rules import cached

# Rows and columns of zeros that a warpgroup stores at once.
_CLEARED = 8, 512
# Rows of a tile in SMEM: the fewest that a copy from there begins with.
_EIGHT = 8
# Scales of rows: the fewest that a copy by TMA begins with.
_FOUR = 4


@dataclasses.dataclass(frozen=True)
class Schedule(hopper.Schedule):
    """The order of the tiles: rows of each group times its matrix.

    Attributes:
      end: that of the rows of a tile.
    """

    end: Any = None

    @property
    def columns(self) -> int:
        return self.tiles.plane[1]

    @property
    def positions(self) -> int:
        """The largest number of tiles that there can be."""
        p = self.problem
        groups = min(p.matrices, p.m)
        rows = groups + (p.m - groups) // self.config.block_m
        return rows * self.columns

    def place(self, groups: Groups, position: Any) -> tuple[Any, Any, Any]:
        """Returns the group of a position, and its tile of rows and of columns.

        The rows of a group are cut into strips; a strip is visited column by column.
        """
        most = plgpu.cdiv(self.problem.m, self.config.block_m)
        strip, columns = np.int32(min(self.config.strip, most)), np.int32(self.columns)
        group = groups.group_of(lax.div(position, columns))
        before, end = groups.tiles_of(group)
        within = lax.sub(position, lax.mul(before, columns))
        first = lax.mul(lax.div(within, lax.mul(strip, columns)), strip)
        within = lax.sub(within, lax.mul(first, columns))
        height = lax.min(strip, lax.sub(lax.sub(end, before), first))
        row = lax.add(first, lax.rem(within, height))
        return group, row, lax.div(within, height)

    def of_cta(self, position: Any) -> Any:
        """Returns the position of a CTA, given that of its cluster."""
        if self.config.cluster is None:
            return position
        both = lax.mul(position, np.int32(self.config.cluster_size))
        return lax.add(both, lax.axis_index(self.tiles.cluster_axis))

    def rows_of(self, groups: Groups, group: Any, row: Any) -> tuple[Any, Any]:
        """Returns the first row of a tile, and the end of its rows.

        The tiles of a group have equally many rows but for those of a consumer: a tile
        whose rows are of one consumer takes half as long as one of three, or more.
        """
        (start, end), (before, last) = groups.rows_of(group), groups.tiles_of(group)
        unit, tiles = np.int32(self.config.tile_m), lax.sub(last, before)
        rounded = lax.add(lax.sub(end, start), np.int32(self.config.tile_m - 1))
        units = lax.div(rounded, unit)
        fewest, more = lax.div(units, tiles), lax.rem(units, tiles)

        def first(row: Any) -> Any:
            number = lax.add(lax.mul(fewest, row), lax.min(row, more))
            return lax.add(start, lax.mul(number, unit))

        return first(row), lax.min(first(lax.add(row, np.int32(1))), end)

    def scaled_rows(self, row: Any) -> Any:
        """TMA copies from multiples of 16 bytes, and to those of 128."""
        first = lax.mul(lax.div(row, np.int32(_FOUR)), np.int32(_FOUR))
        return plgpu.ds(first, self.config.block_m + 128 // 4)

    def rows(self, mem: Memory, row: Any) -> Any:
        return mem.rows.part(row, self.config.block_m)

    def copy_rows(self, row: Any, source: Any, buffer: Any, copy: Any, axes) -> None:
        """Copies rows of A; consumers but the first may have none."""
        if self.problem.gathered:
            copy(source, buffer, oob_mode=None)
            return
        first = plgpu.ds(0, self.config.tile_m)
        is_first = row + self.config.tile_m >= self.end
        plgpu.when(is_first)(lambda: copy(source.at[first], buffer.at[first], axes))
        plgpu.when(jnp.logical_not(is_first))(lambda: copy(source, buffer, axes))


@cached
def make_kernel(p: GroupedProblem) -> Any:
    """Returns the function of sizes, offset, any indices, A, B and `p.operands`."""
    c = p.config
    schedule = Schedule(p, c)
    scratch = hopper.scratch_of(schedule)
    scratch["tables"] = table(p.groups, c.consumers + 1)
    if c.cluster is not None:
        # Parts of 128 bytes or more: TMA copies from multiples of them.
        width = max(c.epilogue_n, 128 // p.out_dtype.itemsize)
        scratch["rest"] = plgpu.SMEM((c.consumers, 2, _EIGHT, width), p.out_dtype)
        scratch["zeros"] = plgpu.SMEM((c.consumers, _CLEARED[1] // 2), p.out_dtype)
    name, inputs = "ragged_dot", (*p.of_groups, "a", "b", *p.operands)
    out = jax.ShapeDtypeStruct((p.m, p.n), p.out_dtype)
    return launch(
        *(p, name, functools.partial(_visit_all, schedule), inputs, out, scratch),
        grid={"position": schedule.positions},
        cluster={schedule.tiles.cluster_axis: 2} if c.cluster else None,
        warpgroups=c.consumers + 1,
    )


def _visit_all(schedule, mem) -> None:
    """Visits tiles as clusters claim them."""
    consumers = schedule.config.consumers
    tiles = _Tiles.of(schedule, lax.axis_index("wg"), mem)
    registers = hopper.REGISTERS[consumers]
    roles = plgpu.Roles(consumers, registers, two_branches=True)

    @plgpu.dynamic_scheduling_loop("position", thread_axis="wg", roles=roles)
    def _(info, is_producer):
        def produce(own, *tile):
            own.produce(tiles.mem, *tile)

        visit = produce if is_producer else tiles.consume
        tiles.at(visit, info.index[0], info.local_index)
        if not is_producer:
            tiles.clear(info.index[0])

    plgpu.wait_smem_to_gmem(0)


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """The tiles of a kernel, as one warpgroup visits them."""

    schedule: Schedule
    mem: Memory
    wg: Any
    groups: Groups
    number: Any

    @classmethod
    def of(cls, schedule, wg, mem) -> _Tiles:
        p, block_m = schedule.problem, schedule.config.block_m
        mem = mem.but(rows=Rows(mem.get("indices")))
        groups = Groups.of(mem, p.matrices, p.m, block_m, wg)
        number = lax.mul(groups.tiles, np.int32(schedule.columns))
        if mem.get("zeros") is not None:

            @plgpu.when(wg < schedule.config.consumers)
            def _():
                mem.zeros[wg] = jnp.zeros(mem.zeros.shape[1:], mem.zeros.dtype)
                plgpu.commit_smem()

        return cls(schedule, mem, wg, groups, number)

    def at(self, visit, position, number) -> None:
        """Calls `visit(schedule, matrix, row, column, first step)` of a position."""
        schedule, c, groups = self.schedule, self.schedule.config, self.groups

        @plgpu.when(position < self.number)
        def _():
            group, row, column = schedule.place(groups, position)
            column = schedule.of_cta(column)
            first, end = schedule.rows_of(groups, group, row)
            visit(
                dataclasses.replace(schedule, end=end),
                lax.sub(group, groups.first),
                first,
                lax.mul(column, np.int32(c.tile_n)),
                lax.mul(number, np.int32(schedule.steps)),
            )

    def consume(self, own, *tile) -> None:
        _Consumer(own, self.mem, self.wg, tile[1]).visit(*tile)

    def clear(self, position) -> None:
        _clear(self.schedule, self.groups, position, self.wg, self.mem)


@dataclasses.dataclass(frozen=True)
class _Consumer(hopper.Consumer):
    """Computes and stores its rows of a tile.

    Attributes:
      first_row: that of the tile.
    """

    schedule: Schedule
    first_row: Any

    def visit(self, matrix, row, column, first_step) -> None:
        """Computes and stores its rows of a tile, if the tile has some."""
        row = lax.add(row, lax.mul(self.wg, np.int32(self.schedule.config.tile_m)))

        @plgpu.when(row < self.schedule.end)
        def _():
            finish = functools.partial(self._parts, matrix, row, column)
            parts = self.products(matrix, column, first_step, finish)
            self.store(parts, matrix, row, column)

        @plgpu.when(row >= self.schedule.end)
        def _():
            @plgpu.loop(0, self.schedule.steps)
            def _(ki):
                self.mem.operands.take(first_step + ki)
                self.mem.operands.release(first_step + ki)

    def _parts(self, matrix, row, column, products) -> list[Any]:
        """Returns the tile as it is stored, by parts: so it needs fewer registers."""
        p = self.schedule.problem
        if "row_scale" in p.scales:
            products[0] = products[0] * self._factors(matrix, row, column)
        parts = []
        for (_, start), width in ((at, self.schedule.part[1]) for at in self.parts):
            product, *gate = (x[:, start : start + width] for x in products)
            part = p.epilogue.apply(product, gate=gate[0] if gate else None)
            part = part.astype(p.out_dtype)
            if not gate:
                # Not later, where the rows of a group's end are stored in a loop; with
                # the accumulators of a gate it spills 12 bytes, and without it none.
                part = lax.optimization_barrier(part)
            parts.append(part)
        return parts

    def scale_of_a(self, slot, rows) -> Any:
        before = lax.rem(self.first_row, np.int32(_FOUR))
        return super().scale_of_a(slot, plgpu.ds(rows.start + before, rows.size))

    def scale_of_b(self, matrix, column, first_step, step) -> Any:
        del first_step
        scales = self.mem.b_blocks
        last = scales.shape[1] - 1
        return scales[matrix, jnp.minimum(promoted.block_of(column), last), step]

    def _factors(self, matrix, row, column) -> Any:
        p, c, mem = self.schedule.problem, self.schedule.config, self.mem
        rows = row + jnp.arange(c.tile_m, dtype=jnp.int32)
        columns = column + jnp.arange(c.tile_n, dtype=jnp.int32)
        left = plgpu.load(mem.row_scale, (rows,), mask=rows < p.m, other=0)
        right = mem.column_scale.at[matrix]
        if p.n % c.tile_n:
            # Nothing beyond the last column is stored. A mask takes more registers:
            # spills.
            right = right[jnp.minimum(columns, p.n - 1)]
        else:
            right = right[plgpu.ds(column, c.tile_n)]
        return left[:, None] * right[None, :]

    def store(self, parts, matrix, row, column) -> None:
        """Stores the rows that are the tile's: by TMA, as many as it can."""
        del matrix
        p, c, out = self.schedule.problem, self.schedule.config, self.mem.out
        number_of_rows = lax.min(lax.sub(self.schedule.end, row), np.int32(c.tile_m))
        is_whole = number_of_rows == c.tile_m
        store = plgpu.TileStore(self.mem.out_smem.at[self.wg], len(parts))
        for number, part in enumerate(parts):
            buffer = store.fill(number)
            buffer[...] = part
            plgpu.commit_smem()
            start = column + number * c.epilogue_n
            columns = plgpu.ds(start, c.epilogue_n)
            # The last tile of a row may have parts outside.
            inside = start < p.n
            whole = out.at[plgpu.ds(row, c.tile_m), columns]
            plgpu.copy_smem_to_gmem(
                buffer, whole, predicate=is_whole & inside, commit_group=False
            )

            @plgpu.when(jnp.logical_not(is_whole) & inside)
            def _(buffer=buffer, part=number % 2, start=start, columns=columns):
                rest = None if c.cluster is None else self.mem.rest.at[self.wg, part]
                _store_some(
                    *(p, c, buffer, rest, out, row, number_of_rows, start, columns)
                )

            plgpu.commit_smem_to_gmem_group()


def _store_some(problem, c, buffer, rest, out, row, number, start, columns) -> None:
    """Stores the first rows of a buffer: eights by TMA, the rest under a mask.

    In a cluster the rest row by row, through `rest`: if threads wrote to GMEM, each
    arrival on the barrier of another CTA would be a fence.
    """
    eights = lax.div(number, np.int32(_EIGHT))

    @plgpu.loop(0, eights)
    def _(i):
        source = buffer.at[plgpu.ds(i * _EIGHT, _EIGHT)]
        target = out.at[plgpu.ds(row + i * _EIGHT, _EIGHT), columns]
        plgpu.copy_smem_to_gmem(source, target, commit_group=False)

    @plgpu.when(eights * _EIGHT < number)
    def _():
        first, own = eights * _EIGHT, plgpu.ds(0, c.epilogue_n)
        last = buffer.at[plgpu.ds(first, _EIGHT)]
        if rest is not None:
            rest[:, own] = last[...]
            plgpu.commit_smem()

            @plgpu.loop(first, number)
            def _(i):
                source, target = rest.at[i - first, own], out.at[row + i, columns]
                plgpu.copy_smem_to_gmem(source, target, commit_group=False)

            return
        rows = first + jnp.arange(_EIGHT, dtype=jnp.int32)
        column = start + jnp.arange(c.epilogue_n, dtype=jnp.int32)
        mask = (rows < number)[:, None]
        if problem.n % c.tile_n:
            mask = mask & (column < problem.n)[None, :]
        last = last[...]
        at = (row + rows)[:, None], column[None, :]
        plgpu.store(out, at, last, mask=mask)


def _clear(schedule, groups, position, wg, mem) -> None:
    """Stores zeros to the rows of no group, and to those of groups without a matrix."""
    problem, (begin, end) = schedule.problem, groups.span
    c, out, source = schedule.config, mem.out, mem.get("zeros")
    height, width = _CLEARED if source is None else (1, source.shape[-1])
    before = plgpu.cdiv(begin, height)
    after = plgpu.cdiv(np.int32(problem.m) - end, height)
    columns = plgpu.cdiv(problem.n, width)
    first = schedule.of_cta(position) * c.consumers + wg
    step = c.consumers * c.cluster_size * schedule.positions

    @plgpu.loop(first, (before + after) * columns, step=step)
    def _(part):
        number, column = (
            lax.div(part, np.int32(columns)),
            lax.rem(part, np.int32(columns)),
        )
        is_before = number < before
        start = jnp.where(is_before, 0, end - before * height) + number * height
        if source is not None:
            target = out.at[start, plgpu.ds(column * width, width)]
            plgpu.copy_smem_to_gmem(source.at[wg], target)
            return
        row = start + jnp.arange(height, dtype=jnp.int32)
        column = column * width + jnp.arange(width, dtype=jnp.int32)
        mask = (row < jnp.where(is_before, begin, problem.m))[:, None]
        if problem.n % width:
            mask = mask & (column < problem.n)[None, :]
        zeros = jnp.zeros((height, width), out.dtype)
        plgpu.store(out, (row[:, None], column[None, :]), zeros, mask=mask)
