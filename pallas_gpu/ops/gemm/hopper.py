# SPDX-License-Identifier: Apache-2.0
"""A matrix product for Hopper: persistent, warp-specialised, clustered.

A block has three warpgroups. The last one is the producer: it copies tiles of A and B
into a ring of SMEM buffers by TMA, which reads zeros outside the arrays. The other two
are consumers: each multiplies its half of the block's rows on the tensor core, applies
the epilogue in registers, and stores its result through SMEM; TMA clips what lies
outside. A `full` barrier completes when a buffer has been loaded, an `empty` barrier
when it may be overwritten. In a cluster of two blocks that need the same rows
of A (or the same columns of B), each loads one half and multicasts it to both.
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
from pallas_gpu import errors
from pallas_gpu.ops.gemm.config import CONSUMERS, MatmulConfig
from pallas_gpu.ops.gemm.epilogue import PLAIN, load_columns
from pallas_gpu.ops.gemm.problem import Problem
from pallas_gpu.ops.tiles import CLUSTERS, tiles

# Registers per thread of producer and consumers, by the number of consumers:
# (40 + 2 * 232) * 128 and (24 + 3 * 160) * 128 threads use 64512 of an SM's 65536.
_REGISTERS = {2: (40, 232), 3: (24, 160)}
_ZEROS = plgpu.OOBFillMode.ZEROS


@functools.lru_cache(maxsize=256)
def make_kernel(p: Problem, config: MatmulConfig, compiler_params, interpret) -> Any:
    """Returns the kernel: a function of A, B and the operands of the epilogue."""

    of_kernel = p if config.parts == 1 else _divided(p, config)

    def memory(a, b, *refs, **scratch) -> Memory:
        *others, out = refs
        named = dict(zip(of_kernel.epilogue.operands, others, strict=True))
        if config.transposed:
            a, b = b, a
        return Memory(a=a, b=b, out=out, **named, **scratch)

    if config.transposed or config.parts > 1:
        _require_no_gate(p)
    kernel = launch(
        Schedule(of_kernel.transposed if config.transposed else of_kernel, config),
        TransposedConsumer if config.transposed else Consumer,
        memory,
        jax.ShapeDtypeStruct(of_kernel.out_shape, of_kernel.out_dtype),
        kernel_name="matmul",
        compiler_params=compiler_params,
        interpret=interpret,
    )
    if config.parts == 1:
        return kernel

    def added(a: jax.Array, b: jax.Array, *others: jax.Array) -> jax.Array:
        products = kernel(a, b).reshape(p.batch, config.parts, p.m, p.n)
        total = products.sum(axis=1, dtype=products.dtype)
        if not p.epilogue.is_identity:
            named = dict(zip(p.epilogue.operands, others, strict=True))
            if "bias" in named:
                named["bias"] = named["bias"][: p.n].astype(jnp.float32)
            total = p.epilogue.apply(total, **named)
        return total.astype(p.out_dtype)

    return added


def _divided(p: Problem, c: MatmulConfig) -> Problem:
    """Returns the problem of which each part of K is a product."""
    steps = plgpu.cdiv(p.k, c.tile_k)
    most = plgpu.cdiv(steps, plgpu.cdiv(steps, c.parts))
    if c.parts > most:
        raise errors.ArgumentError(
            "matmul: a block has no part of K",
            expected=f"at most {most} parts of K={p.k} in steps of {c.tile_k}",
            got=f"parts={c.parts}",
            hint="omit config",
        )
    is_integer = p.dtype == jnp.int8
    return dataclasses.replace(
        p,
        batch=p.batch * c.parts,
        out_dtype=jnp.dtype(jnp.int32 if is_integer else jnp.float32),
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
    schedule: Schedule, consumer: Any, memory: Any, out_type: Any, **options: Any
) -> Any:
    """Returns a kernel of products, whose tiles a consumer finishes.

    Args:
      schedule: the tiles.
      consumer: `Consumer`, or a class of its own `store`.
      memory: returns a `Memory` from the references of the operands and results and,
        by name, of the scratch.
      out_type: of the results.
      **options: name and parameters, for `plgpu.kernel`.
    """

    def visits(wg: Any, *refs: Any, **scratch: Any) -> Any:
        mem = memory(*refs, **scratch)
        return (
            lambda: functools.partial(produce, schedule, mem),
            lambda: consumer(schedule, mem, wg).visit,
        )

    scratch = scratch_of(schedule.problem, schedule.config)
    c = schedule.config
    return persistent(
        schedule, visits, CONSUMERS, c.blocks, out_type, scratch, **options
    )


def persistent(
    schedule: Any,
    visits: Any,
    consumers: int,
    blocks: int,
    out_type: Any,
    scratch: dict[str, Any],
    **options: Any,
) -> Any:
    """Returns a kernel in which a producer and consumers visit the tiles of a schedule.

    Args:
      schedule: has `tiles`, a `plgpu.TileSchedule`, and `for_each_tile`.
      visits: called with the index of the warpgroup and all references; returns for
        the producer and for a consumer a function that returns what visits a tile.
        A third function is for another warp of the producer, which runs it once.
      consumers: warpgroups.
      blocks: CTAs, at most.
      out_type, scratch: of the kernel.
      **options: name and parameters, for `plgpu.kernel`.
    """
    roles = plgpu.Roles(consumers, _REGISTERS[consumers])

    def body(*refs, **memory) -> None:
        wg = lax.axis_index("wg")
        producer, consumer, *others = visits(wg, *refs, **memory)

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

    tiles = schedule.tiles
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(tiles.clusters(blocks),),
        grid_names=(tiles.axis,),
        cluster=(math.prod(tiles.cluster),),
        cluster_names=(tiles.cluster_axis,),
        num_threads=roles.num_threads,
        thread_name="wg",
        scratch_types=scratch,
        **options,
    )


def scratch_of(p: Problem, c: MatmulConfig) -> dict[str, Any]:
    """Returns declarations of the ring of operands and of the buffers of stores."""
    sides = (c.epilogue_m, c.epilogue_n)
    part = (CONSUMERS, 2, *(reversed(sides) if c.transposed else sides))
    a_tile = (c.tile_k, c.block_m) if p.transpose_a else (c.block_m, c.tile_k)
    b_tile = (c.tile_n, c.tile_k) if p.transpose_b else (c.tile_k, c.tile_n)
    operands = [a_tile, b_tile, *[b_tile] * p.epilogue.gated]
    scratch = {
        "operands": plgpu.Ring.of(
            [tiles((c.stages, *tile), p.dtype) for tile in operands],
            consumers=CONSUMERS,
            collective_axes="pair" if c.cluster else (),
        ),
        "out_smem": tiles(part, p.out_dtype),
    }
    if p.epilogue.residual:
        scratch["residual_smem"] = tiles(part, p.residual_dtype)
        scratch["residual_full"] = plgpu.Barrier(num_barriers=2 * CONSUMERS)
    return scratch


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Which tiles a cluster computes, and in which order.

    Attributes:
      problem: a `Problem`, or another description of a product.
      config: a `MatmulConfig`, or one with such tiles.
    """

    problem: Any
    config: Any

    @property
    def tiles(self) -> plgpu.TileSchedule:
        """The tiles, and their order."""
        p, c = self.problem, self.config
        return plgpu.TileSchedule(
            (p.m, p.n),
            (c.block_m, c.tile_n),
            cluster=CLUSTERS[c.cluster],
            batch=p.batch,
            minor=0 if c.minor == "m" else 1,
            strip=c.strip,
        )

    @property
    def steps(self) -> int:
        """Steps along K of one tile."""
        c = self.config
        return plgpu.cdiv(plgpu.cdiv(self.problem.k, c.tile_k), c.parts)

    def for_each_tile(self, visit: Any) -> None:
        """Calls `visit(batch, row, column, steps before it)` for a block's tiles."""
        c = self.config

        def at(batch, mi, ni, number):
            visit(batch, mi * c.block_m, ni * c.tile_n, number * self.steps)

        self.tiles.for_each(at)

    def is_inside(self, row: Any, column: Any) -> Any:
        """Returns whether a part begins within the result; None if all parts do."""
        p, (m, n) = self.problem, self.tiles.cluster_tile
        conditions = []
        if p.m % m:
            conditions.append(row < p.m)
        if p.n % n:
            conditions.append(column < p.n)
        return functools.reduce(lax.bitwise_and, conditions) if conditions else None


@dataclasses.dataclass(frozen=True)
class Memory:
    """The references of a block."""

    a: Any
    b: Any
    out: Any
    operands: plgpu.Ring
    out_smem: Any
    gate: Any = None
    bias: Any = None
    residual: Any = None
    residual_smem: Any = None
    residual_full: Any = None


def produce(schedule: Schedule, mem: Memory, batch, row, column, first_step) -> None:
    """Copies the operands of a tile, step by step."""
    p, c = schedule.problem, schedule.config
    parts = np.int32(c.parts)
    share_a, share_b = (("pair",) if c.cluster == d else () for d in ("n", "m"))
    factors = [(mem.a, p.shared_a, share_a), (mem.b, p.shared_b, share_b)]
    if mem.gate is not None:
        factors.append((mem.gate, p.shared_b, share_b))
    rows, columns = plgpu.ds(row, c.block_m), plgpu.ds(column, c.tile_n)
    start = 0
    if c.parts > 1:
        batch, part = lax.div(batch, parts), lax.rem(batch, parts)
        start = part * schedule.steps

    @plgpu.loop(0, schedule.steps)
    def _(ki):
        slot = mem.operands.fill(first_step + ki)
        depth = plgpu.ds((start + ki) * c.tile_k, c.tile_k)
        of_a = (depth, rows) if p.transpose_a else (rows, depth)
        of_b = (columns, depth) if p.transpose_b else (depth, columns)
        for (source, shared, axes), window, buffer in zip(
            factors, (of_a, of_b, of_b), slot.buffers, strict=False
        ):
            plgpu.copy_gmem_to_smem(
                source.at[(0 if shared else batch, *window)],
                buffer,
                slot.full,
                collective_axes=axes,
                # Tiles of a cluster may lie outside as a whole.
                oob_mode=_ZEROS,
            )


@dataclasses.dataclass(frozen=True)
class Consumer:
    """What one consumer warpgroup does."""

    schedule: Schedule
    mem: Memory
    wg: Any

    def visit(self, batch, row, column, first_step) -> None:
        """Computes and stores its rows of a tile."""
        c, p = self.schedule.config, self.schedule.problem
        row = row + self.wg * c.tile_m
        for part in range(min(2, len(self.parts))):
            self.prefetch_residual(part, batch, row, column)
        # Integers are summed as integers.
        dtype = jnp.int32 if p.dtype == jnp.int8 else jnp.float32
        acc = plgpu.ACC((c.tile_m, c.tile_n), dtype)
        products = plgpu.run_scoped(
            functools.partial(self.accumulate, first_step),
            *[acc] * (1 + p.epilogue.gated),
        )
        self.store(products, batch, row, column)

    def accumulate(self, first_step, *accumulators) -> list[Any]:
        """Returns the product of its rows with B, and with the gate."""
        p, c = self.schedule.problem, self.schedule.config
        if p.turns_a:
            return [self.accumulate_turned(first_step, *accumulators)]
        own_rows = plgpu.ds(self.wg * c.tile_m, c.tile_m)

        def multiply(_, slot):
            a, *right = slot.buffers
            a = a.at[:, own_rows].T if p.transpose_a else a.at[own_rows]
            for acc, b in zip(accumulators, right, strict=True):
                plgpu.wgmma(acc, a, b.T if p.transpose_b else b)

        return self.mem.operands.accumulate(
            accumulators, self.schedule.steps, multiply, first=first_step
        )

    def accumulate_turned(self, first_step, acc) -> Any:
        """Returns the product where the tensor core cannot read A as it is stored.

        It is transposed on the way to registers. The next step's rows are loaded while
        the tensor core multiplies; only then may instructions write its operand, else
        ptxas serialises them.
        """
        ring, c = self.mem.operands, self.schedule.config
        own = plgpu.ds(self.wg * c.tile_m, c.tile_m)

        def load(step):
            a, _ = ring.take(step).buffers
            rows = a.at[:, own].T
            return plgpu.load(rows, layout=plgpu.Layout.WGMMA_32BIT, optimized=False)

        def multiply(step, rows):
            _, b = ring.slot(step).buffers
            plgpu.wgmma(acc, rows, b.T)

        last = first_step + self.schedule.steps - 1

        @plgpu.loop(first_step, last, init_carry=as_tf32(load(first_step)))
        def final(step, rows):
            multiply(step, rows)
            following = lax.optimization_barrier(load(step + 1))
            plgpu.wgmma_wait(0)
            ring.release(step)
            return as_tf32(lax.optimization_barrier(following))

        multiply(last, final)
        product = acc[...]
        ring.release(last)
        return product

    @property
    def parts(self) -> list[tuple[int, int]]:
        """Where the parts of a tile begin that are stored at once."""
        c = self.schedule.config
        return [
            (i, j)
            for i in range(0, c.tile_m, c.epilogue_m)
            for j in range(0, c.tile_n, c.epilogue_n)
        ]

    def window(self, part: int, batch, row, column) -> tuple[Any, Any]:
        """Returns the index of a part in the result, and whether it begins inside."""
        c, (i, j) = self.schedule.config, self.parts[part]
        rows = plgpu.ds(row + i, c.epilogue_m)
        columns = plgpu.ds(column + j, c.epilogue_n)
        return (batch, rows, columns), self.schedule.is_inside(row + i, column + j)

    def prefetch_residual(self, part: int, batch, row, column) -> None:
        """Starts the copy of the residual of a part, whose buffer has been read."""
        mem = self.mem
        if mem.residual is None:
            return
        index, _ = self.window(part, batch, row, column)
        plgpu.copy_gmem_to_smem(
            mem.residual.at[index],
            mem.residual_smem.at[self.wg, part % 2],
            mem.residual_full.at[self.wg * 2 + part % 2],
            oob_mode=_ZEROS,
        )

    def load_residual(self, part: int) -> Any:
        if self.mem.residual is None:
            return None
        plgpu.barrier_wait(self.mem.residual_full.at[self.wg * 2 + part % 2])
        return self.stored(self.mem.residual_smem.at[self.wg, part % 2])[...]

    def stored(self, part: Any) -> Any:
        """Returns the reference to a part in SMEM as the accumulator has it."""
        return part

    def load_bias(self, row: Any, column: Any) -> Any:
        """Returns the bias of the part that begins there."""
        del row
        return load_columns(self.mem.bias, column, self.schedule.config.epilogue_n)

    def store(self, products, batch, row, column) -> None:
        """Stores a tile part by part; the copies overlap with what comes after."""
        c, mem = self.schedule.config, self.mem
        epilogue = self.schedule.problem.epilogue
        store = plgpu.TileStore(mem.out_smem.at[self.wg], len(self.parts))
        for part, (i, j) in enumerate(self.parts):
            tiles = [x[i : i + c.epilogue_m, j : j + c.epilogue_n] for x in products]
            bias = None
            if mem.bias is not None:
                bias = self.load_bias(row + i, column + j)
            if not epilogue.is_identity:
                product, gate = tiles if epilogue.gated else (tiles[0], None)
                residual = self.load_residual(part)
                tiles = [
                    epilogue.apply(product, bias=bias, gate=gate, residual=residual)
                ]
            index, is_inside = self.window(part, batch, row, column)
            store.store(
                part,
                tiles[0],
                mem.out.at[index],
                predicate=is_inside,
                transposed=c.transposed,
            )
            if part + 2 < len(self.parts):
                # All threads have read its buffer before `commit_smem`.
                self.prefetch_residual(part + 2, batch, row, column)


@dataclasses.dataclass(frozen=True)
class TransposedConsumer(Consumer):
    """A consumer whose accumulator is a part of the transposed result."""

    def window(self, part: int, batch, row, column) -> tuple[Any, Any]:
        """Returns the index of a part in the result, and whether it begins inside."""
        (batch, rows, columns), is_inside = super().window(part, batch, row, column)
        return (batch, columns, rows), is_inside

    def stored(self, part: Any) -> Any:
        """Returns the reference to a part in SMEM as the accumulator has it."""
        return part.T

    def load_bias(self, row: Any, column: Any) -> Any:
        """Returns the bias of the part that begins there."""
        del column
        c = self.schedule.config
        rows = load_columns(
            self.mem.bias, row, c.epilogue_m, layout=plgpu.Layout.WGMMA_ROW
        )
        return lax.broadcast_in_dim(rows, (c.epilogue_m, c.epilogue_n), (0,))
