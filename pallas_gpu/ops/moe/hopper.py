# SPDX-License-Identifier: Apache-2.0
"""Rows of groups times the group's matrix, for Hopper: persistent, warp-specialised.

A block has three warpgroups. The last one copies tiles of both operands into a ring of
SMEM buffers; the other two multiply, each its half of the block's rows. Each computes
the table of groups and tiles for itself, and finds the group of a tile in it. Blocks
claim tiles one by one, as the last tile of a group may be less work. Loads may
reach into the rows of the next group; stores do not: of the last tile of a group TMA
stores eight rows at a time, and up to seven are stored under a mask. A warpgroup whose
half of a tile has no rows does not multiply, so that the tensor core works for the
other.

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
from pallas_gpu.ops.gemm.config import CONSUMERS
from pallas_gpu.ops.moe.groups import GroupedProblem, Groups, Rows, table
from pallas_gpu.ops.rules import cached
from pallas_gpu.ops.tiles import operands_of, tiles

_PRODUCER = CONSUMERS
# Rows and columns of zeros that a warpgroup stores at once.
_CLEARED = 8, 512
# Rows of a tile in SMEM: the fewest that a copy from there begins with.
_EIGHT = 8


@dataclasses.dataclass(frozen=True)
class Problem(GroupedProblem):
    """Rows of each group times its matrix, and the order of the tiles."""

    @property
    def columns(self) -> int:
        """Tiles along N."""
        return plgpu.cdiv(self.n, self.config.tile_n)

    @property
    def steps(self) -> int:
        """Steps along K of one tile."""
        return plgpu.cdiv(self.k, self.config.tile_k)

    @property
    def positions(self) -> int:
        """The largest number of tiles that there can be."""
        groups = min(self.matrices, self.m)
        rows = groups + (self.m - groups) // self.config.block_m
        return rows * self.columns

    def place(self, groups: Groups, position: Any) -> tuple[Any, Any, Any]:
        """Returns the group of a position, and its tile of rows and of columns.

        The rows of a group are cut into strips; a strip is visited column by column.
        """
        most = plgpu.cdiv(self.m, self.config.block_m)
        strip, columns = np.int32(min(self.config.strip, most)), np.int32(self.columns)
        group = groups.group_of(lax.div(position, columns))
        before, end = groups.tiles_of(group)
        within = lax.sub(position, lax.mul(before, columns))
        first = lax.mul(lax.div(within, lax.mul(strip, columns)), strip)
        within = lax.sub(within, lax.mul(first, columns))
        height = lax.min(strip, lax.sub(lax.sub(end, before), first))
        row = lax.add(first, lax.rem(within, height))
        return group, row, lax.div(within, height)


@cached
def make_kernel(problem: Problem, compiler_params, interpret):
    """Returns the kernel for a problem."""
    p, c = problem, problem.config
    return plgpu.kernel(
        functools.partial(_body, p),
        out_type=jax.ShapeDtypeStruct((p.m, p.n), p.out_dtype),
        grid=(p.positions,),
        grid_names=("position",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        kernel_name="ragged_dot",
        compiler_params=compiler_params,
        interpret=interpret,
        scratch_types={
            "operands": plgpu.Ring.of(
                operands_of(p, c, c.block_m), consumers=CONSUMERS
            ),
            "out_smem": tiles((CONSUMERS, 2, c.tile_m, c.epilogue_n), p.out_dtype),
            "tables": table(p.groups, CONSUMERS + 1),
        },
    )


def _body(problem, sizes, offset, *refs, operands, out_smem, tables) -> None:
    *indices, a = refs[: 1 + problem.gathered]
    *b, out = refs[1 + problem.gathered :]
    matrices = problem.factors
    b, scales = b[:matrices], b[matrices:]
    wg, source, ring = lax.axis_index("wg"), Rows(a, *indices), operands

    groups = Groups.of(
        sizes,
        offset,
        problem.matrices,
        problem.m,
        problem.config.block_m,
        tables.at[wg],
    )
    number = lax.mul(groups.tiles, np.int32(problem.columns))

    @plgpu.dynamic_scheduling_loop("position", thread_axis="wg")
    def _(info):
        @plgpu.when(info.index[0] < number)
        def _():
            tile = Tile.at(problem, groups, info.index[0])
            first_step = lax.mul(info.local_index, np.int32(problem.steps))

            @plgpu.when(wg == _PRODUCER)
            def _():
                _produce(problem, tile, first_step, source, b, ring)

            @plgpu.when(wg < CONSUMERS)
            def _():
                _consume(
                    problem, tile, first_step, wg, scales, out, ring, out_smem.at[wg]
                )

        @plgpu.when(wg < CONSUMERS)
        def _():
            _clear(problem, groups, info.index[0], wg, out)

    plgpu.wait_smem_to_gmem(0)


@dataclasses.dataclass(frozen=True)
class Tile:
    """A tile: its matrix, first row, first column, and the end of its group's rows."""

    matrix: Any
    row: Any
    end: Any
    column: Any

    @classmethod
    def at(cls, problem: Problem, groups: Groups, position: Any) -> Tile:
        """Returns the tile at a position of the order."""
        group, number, column = problem.place(groups, position)
        start, end = groups.rows_of(group)
        height = np.int32(problem.config.block_m)
        return cls(
            matrix=lax.sub(group, groups.first),
            row=lax.add(start, lax.mul(number, height)),
            end=end,
            column=lax.mul(column, np.int32(problem.config.tile_n)),
        )


def _produce(problem, tile, first_step, a, b, ring) -> None:
    c = problem.config
    rows, columns = a.part(tile.row, c.block_m), plgpu.ds(tile.column, c.tile_n)

    def copy_rows(depth, buffer, full):
        every = a.array.at[rows, depth]
        if problem.gathered:
            plgpu.copy_gmem_to_smem(every, buffer, full)
            return
        # The second consumer may have no rows.
        is_half = tile.row + c.tile_m >= tile.end

        @plgpu.when(is_half)
        def _():
            half = a.array.at[plgpu.ds(tile.row, c.tile_m), depth]
            part = buffer.at[plgpu.ds(0, c.tile_m)]
            plgpu.copy_gmem_to_smem(half, part, full)

        @plgpu.when(jnp.logical_not(is_half))
        def _():
            plgpu.copy_gmem_to_smem(every, buffer, full)

    @plgpu.loop(0, problem.steps)
    def _(ki):
        slot = ring.fill(first_step + ki)
        left, *right = slot.buffers
        depth = plgpu.ds(ki * c.tile_k, c.tile_k)
        part = (columns, depth) if problem.transpose_b else (depth, columns)
        copy_rows(depth, left, slot.full)
        for matrices, buffer in zip(b, right, strict=True):
            source = matrices.at[tile.matrix, *part]
            plgpu.copy_gmem_to_smem(source, buffer, slot.full)


def _consume(problem, tile, first_step, wg, scales, out, ring, out_smem) -> None:
    c = problem.config
    own_rows = plgpu.ds(wg * c.tile_m, c.tile_m)
    row = lax.add(tile.row, lax.mul(wg, np.int32(c.tile_m)))

    def accumulate(*accumulators):
        def multiply(_, slot):
            left, *matrices = slot.buffers
            for acc, right in zip(accumulators, matrices, strict=True):
                if problem.transpose_b:
                    right = plgpu.transpose_ref(right, (1, 0))
                plgpu.wgmma(acc, left.at[own_rows], right)

        products = ring.accumulate(
            accumulators, problem.steps, multiply, first=first_step
        )
        if scales:
            products[0] = products[0] * _factors(problem, tile, row, *scales)
        return _parts(problem, products)

    @plgpu.when(row < tile.end)
    def _():
        acc = plgpu.ACC((c.tile_m, c.tile_n))
        parts = plgpu.run_scoped(accumulate, *[acc] * problem.factors)
        _store(problem, parts, out, out_smem, row, tile.end, tile.column)

    @plgpu.when(row >= tile.end)
    def _():
        @plgpu.loop(0, problem.steps)
        def _(ki):
            ring.take(first_step + ki)
            ring.release(first_step + ki)


def _parts(problem, products) -> list[Any]:
    """Returns the tile as it is stored, by parts: so it needs fewer registers."""
    parts = []
    for start in range(0, problem.config.tile_n, problem.config.epilogue_n):
        columns = slice(start, start + problem.config.epilogue_n)
        product, *gate = (x[:, columns] for x in products)
        part = problem.epilogue.apply(product, gate=gate[0] if gate else None)
        part = part.astype(problem.out_dtype)
        if not gate:
            # Not later, where the rows of a group's end are stored in a loop; with the
            # accumulators of a gate it spills 12 bytes, and without it none.
            part = lax.optimization_barrier(part)
        parts.append(part)
    return parts


def _factors(problem, tile, row, of_rows, of_columns) -> Any:
    """Returns the product of each element's two factors."""
    c = problem.config
    rows = row + jnp.arange(c.tile_m, dtype=jnp.int32)
    columns = tile.column + jnp.arange(c.tile_n, dtype=jnp.int32)
    left = plgpu.load(of_rows, (rows,), mask=rows < problem.m, other=0)
    right = of_columns.at[tile.matrix]
    if problem.n % c.tile_n:
        # Nothing beyond the last column is stored. A mask takes more registers: spills.
        right = right[jnp.minimum(columns, problem.n - 1)]
    else:
        right = right[plgpu.ds(tile.column, c.tile_n)]
    return left[:, None] * right[None, :]


def _store(problem, parts, out, buffers, row, end, column) -> None:
    """Stores the rows of a tile that are the group's: by TMA, as many as it can."""
    c = problem.config
    number_of_rows = lax.min(lax.sub(end, row), np.int32(c.tile_m))
    is_whole = number_of_rows == c.tile_m
    store = plgpu.TileStore(buffers, len(parts))
    for number, part in enumerate(parts):
        buffer = store.fill(number)
        buffer[...] = part
        plgpu.commit_smem()
        start = column + number * c.epilogue_n
        columns = plgpu.ds(start, c.epilogue_n)
        # The last tile of a row may have parts outside.
        inside = start < problem.n
        whole = out.at[plgpu.ds(row, c.tile_m), columns]
        plgpu.copy_smem_to_gmem(
            buffer, whole, predicate=is_whole & inside, commit_group=False
        )

        @plgpu.when(jnp.logical_not(is_whole) & inside)
        def _(buffer=buffer, start=start, columns=columns):
            _store_some(problem, buffer, out, row, number_of_rows, start, columns)

        plgpu.commit_smem_to_gmem_group()


def _store_some(problem, buffer, out, row, number, start, columns) -> None:
    """Stores the first rows of a buffer: eights by TMA, the rest under a mask."""
    c = problem.config
    eights = lax.div(number, np.int32(_EIGHT))

    @plgpu.loop(0, eights)
    def _(i):
        source = buffer.at[plgpu.ds(i * _EIGHT, _EIGHT)]
        target = out.at[plgpu.ds(row + i * _EIGHT, _EIGHT), columns]
        plgpu.copy_smem_to_gmem(source, target, commit_group=False)

    @plgpu.when(eights * _EIGHT < number)
    def _():
        first = eights * _EIGHT
        rows = first + jnp.arange(_EIGHT, dtype=jnp.int32)
        column = start + jnp.arange(c.epilogue_n, dtype=jnp.int32)
        mask = (rows < number)[:, None]
        if problem.n % c.tile_n:
            mask = mask & (column < problem.n)[None, :]
        rest = buffer[plgpu.ds(first, _EIGHT)]
        at = (row + rows)[:, None], column[None, :]
        plgpu.store(out, at, rest, mask=mask)


def _clear(problem, groups, position, wg, out) -> None:
    """Stores zeros to the rows of no group, and to those of groups without a matrix."""
    begin, end = groups.span
    height, width = _CLEARED
    before = plgpu.cdiv(begin, height)
    after = plgpu.cdiv(np.int32(problem.m) - end, height)
    columns = plgpu.cdiv(problem.n, width)
    first, step = position * CONSUMERS + wg, CONSUMERS * problem.positions

    @plgpu.loop(first, (before + after) * columns, step=step)
    def _(part):
        number, column = (
            lax.div(part, np.int32(columns)),
            lax.rem(part, np.int32(columns)),
        )
        is_before = number < before
        start = jnp.where(is_before, 0, end - before * height) + number * height
        row = start + jnp.arange(height, dtype=jnp.int32)
        column = column * width + jnp.arange(width, dtype=jnp.int32)
        mask = (row < jnp.where(is_before, begin, problem.m))[:, None]
        if problem.n % width:
            mask = mask & (column < problem.n)[None, :]
        zeros = jnp.zeros((height, width), out.dtype)
        plgpu.store(out, (row[:, None], column[None, :]), zeros, mask=mask)
