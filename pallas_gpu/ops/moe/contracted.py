# SPDX-License-Identifier: Apache-2.0
"""For each group the product of two arrays over its rows, for Hopper: `x.T @ y`.

The derivative of a ragged dot with respect to its matrices. The schedule is that of
`hopper`, but for the depth of a product, which is the number of rows of its group. Both
operands are stored transposed, or not, as the tensor core reads them. Where the last
step of a group reaches into the rows of the next one, the consumers overwrite these
rows in SMEM with zeros, those of both operands, as there may be infinities among them.
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
from pallas_gpu.ops import roles
from pallas_gpu.ops.moe.config import CONSUMERS, REGISTERS, RaggedDotConfig
from pallas_gpu.ops.moe.groups import Groups, Rows, table
from pallas_gpu.ops.tiles import tiles


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes and types, and which tiles a block computes in which order.

    Attributes:
      rows: of both operands.
      m, n: columns of the operands, and sizes of each group's result.
      matrices: results: those of that many groups from the first one on.
      gathered: whether the rows of the first operand are those that an array of indices
        names.
    """

    rows: int
    m: int
    n: int
    groups: int
    matrices: int
    dtype: Any
    out_dtype: Any
    gathered: bool
    config: RaggedDotConfig

    @property
    def plane(self) -> tuple[int, int]:
        """Tiles of one group along M and N."""
        c = self.config
        return plgpu.cdiv(self.m, c.block_m), plgpu.cdiv(self.n, c.tile_n)

    @property
    def blocks(self) -> int:
        """Blocks of the launch: no more than there is work for."""
        return min(self.config.blocks, self.matrices * math.prod(self.plane))


@functools.lru_cache(maxsize=64)
def make_kernel(problem: Problem, compiler_params, interpret):
    """Returns the kernel for a problem."""
    p, c = problem, problem.config
    return plgpu.kernel(
        functools.partial(_body, p),
        out_type=jax.ShapeDtypeStruct((p.matrices, p.m, p.n), p.out_dtype),
        grid=(p.blocks,),
        grid_names=("worker",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        kernel_name="ragged_dot_contracted",
        compiler_params=compiler_params,
        interpret=interpret,
        scratch_types={
            "a_smem": tiles((c.stages, c.tile_k, c.block_m), p.dtype),
            "b_smem": tiles((c.stages, c.tile_k, c.tile_n), p.dtype),
            "out_smem": tiles((CONSUMERS, 2, c.tile_m, c.epilogue_n), p.out_dtype),
            "tables": table(p.groups, CONSUMERS + 1),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=c.stages),
            "empty": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=c.stages),
            "cleared": plgpu.Barrier(num_arrivals=CONSUMERS),
        },
    )


def _body(
    problem,
    sizes,
    offset,
    *refs,
    a_smem,
    b_smem,
    out_smem,
    tables,
    full,
    empty,
    cleared,
) -> None:
    *indices, a, b, out = refs
    wg = lax.axis_index("wg")
    ring = a_smem, b_smem, full, empty

    def groups() -> Groups:
        p = problem
        own = tables.at[wg]
        return Groups.of(sizes, offset, p.matrices, p.rows, p.config.tile_k, own)

    def produce() -> None:
        _produce(problem, groups(), Rows(a, *indices), b, ring)

    def consume() -> None:
        _consume(problem, groups(), wg, out, ring, out_smem.at[wg], cleared)

    roles.split(wg, CONSUMERS, REGISTERS[problem.gathered], produce, consume)


def _for_each_tile(problem: Problem, groups: Groups, visit: Any) -> None:
    """Calls `visit(group, rows, tile, first step)` for the tiles of this block.

    `rows` are the first one and the end, `tile` the first row and column of the result.
    """
    c = problem.config

    @plgpu.nd_loop(
        (problem.matrices, math.prod(problem.plane)),
        collective_axes="worker",
        init_carry=jnp.int32(0),
    )
    def _(info, carry):
        group, linear = info.index
        mi, ni = plgpu.planar_snake(linear, problem.plane, 1, c.strip)
        rows = groups.rows_of(lax.add(groups.first, group))
        tile = lax.mul(mi, np.int32(c.block_m)), lax.mul(ni, np.int32(c.tile_n))
        visit(group, rows, tile, carry)
        return lax.add(carry, _steps(problem, rows))


def _steps(problem: Problem, rows: tuple[Any, Any]) -> Any:
    """Returns the number of steps over the rows of a group."""
    first, end = rows
    depth = problem.config.tile_k
    rounded = lax.add(lax.sub(end, first), np.int32(depth - 1))
    return lax.div(rounded, np.int32(depth))


def _produce(problem, groups, a, b, ring) -> None:
    c = problem.config
    a_smem, b_smem, full, empty = ring

    def visit(group, rows, tile, first_step):
        m, n = plgpu.ds(tile[0], c.block_m), plgpu.ds(tile[1], c.tile_n)

        @plgpu.loop(0, _steps(problem, rows))
        def _(ki):
            step = first_step + ki
            slot = lax.rem(step, np.int32(c.stages))

            @plgpu.when(step >= c.stages)
            def _():
                plgpu.barrier_wait(empty.at[slot])

            row = rows[0] + ki * c.tile_k
            left = a.array.at[a.part(row, c.tile_k), m]
            right = b.at[plgpu.ds(row, c.tile_k), n]
            plgpu.copy_gmem_to_smem(left, a_smem.at[slot], full.at[slot])
            plgpu.copy_gmem_to_smem(right, b_smem.at[slot], full.at[slot])

    _for_each_tile(problem, groups, visit)


def _consume(problem, groups, wg, out, ring, out_smem, cleared) -> None:
    c = problem.config
    a_smem, b_smem, full, empty = ring
    own = plgpu.ds(wg * c.tile_m, c.tile_m)
    half = c.tile_n // CONSUMERS

    def clear(slot, valid):
        """Overwrites the rows from `valid` on; each consumer takes a part of B."""
        beyond = (jnp.arange(c.tile_k, dtype=jnp.int32) >= valid)[:, None]
        part = plgpu.ds(wg * half, half)
        for ref in (a_smem.at[slot, :, own], b_smem.at[slot, :, part]):
            plgpu.store(ref, (), jnp.zeros(ref.shape, ref.dtype), mask=beyond)
        plgpu.commit_smem()
        plgpu.barrier_arrive_and_wait(cleared)

    def visit(group, rows, tile, first_step):
        steps = _steps(problem, rows)

        def accumulate(acc):
            @plgpu.loop(0, steps)
            def _(ki):
                slot = lax.rem(first_step + ki, np.int32(c.stages))
                plgpu.barrier_wait(full.at[slot])
                valid = rows[1] - rows[0] - ki * c.tile_k

                @plgpu.when(valid < c.tile_k)
                def _():
                    clear(slot, valid)

                left = plgpu.transpose_ref(a_smem.at[slot, :, own], (1, 0))
                plgpu.wgmma(acc, left, b_smem.at[slot])
                # One product stays under way; the buffer of the one before is free.
                plgpu.wgmma_wait(1)

                @plgpu.when(ki > 0)
                def _():
                    before = lax.rem(first_step + ki - 1, np.int32(c.stages))
                    plgpu.barrier_arrive(empty.at[before])

            product = acc[...]

            @plgpu.when(steps > 0)
            def _():
                last = lax.rem(first_step + steps - 1, np.int32(c.stages))
                plgpu.barrier_arrive(empty.at[last])

            return product

        product = plgpu.run_scoped(accumulate, plgpu.ACC((c.tile_m, c.tile_n)))
        row = tile[0] + wg * c.tile_m
        _store(problem, product.astype(out.dtype), out, out_smem, group, row, tile[1])

    _for_each_tile(problem, groups, visit)
    plgpu.wait_smem_to_gmem(0)


def _store(problem, product, out, buffers, group, row, column) -> None:
    """Stores a tile part by part; the copies overlap with what comes after."""
    c = problem.config
    parts = range(0, c.tile_n, c.epilogue_n)
    for number, start in enumerate(parts):
        buffer = buffers.at[number % 2]
        # The copy before the last one has read this buffer; with an odd number of parts
        # a tile begins with the buffer that the tile before has ended with.
        repeated = number == 0 and len(parts) % 2 == 1
        plgpu.wait_smem_to_gmem(0 if repeated else 1, wait_read_only=True)
        buffer[...] = product[:, start : start + c.epilogue_n]
        plgpu.commit_smem()
        target = plgpu.ds(row, c.tile_m), plgpu.ds(column + start, c.epilogue_n)
        inside = (row < problem.m) & (column + start < problem.n)
        plgpu.copy_smem_to_gmem(buffer, out.at[group, *target], predicate=inside)
