# SPDX-License-Identifier: Apache-2.0
"""Matrix products for Blackwell: persistent, warp-specialised, tcgen05.

A block has two warpgroups. Two warps of the first one work on their own: one copies
tiles of A and B into a ring of SMEM buffers by TMA, the other multiplies them on the
tensor core. The second warpgroup stores the tiles: TMEM, registers, SMEM, TMA. TMEM has
two accumulators, so that one tile is stored while the next one is computed.

With `collective`, two blocks multiply a tile of twice the rows together: each loads its
rows of A and half of the columns of B, one of them issues the products, and each stores
its rows.

Each of the three runs its own loop over the block's tiles (with `dynamic` the three are
warpgroups, and learn in one loop which tile is next); they meet only at barriers:

    barrier    completes when                                  releases
    full       a buffer of the ring has been filled by TMA     the MMA warp
    empty      the products that read the buffer are complete  the TMA warp
    computed   all products of an accumulator are complete     the epilogue
    read       an accumulator has been read to registers       the MMA warp

Two accumulators of 256 columns may share 128 of them (`Schedule.shared_n`): the
epilogue reads these first, and the next product starts while it stores the others.

Scales of blocks along K are in the ring, too: the MMA warp copies those of a step to
TMEM before the product that reads them. Copies and products of a thread are in order,
so that TMEM has one set of scales.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import arch, errors
from pallas_gpu.ops.gemm.config import BLOCK_M
from pallas_gpu.ops.gemm.epilogue import scaled
from pallas_gpu.ops.gemm.problem import Problem
from pallas_gpu.ops.memory import Memory, launch
from pallas_gpu.ops.rules import bits, cached, padded
from pallas_gpu.ops.tiles import starts_inside, tiles

TARGET = arch.SM_100A.name

# The warpgroups of a block, and the warps of the first one. With dynamic scheduling the
# first one multiplies, and the third one loads.
_ISSUERS, _EPILOGUE, _LOADER = 0, 1, 2
_TMA_WARP, _MMA_WARP = 0, 1
# The axis of the blocks that share a tile; the first one multiplies.
PAIR = "pair"
# Scales lie in tiles of `BLOCK_M` rows by four scales, of this shape in memory, which
# take as many columns of TMEM as they have scales.
SCALES = 4
SCALE_TILE = (32, 16)
_COLUMNS = 512
# Bytes of a row of the widest swizzle, and SMEM for barriers and what is aligned.
_ROW_BYTES = 128
_SMALL_BYTES = 2048
_ZEROS = plgpu.OOBFillMode.ZEROS


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Which tiles a block computes, in which order, and with which memory."""

    problem: Problem
    config: Any

    @property
    def tile_k(self) -> int:
        return self.config.tile_k or _ROW_BYTES * 8 // self.bits

    @property
    def bits(self) -> int:
        return bits(self.problem.dtype)

    @property
    def step(self) -> tuple[int, int, int]:
        """A tile, and the depth of a step."""
        return BLOCK_M * self.config.ctas, self.config.tile_n, self.tile_k

    @property
    def tiles(self) -> plgpu.TileSchedule:
        p, c = self.problem, self.config
        minor = 0 if c.minor == "m" else 1
        return plgpu.TileSchedule((p.m, p.n), self.step[:2], minor=minor, strip=c.strip)

    @property
    def steps(self) -> int:
        return plgpu.cdiv(self.problem.k, self.tile_k)

    @property
    def is_whole(self) -> bool:
        """Whether steps and tiles divide what they are of."""
        p, (m, n, k) = self.problem, self.step
        return not (self.groups or p.m % m or p.n % n or p.k % k)

    @property
    def groups(self) -> int:
        """Tiles of scales along K in a step."""
        group = self.problem.group
        return 0 if group is None else self.tile_k // (group * SCALES)

    @property
    def across(self) -> int:
        """Tiles of scales along the columns of a tile."""
        return self.config.tile_n // BLOCK_M

    @property
    def part_n(self) -> int:
        """Columns that the epilogue stores at once."""
        c, itemsize = self.config, self.problem.out_dtype.itemsize
        return c.epilogue_n or math.gcd(c.tile_n, c.part_bytes // itemsize)

    @property
    def accumulators(self) -> int:
        """Accumulators that TMEM has space for beside the scales."""
        return 2 if self._space >= 2 * self.config.tile_n - self.shared_n else 1

    @property
    def shared_n(self) -> int:
        """Columns that both accumulators have: half of 256, or none.

        They are the last ones of the first and the first ones of the second. The
        epilogue reads them first.
        """
        n = self.config.tile_n
        half = n // 2
        return half if 2 * n - half <= self._space < 2 * n else 0

    @property
    def _space(self) -> int:
        """Columns of TMEM beside the scales."""
        return _COLUMNS - (1 + self.across) * self.groups * SCALES

    @property
    def stages(self) -> int:
        if self.config.stages is not None:
            return self.config.stages
        n = self.config.tile_n
        one = (BLOCK_M + n // self.config.ctas) * self.tile_k * self.bits // 8
        one += (BLOCK_M + n) * self.groups * SCALES
        stored = 2 * BLOCK_M * self.config.part_bytes
        free = arch.SM_100A.smem_bytes_per_block - stored - _SMALL_BYTES
        return max(1, min(8, free // one))

    @property
    def axes(self) -> dict[str, Any]:
        c, tiles = self.config, self.tiles
        clusters = tiles.clusters(c.blocks // c.ctas)
        return {
            "grid": {"worker": tiles.count if c.dynamic else clusters},
            "cluster": {PAIR: c.ctas} if c.ctas > 1 else {},
            "warpgroups": 3 if c.dynamic else 2,
        }

    def tile(self, info: Any) -> tuple[Any, Any, Any]:
        tile_m, tile_n, _ = self.step
        _, mi, ni = self.tiles.position(info.index[0])
        rows, columns = plgpu.ds(mi * tile_m, tile_m), plgpu.ds(ni * tile_n, tile_n)
        return rows, columns, info.local_index

    def run(self, load: Any, multiply: Any, store: Any) -> None:
        """Runs the roles: each is called with what `tile` returns, for each tile."""
        wg = lax.axis_index("wg")
        first = True if self.config.ctas == 1 else lax.axis_index(PAIR) == 0
        if self.config.dynamic:
            self._run_together(wg, load, multiply, store, first)
        else:
            self._run_apart(wg, load, multiply, store, first)

        plgpu.when(wg == _EPILOGUE)(lambda: plgpu.wait_smem_to_gmem(0))

    def _run_apart(self, wg, load, multiply, store, first) -> None:
        """Each role has its own loop; two of them are warps of a warpgroup."""

        def for_each_tile(visit):
            @plgpu.nd_loop((self.tiles.count,), collective_axes="worker")
            def _(info):
                visit(*self.tile(info))

        def in_warps(warp):
            plgpu.when(warp == _TMA_WARP)(lambda: for_each_tile(load))
            multiplies = jnp.logical_and(warp == _MMA_WARP, first)
            plgpu.when(multiplies)(lambda: for_each_tile(multiply))

        plgpu.when(wg == _ISSUERS)(lambda: plgpu.warp_map(in_warps))
        plgpu.when(wg == _EPILOGUE)(lambda: for_each_tile(store))

    def _run_together(self, wg, load, multiply, store, first) -> None:
        """The roles are warpgroups: only these learn which tile is next."""
        cluster = tuple(self.axes["cluster"])

        @plgpu.dynamic_scheduling_loop("worker", thread_axis="wg", cluster_axes=cluster)
        def _(info):
            tile = self.tile(info)
            multiplies = jnp.logical_and(wg == _ISSUERS, first)
            plgpu.when(multiplies)(lambda: multiply(*tile))
            plgpu.when(wg == _EPILOGUE)(lambda: store(*tile))
            # The last warpgroup requests the next tile, which it needs first.
            plgpu.when(wg == _LOADER)(lambda: load(*tile))

    def for_each_step(self, number: Any, visit: Any) -> None:
        """Calls `visit(ki, step)` for the steps along K of a tile.

        `step` counts the steps of all tiles of the block.
        """
        first = number * self.steps
        plgpu.loop(0, self.steps)(lambda ki: visit(ki, first + ki))

    def accumulator(self, acc: Any, number: Any) -> tuple[Any, Any]:
        which = lax.rem(number, np.int32(self.accumulators))
        start = which * (self.config.tile_n - self.shared_n)
        return acc.at[:, plgpu.ds(start, self.config.tile_n)], which

    @property
    def tmem_columns(self) -> int:
        return self.accumulators * self.config.tile_n - self.shared_n

    @property
    def reads(self) -> int:
        """Barriers that say what has been read: of each accumulator, or of the shared
        columns."""
        return 1 if self.shared_n else self.accumulators

    def wait_for_accumulator(self, read: Any, number: Any) -> None:
        # Whoever has read the shared columns of a tile has read all of the one before.
        earlier = 1 if self.shared_n else self.accumulators

        @plgpu.when(number >= earlier)
        def _():
            plgpu.barrier_wait(read.at[lax.rem(number, np.int32(self.reads))])

    def parts(self, which: Any) -> list[tuple[Any, bool]]:
        """The first columns of the parts of a tile, as the epilogue reads them.

        And whether the columns for which the next product waits have been read then.
        """
        starts = range(0, self.config.tile_n, self.part_n)
        if not self.shared_n:
            return [(start, start == starts[-1]) for start in starts]
        own_n = self.config.tile_n - self.shared_n
        # The shared columns are the last ones of the first accumulator.
        shared, own = (1 - which) * own_n, which * self.shared_n
        first = range(0, self.shared_n, self.part_n)
        rest = range(0, own_n, self.part_n)
        return [
            *((shared + start, start == first[-1]) for start in first),
            *((own + start, False) for start in rest),
        ]


@cached
def make_kernel(p: Problem) -> Any:
    """Returns a function of A, B and the operands of the epilogue, of any sizes.

    XLA transposes, pads, and applies the epilogue.
    """
    if p.dtype.itemsize != 2:
        raise errors.DTypeError(
            "matmul: this element type is not supported on Blackwell",
            expected="float16 or bfloat16",
            got=p.dtype,
            hint="convert the operands with astype",
        )
    step = Schedule(p, p.config).step
    m, n, k = map(plgpu.align_to, (p.m, p.n, p.k), step)
    # An epilogue reads sums that are not rounded.
    rounded = p.out_dtype if p.epilogue.is_identity else jnp.dtype(jnp.float32)
    options = {x: getattr(p, x) for x in ("config", "compiler_params", "interpret")}
    kernel = tiled_kernel(Problem(m, n, k, p.dtype, rounded, **options))

    def products(a: jax.Array, b: jax.Array) -> jax.Array:
        a = _padded(a, p.transpose_a, (p.m, p.k), (m, k))
        b = _padded(b, p.transpose_b, (p.k, p.n), (k, n))
        if p.batch == 1:
            return kernel(a[0], b[0])[None, : p.m, : p.n]
        a, b = (x[0] if s else x for x, s in ((a, p.shared_a), (b, p.shared_b)))
        axes = (None if p.shared_a else 0, None if p.shared_b else 0)
        return jax.vmap(kernel, axes)(a, b)[:, : p.m, : p.n]

    def run(a: jax.Array, b: jax.Array, *others: jax.Array) -> jax.Array:
        if p.epilogue.gated:
            others = (products(a, others[0]), *others[1:])
        return p.epilogue.of_arrays(products(a, b), p.out_dtype, *others)

    return run


def _padded(
    x: jax.Array, transposed: bool, used: tuple[int, int], sizes: tuple[int, int]
) -> jax.Array:
    x = x.swapaxes(1, 2) if transposed else x
    x = x[:, : used[0], : used[1]]
    return padded(padded(x, sizes[0], 1), sizes[1])


@cached
def tiled_kernel(p: Problem) -> Any:
    """Returns the function of A (M, K), B and `Problem.operands`.

    Scales of blocks, `lhs` and `rhs`, are (rows / 128, scales / 4, 32, 16), for all
    rows and steps of all tiles; the others are as `epilogue.scaled` has them.
    """
    schedule = Schedule(p, p.config)
    params = p.compiler_params or plgpu.CompilerParams()
    p = p.but(compiler_params=dataclasses.replace(params, target=TARGET))
    name = "block_scaled_matmul" if p.group else "scaled_matmul"
    return launch(
        *(p, name if p.operands else "matmul", functools.partial(_body, schedule)),
        ("a", "b", *p.operands),
        jax.ShapeDtypeStruct((p.m, p.n), p.out_dtype),
        _scratch(schedule),
        **schedule.axes,
    )


def _scratch(schedule: Schedule) -> dict[str, Any]:
    p, c, stages = schedule.problem, schedule.config, schedule.stages
    across, groups, tile_k = schedule.across, schedule.groups, schedule.tile_k
    part = c.tile_n // c.ctas
    b_tile = (part, tile_k) if p.transpose_b else (tile_k, part)
    buffers = [
        tiles((stages, *tile), dtype)
        for tile, dtype in zip(((BLOCK_M, tile_k), b_tile), p.types, strict=True)
    ]
    scratch = {}
    if groups:
        for i, (name, rows) in enumerate((("a_scale", 1), ("b_scale", across))):
            shape = stages, rows, groups, *SCALE_TILE
            buffers.insert(2 * i, plgpu.SMEM(shape, p.scale_dtype))
            scratch[name] = plgpu.TMEM(
                (rows * BLOCK_M, groups * SCALES),
                p.scale_dtype,
                layout=plgpu.layouts.TmemLayout.scales(),
                collective=c.collective,
            )
    ring = plgpu.Ring.of(buffers)
    done = functools.partial(plgpu.Barrier, orders_tensor_core=True)
    read: Any = done(num_barriers=schedule.reads)
    if c.collective:
        # Both blocks must have read their rows.
        read = plgpu.ClusterBarrier(
            collective_axes=PAIR,
            num_barriers=schedule.reads,
            orders_tensor_core=True,
            leader_tracked=True,
        )
    acc_shape = BLOCK_M, schedule.tmem_columns
    return scratch | {
        "operands": dataclasses.replace(ring, empty=done(num_barriers=ring.stages)),
        "out_smem": tiles((2, BLOCK_M, schedule.part_n), p.out_dtype),
        "acc": plgpu.TMEM(acc_shape, p.accumulator, collective=c.collective),
        "computed": done(num_barriers=schedule.accumulators),
        "read": read,
    }


def _body(schedule: Schedule, mem: Memory) -> None:
    collective, ring = schedule.config.collective, mem.operands
    axis = PAIR if collective else None
    p, groups, tile_k = schedule.problem, schedule.groups, schedule.tile_k
    loaded = ("a", "b", *(p.operands[:2] if groups else ()))
    scales = {x: mem.get(x) for x in (("a_scale", "b_scale") if groups else ())}
    # What each block of a pair loads; the first copy's barrier counts.
    half, both = plgpu.CopyPartition.PARTITIONED, plgpu.CopyPartition.REPLICATED
    shares = [half(0), half(0 if p.transpose_b else 1), half(0), both]
    order = (1, 3, 0, 2) if groups else (0, 1)
    oob_mode = None if schedule.is_whole else _ZEROS

    def load(rows, columns, number):
        # Tiles of scales: `columns` starts at a multiple of whole ones.
        counts = ((rows, schedule.config.ctas), (columns, schedule.across))
        held = [
            plgpu.ds(lax.div(part.start, BLOCK_M), count)
            for part, count in (counts if groups else ())
        ]

        def visit(ki, step):
            slot = ring.fill(step)
            depth = plgpu.ds(ki * tile_k, tile_k)
            of_b = (columns, depth) if p.transpose_b else (depth, columns)
            along = plgpu.ds(ki * groups, groups) if groups else None
            windows = [(rows, depth), of_b, *((part, along) for part in held)]
            for name, window, i, share in zip(
                loaded, windows, order, shares, strict=False
            ):
                plgpu.copy_gmem_to_smem(
                    mem.get(name).at[window],
                    slot.buffers[i],
                    slot.full,
                    collective_axes=axis,
                    leader_tracked=share if collective else None,
                    oob_mode=oob_mode,
                )

        schedule.for_each_step(number, visit)

    def multiply(rows, columns, number):
        tile, which = schedule.accumulator(mem.acc, number)
        schedule.wait_for_accumulator(mem.read, number)

        def visit(ki, step):
            slot = ring.take(step)
            a, b, *held = (slot.buffers[i] for i in order)
            for buffer, scale in zip(held, scales.values(), strict=True):
                plgpu.async_copy_scales_to_tmem(buffer, scale, collective_axis=axis)
            plgpu.tcgen05_mma(
                tile,
                a,
                b.T if p.transpose_b else b,
                slot.empty,
                **scales,
                accumulate=ki > 0,
                collective_axis=axis,
            )

        schedule.for_each_step(number, visit)
        plgpu.tcgen05_commit_arrive(mem.computed.at[which], collective_axis=axis)

    others = {x: mem.get(x) for x in p.operands if x not in loaded}
    schedule.run(load, multiply, _stores(schedule, mem, others))


def _stores(schedule: Schedule, mem: Memory, others: Mapping[str, Any]) -> Any:
    """Returns what stores a tile part by part; the copies overlap with what follows.

    Args:
      others: references to the scales of the result and to its bias, by names.
    """
    p, tiles, width = schedule.problem, schedule.tiles, schedule.part_n
    store = plgpu.TileStore(mem.out_smem, schedule.config.tile_n // width)

    def visit_tile(rows, columns, number):
        tile, which = schedule.accumulator(mem.acc, number)
        first = rows.start
        if schedule.config.ctas > 1:
            first += lax.axis_index(PAIR) * BLOCK_M
        own = plgpu.ds(first, BLOCK_M)
        plgpu.barrier_wait(mem.computed.at[which])
        for part, (start, is_free) in enumerate(schedule.parts(which)):
            value = plgpu.async_load_tmem(tile.at[:, plgpu.ds(start, width)])
            if is_free:
                # The accumulator is free before this part is stored.
                plgpu.wait_load_tmem()
                of_tile = lax.rem(number, np.int32(schedule.reads))
                plgpu.barrier_arrive(mem.read.at[of_tile])
            column = columns.start + start
            store.store(
                part,
                scaled(value, others, first, column),
                mem.out.at[own, plgpu.ds(column, width)],
                predicate=starts_inside(p, tiles, (BLOCK_M, width), first, column),
            )

    return visit_tile
