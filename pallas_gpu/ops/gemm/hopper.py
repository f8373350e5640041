# SPDX-License-Identifier: Apache-2.0
"""A matrix product for Hopper: persistent, warp-specialised, clustered.

A block has three warpgroups. The last one is the producer: it copies tiles of A and B
into a ring of SMEM buffers by TMA, which reads zeros outside the arrays. The other two
are consumers: each multiplies its half of the block's rows on the tensor core, applies
the epilogue in registers, and stores its result through SMEM; TMA clips what lies
outside. A `full` barrier completes when a buffer has been loaded, an `empty` barrier
when it may be overwritten. In a cluster of two blocks that need the same rows
of A (or the same columns of B), each loads one half and multicasts it to both.

Products of 8-bit matrices with scales have two or three consumers. Their sums stay in
the tensor core's accumulator, or are promoted: see `promoted.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from pallas_gpu.ops import memory
from pallas_gpu.ops.gemm import promoted
from pallas_gpu.ops.gemm.config import MatmulConfig
from pallas_gpu.ops.gemm.epilogue import FACTORS, PLAIN, load_columns, scaled
from pallas_gpu.ops.gemm.problem import Problem
from pallas_gpu.ops.memory import Memory
from pallas_gpu.ops.rules import cached
from pallas_gpu.ops.tiles import CLUSTERS, operands_of, starts_inside, tiles

# Registers per thread of producer and consumers, by the number of consumers:
# (40 + 2 * 232) * 128 and (24 + 3 * 160) * 128 threads use 64512 of an SM's 65536.
REGISTERS = {2: (40, 232), 3: (24, 160)}
_ZEROS = plgpu.OOBFillMode.ZEROS


@cached
def make_kernel(p: Problem) -> Any:
    """Returns the kernel: a function of A, B and the operands of the epilogue."""
    c = p.config
    of_kernel = p if c.parts == 1 else _divided(p, c)
    if c.transposed or c.parts > 1:
        _require_no_gate(p)
    turned = of_kernel.transposed if c.transposed else of_kernel
    out = jax.ShapeDtypeStruct(of_kernel.out_shape, of_kernel.out_dtype)
    kernel = launch(Schedule(turned, c), "matmul", Consumer, out)
    if c.parts == 1:
        return kernel

    def added(a: jax.Array, b: jax.Array, *others: jax.Array) -> jax.Array:
        products = kernel(a, b).reshape(p.batch, c.parts, p.m, p.n)
        total = products.sum(axis=1, dtype=products.dtype)
        return p.epilogue.of_arrays(total, p.out_dtype, *others)

    return added


@cached
def scaled_kernel(p: Problem) -> Any:
    """Returns the function of A (M, K), B (N, K) and `Problem.operands`.

    `a_blocks` is (K / 128, M), with M rounded up to a multiple of 4, and `b_blocks`
    (K / 128, N / 128), both rounded up; `a_scale` and `b_scale` are (1,), and the other
    operands have one element for each row or column of all tiles.
    """
    out = jax.ShapeDtypeStruct((p.m, p.n), p.out_dtype)
    return launch(Schedule(p, p.config), "scaled_matmul", Consumer, out)


def _divided(p: Problem, c: MatmulConfig) -> Problem:
    steps = plgpu.cdiv(p.k, c.tile_k)
    most = plgpu.cdiv(steps, plgpu.cdiv(steps, c.parts))
    if c.parts > most:
        raise errors.ArgumentError(
            "matmul: a block has no part of K",
            expected=f"at most {most} parts of K={p.k} in steps of {c.tile_k}",
            got=f"parts={c.parts}",
            hint="omit config",
        )
    return dataclasses.replace(
        p,
        batch=p.batch * c.parts,
        out_dtype=jnp.dtype(p.accumulator),
        epilogue=PLAIN,
        residual_dtype=None,
    )


def as_tf32(x: Any) -> Any:
    """Returns float32 rounded to the nearest tf32, of which 13 bits are not read.

    A selection instead of the minimum, which keeps NaN, would make ptxas serialise the
    products that read the result.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    size, sign = bits & np.uint32(0x7FFFFFFF), bits & np.uint32(0x80000000)
    rounded = jnp.minimum(size + np.uint32(0x1000), np.uint32(0x7FFFFFFF))
    return lax.bitcast_convert_type(rounded | sign, jnp.float32)


def _require_no_gate(p: Problem) -> None:
    if not p.epilogue.gated:
        return
    raise errors.ArgumentError(
        "matmul: the configuration has no gate",
        expected="MatmulConfig(transposed=False, parts=1) beside a gate",
        got="transposed or parts",
        hint="omit config",
    )


def launch(
    schedule: Schedule, name: str, consumer: Any, results: Any, **options: Any
) -> Any:
    """Returns a kernel of products, whose tiles a consumer finishes.

    Args:
      consumer: `Consumer`, or a class with methods of its own.
      results, **options: see `persistent`.
    """

    def visits(wg: Any, mem: Memory) -> Any:
        mem = schedule.prepared(mem)
        return (
            lambda: functools.partial(schedule.produce, mem),
            lambda: consumer.of(schedule, mem, wg).visit,
        )

    return persistent(schedule, name, visits, results, **options)


def persistent(
    schedule: Schedule,
    name: str,
    visits: Any,
    results: Any,
    *,
    inputs: Any = None,
    scratch: Any = None,
) -> Any:
    """Returns a kernel in which a producer and consumers visit the tiles of a schedule.

    Args:
      visits: called with the index of the warpgroup and the memory; returns for
        the producer and for a consumer a function that returns what visits a tile.
        A third function is for another warp of the producer, which runs it once.
      inputs: names of the arrays; default: A, B and the problem's other operands.
      results: see `memory.launch`.
      scratch: declarations; default: `scratch_of` the schedule.
    """
    p, c, tiles = schedule.problem, schedule.config, schedule.tiles
    roles = plgpu.Roles(c.consumers, REGISTERS[c.consumers])

    def body(mem: Memory) -> None:
        wg = lax.axis_index("wg")
        producer, consumer, *others = visits(wg, mem)

        def produce() -> None:
            schedule.for_each_tile(producer())

        def in_warps(warp: Any) -> None:
            for i, run in enumerate((produce, *others)):
                plgpu.when(lax.eq(warp, np.int32(i)))(run)

        def consume() -> None:
            schedule.for_each_tile(consumer())
            plgpu.wait_smem_to_gmem(0)

        roles.run(
            wg, (lambda: plgpu.warp_map(in_warps)) if others else produce, consume
        )

    return memory.launch(
        *(p, name, body),
        inputs or (*("ba" if c.transposed else "ab"), *p.operands),
        results,
        scratch or scratch_of(schedule),
        grid={tiles.axis: tiles.clusters(c.blocks)},
        cluster={tiles.cluster_axis: math.prod(tiles.cluster)},
        warpgroups=roles.num_threads,
    )


def scratch_of(schedule: Schedule, buffers: Any = None) -> dict[str, Any]:
    """Returns declarations of the ring of operands and of the buffers of stores.

    Args:
      buffers: of the ring; default: those of A, B and the gate, beside which there are
        scales of blocks.
    """
    p, c, sides = schedule.problem, schedule.config, schedule.part
    part = tuple(reversed(sides) if c.transposed else sides)
    operands = buffers or operands_of(p, c, c.block_m)
    scaled = buffers is None and p.group is not None
    scratch = {
        "operands": plgpu.Ring.of(
            operands,
            copies=len(operands) + scaled,
            consumers=c.consumers,
            collective_axes="pair" if c.cluster else (),
        ),
        "out_smem": tiles((c.consumers, p.epilogue.buffers, *part), p.out_dtype),
    }
    if scaled:
        number = schedule.scaled_rows(0).size
        scratch["scale_smem"] = plgpu.SMEM((c.stages, number), jnp.float32)
    if p.epilogue.residual:
        scratch["residual_smem"] = tiles((c.consumers, 2, *part), p.residual_dtype)
        scratch["residual_full"] = plgpu.Barrier(num_barriers=2 * c.consumers)
    return scratch


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Which tiles a cluster computes, and in which order."""

    problem: Any
    config: Any

    @property
    def tiles(self) -> plgpu.TileSchedule:
        p, c = self.problem, self.config
        return plgpu.TileSchedule(
            (p.m, p.n),
            (c.block_m, c.tile_n),
            cluster=CLUSTERS[c.cluster],
            batch=p.batch,
            minor=0 if c.minor == "m" else 1,
            strip=c.strip,
        )

    # In which the operands of a step are copied.
    order: ClassVar[tuple[int, ...]] = (0, 1, 2)
    # Tiles of a cluster may lie outside as a whole.
    oob_mode: ClassVar[Any] = _ZEROS
    # The policy of the L2 cache for results.
    store_hint: ClassVar[Any] = None

    @property
    def steps(self) -> int:
        c = self.config
        return plgpu.cdiv(plgpu.cdiv(self.problem.k, c.tile_k), c.parts)

    def for_each_tile(self, visit: Any) -> None:
        """Calls `visit(batch, row, column, steps before it)` for a block's tiles."""
        c = self.config

        def at(batch, mi, ni, number):
            visit(batch, mi * c.block_m, ni * c.tile_n, number * self.steps)

        self.tiles.for_each(at)

    def is_inside(self, row: Any, column: Any) -> Any:
        return starts_inside(self.problem, self.tiles, self.part, row, column)

    @property
    def part(self) -> tuple[int, int]:
        """Rows and columns of a consumer's tile that are stored at once."""
        return self.config.stored(self.problem)

    def part_of_k(self, batch: Any) -> tuple[Any, Any, Any]:
        """Returns the product, the first step of its part of K, and the steps."""
        if self.config.parts == 1:
            return batch, 0, self.steps
        parts = np.int32(self.config.parts)
        return lax.div(batch, parts), lax.rem(batch, parts) * self.steps, self.steps

    def prepared(self, mem: Memory) -> Memory:
        return mem

    def rows(self, mem: Any, row: Any) -> Any:
        del mem
        return plgpu.ds(row, self.config.block_m)

    def copy_rows(self, row: Any, source: Any, buffer: Any, copy: Any, axes) -> None:
        del row
        copy(source, buffer, axes)

    def k_block(self, first_step: Any, step: Any) -> Any:
        """The part of K of a tile's step, given the steps before the tile."""
        if not self.config.zigzag:
            return step
        steps = np.int32(self.steps)
        odd = lax.rem(lax.div(first_step, steps), np.int32(2))
        return lax.select(lax.eq(odd, np.int32(1)), steps - 1 - step, step)

    def copy_scales(self, mem: Any, slot: Any, block: Any, row: Any, copy: Any) -> Any:
        """Calls `copy(source, buffer)` for the scales of a part of K, if there are."""
        if self.problem.group is not None:
            rows = self.scaled_rows(row)
            copy(mem.a_blocks.at[block, rows], mem.scale_smem.at[slot.index])

    def scaled_rows(self, row: Any) -> Any:
        """Returns the rows whose scales are copied for a tile that begins at one."""
        return plgpu.ds(row, self.config.block_m)

    def produce(self, mem: Any, batch, row, column, first_step) -> None:
        p, c = self.problem, self.config
        share_a, share_b = ("pair" if c.cluster == d else None for d in "nm")
        batch, start, steps = self.part_of_k(batch)
        factors = [(mem.a, p.shared_a, share_a), (mem.b, p.shared_b, share_b)]
        if p.epilogue.gated:
            factors.append((mem.gate, p.shared_b, share_b))
        rows, columns = self.rows(mem, row), plgpu.ds(column, c.tile_n)

        @plgpu.loop(0, steps)
        def _(ki):
            slot = mem.operands.fill(first_step + ki)
            block = self.k_block(first_step, start + ki)
            depth = plgpu.ds(block * c.tile_k, c.tile_k)
            of_a = (depth, rows) if p.transpose_a else (rows, depth)
            of_b = (columns, depth) if p.transpose_b else (depth, columns)

            def copy(source, buffer, axes=None, oob_mode: Any = self.oob_mode):
                plgpu.copy_gmem_to_smem(
                    source, buffer, slot.full, collective_axes=axes, oob_mode=oob_mode
                )

            windows = of_a, of_b, of_b
            for i in self.order[: len(factors)]:
                (source, shared, axes), window = factors[i], windows[i]
                buffer = slot.buffers[i]
                source = source.at[_of_rank(source, 0 if shared else batch, window)]
                if window is of_a:
                    self.copy_rows(row, source, buffer, copy, axes)
                else:
                    copy(source, buffer, axes)
            self.copy_scales(mem, slot, block, row, copy)


# For kernels that visit tiles in an order of their own.
produce = Schedule.produce


def _of_rank(ref: Any, batch: Any, window: tuple[Any, Any]) -> tuple[Any, ...]:
    """Returns the index of a window in one of several matrices, or in the only one."""
    return window if ref.ndim == 2 else (batch, *window)


@dataclasses.dataclass(frozen=True)
class Consumer:
    schedule: Schedule
    mem: Memory
    wg: Any
    # The scales of A and B. Their product may not be a float32.
    factors: Any = dataclasses.field(default=(), kw_only=True)

    @classmethod
    def of(cls, schedule: Any, mem: Memory, wg: Any) -> Self:
        scales = (mem.get(x) for x in FACTORS if x in schedule.problem.scales)
        return cls(schedule, mem, wg, factors=[x[0] for x in scales])

    def visit(self, batch, row, column, first_step) -> None:
        place = batch, column, first_step
        # Its rows are counted after them, for a register less, if nothing is loaded.
        late = self.schedule.config.counts_late
        products = self.products(*place) if late else None
        row = row + self.wg * self.schedule.config.tile_m
        for part in range(min(2, len(self.parts))):
            self.prefetch_residual(part, batch, row, column)
        self.store(products or self.products(*place), batch, row, column)

    @property
    def shape(self) -> tuple[int, int]:
        return self.schedule.config.tile_m, self.schedule.config.tile_n

    def products(self, batch, column, first_step, finish: Any = None) -> list[Any]:
        """Returns its rows of the products, or what `finish` makes of them."""
        p, of_b = self.schedule.problem, None
        if p.promoted:
            if p.group is not None:
                place = batch, column, first_step
                of_b = functools.partial(self.scale_of_b, *place)
            products = [promoted.products(self, first_step, of_b)]
            return products if finish is None else finish(products)
        acc = plgpu.ACC(self.shape, p.accumulator)

        def scoped(*accumulators):
            products = self.accumulate(first_step, *accumulators)
            return products if finish is None else finish(products)

        return plgpu.run_scoped(scoped, *[acc] * p.factors)

    def scale_of_a(self, slot, rows) -> Any:
        """Returns the scales of rows of a block in a step."""
        return self.mem.scale_smem[slot.index, rows]

    def scale_of_b(self, batch, column, first_step, step) -> Any:
        """Returns the scale of a step's block of B."""
        del batch
        block, scales = self.schedule.k_block(first_step, step), self.mem.b_blocks
        # A cluster's last tile may lie behind the last block.
        last = scales.shape[1] - 1
        return scales[block, jnp.minimum(promoted.block_of(column), last)]

    def accumulate(self, first_step, *accumulators) -> list[Any]:
        """Returns the product of its rows with B, and with the gate."""
        p, c = self.schedule.problem, self.schedule.config
        if p.turns_a:
            return self.accumulate_converted(first_step, *accumulators)
        own_rows = plgpu.ds(self.wg * c.tile_m, c.tile_m)

        def multiply(_, slot):
            a, *right = slot.buffers
            a = a.at[:, own_rows].T if p.transpose_a else a.at[own_rows]
            for acc, b in zip(accumulators, right, strict=True):
                plgpu.wgmma(acc, a, b.T if p.transpose_b else b)

        return self.mem.operands.accumulate(
            accumulators, self.schedule.steps, multiply, first=first_step
        )

    def accumulate_converted(self, first_step, acc) -> list[Any]:
        """Returns the product where the tensor core cannot read A as it is stored.

        It is converted on the way to registers. The next step's rows are loaded while
        the tensor core multiplies; only then may instructions write its operand, else
        ptxas serialises them.
        """
        ring, last = self.mem.operands, first_step + self.schedule.steps - 1

        def multiply(step, rows):
            plgpu.wgmma(acc, rows, ring.slot(step).buffers[1].T)

        first = self.convert(first_step, self.load(first_step))

        @plgpu.loop(first_step, last, init_carry=first)
        def final(step, rows):
            multiply(step, rows)
            following = lax.optimization_barrier(self.load(step + 1))
            plgpu.wgmma_wait(0)
            ring.release(step)
            return self.convert(step + 1, following)

        multiply(last, final)
        product = acc[...]
        ring.release(last)
        return [product]

    def load(self, step: Any) -> Any:
        """Loads its rows of A, here transposed, beside a product."""
        own = plgpu.ds(
            self.wg * self.schedule.config.tile_m, self.schedule.config.tile_m
        )
        rows = self.mem.operands.take(step).buffers[0].at[:, own].T
        return plgpu.load(rows, layout=plgpu.Layout.WGMMA_32BIT, optimized=False)

    def convert(self, step: Any, loaded: Any) -> Any:
        """Returns what the tensor core multiplies, when it has no product under way."""
        del step
        return as_tf32(loaded)

    @property
    def parts(self) -> list[tuple[int, int]]:
        """Where the parts of a tile begin that are stored at once."""
        c, (rows, columns) = self.schedule.config, self.schedule.part
        return [
            (i, j)
            for i in range(0, c.tile_m, rows)
            for j in range(0, c.tile_n, columns)
        ]

    def window(self, part: int, batch, row, column) -> tuple[Any, Any]:
        """Returns the index of a part in the result, and whether it begins inside."""
        (rows, columns), (i, j) = self.schedule.part, self.parts[part]
        window = plgpu.ds(row + i, rows), plgpu.ds(column + j, columns)
        is_inside = self.schedule.is_inside(row + i, column + j)
        window = window[::-1] if self.schedule.config.transposed else window
        return _of_rank(self.mem.out, batch, window), is_inside

    def prefetch_residual(self, part: int, batch, row, column) -> None:
        """Starts the copy of the residual of a part, whose buffer has been read."""
        mem = self.mem
        if not self.schedule.problem.epilogue.residual:
            return
        index, _ = self.window(part, batch, row, column)
        plgpu.copy_gmem_to_smem(
            mem.residual.at[index],
            mem.residual_smem.at[self.wg, part % 2],
            mem.residual_full.at[self.wg * 2 + part % 2],
            oob_mode=_ZEROS,
        )

    def load_residual(self, part: int) -> Any:
        if not self.schedule.problem.epilogue.residual:
            return None
        plgpu.barrier_wait(self.mem.residual_full.at[self.wg * 2 + part % 2])
        found = self.mem.residual_smem.at[self.wg, part % 2]
        return (found.T if self.schedule.config.transposed else found)[...]

    def load_bias(self, row: Any, column: Any) -> Any:
        """Returns the bias of the part that begins there."""
        bias, part = self.mem.bias, self.schedule.part
        if not self.schedule.config.transposed:
            return load_columns(bias, column, part[1])
        rows = load_columns(bias, row, part[0], layout=plgpu.Layout.WGMMA_ROW)
        return lax.broadcast_in_dim(rows, part, (0,))

    def store(self, products, batch, row, column) -> None:
        """Stores a tile part by part; the copies overlap with what comes after."""
        (rows, columns), mem = self.schedule.part, self.mem
        store = plgpu.TileStore(mem.out_smem.at[self.wg], len(self.parts))
        finish = self.finisher(row, column)
        for part, (i, j) in enumerate(self.parts):
            tiles = [x[i : i + rows, j : j + columns] for x in products]
            value = finish(part, *tiles)
            index, is_inside = self.window(part, batch, row, column)
            store.store(
                part,
                value,
                mem.out.at[index],
                predicate=is_inside,
                transposed=self.schedule.config.transposed,
                cache_hint=self.schedule.store_hint,
            )
            if part + 2 < len(self.parts):
                # All threads have read its buffer before `commit_smem`.
                self.prefetch_residual(part + 2, batch, row, column)

    def finisher(self, row: Any, column: Any) -> Any:
        """Returns the epilogue of a tile: `finish(part, product, *gate)`."""
        p, epilogue = self.schedule.problem, self.schedule.problem.epilogue
        # Scales of blocks are factors of the parts that are added.
        scales = {x: self.mem.get(x) for x in p.scales if not x.endswith("_blocks")}

        def finish(part: int, product: Any, gate: Any = None) -> Any:
            (i, j), bias = self.parts[part], None
            product = scaled(product, scales, row + i, column + j, self.factors)
            if epilogue.bias:
                bias = self.load_bias(row + i, column + j)
            if epilogue.is_identity:
                return product
            residual = self.load_residual(part)
            return epilogue.apply(product, bias=bias, gate=gate, residual=residual)

        return finish
