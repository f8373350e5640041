# SPDX-License-Identifier: Apache-2.0
"""A matrix product for Blackwell: persistent, warp-specialised, tcgen05.

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
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import arch, errors, expect
from pallas_gpu.ops.rules import Positive, Strip, cached
from pallas_gpu.ops.tiles import tiles

TARGET = arch.SM_100A.name

# The warpgroups of a block, and the warps of the first one. With dynamic scheduling the
# first one multiplies, and the third one loads.
_ISSUERS, _EPILOGUE, _LOADER = 0, 1, 2
_TMA_WARP, _MMA_WARP = 0, 1
# The axis of the blocks that share a tile; the first one multiplies.
PAIR = "pair"
_ACCUMULATORS = 2
_BLOCK_M = 128


class Pairs:
    """What configurations of blocks that may share a tile have in common."""

    collective: bool
    blocks: int

    @property
    def ctas(self) -> int:
        """Blocks that share a tile."""
        return 2 if self.collective else 1

    def require_blocks(self) -> None:
        """Raises ArgumentError unless there is a block, or a pair."""
        if self.blocks < self.ctas:
            name = type(self).__name__
            raise errors.ArgumentError(
                f"{name}: there are no blocks",
                expected=f"{self.ctas} or more blocks",
                got=f"blocks={self.blocks}",
                hint=f"start from {name}()",
            )


@expect.arguments()
@dataclasses.dataclass(frozen=True)
class BlackwellMatmulConfig(Pairs):
    """Tile sizes and schedule of `matmul` on Blackwell; a block has 128 rows of a tile.

    Attributes:
      tile_n: columns of a tile.
      tile_k: depth of one step.
      stages: SMEM buffers of the ring.
      epilogue_n: columns that are stored at once; None: 128 bytes of the result.
      collective: whether two blocks share a tile of 256 rows. Each then needs SMEM for
        half of the columns of B, which leaves space for more stages.
      minor: dimension of the output that the order of tiles cuts into strips.
      strip: width of a strip in tiles.
      blocks: number of blocks; one per SM.
      dynamic: whether blocks take the next tile when they are free, by cluster launch
        control, instead of every `blocks`-th one. Then the roles are warpgroups.

    Raises:
      ArgumentError: sizes that do not match each other or the tensor core.
    """

    tile_n: int = 256
    tile_k: int = 64
    stages: Positive = 4
    epilogue_n: int | None = None
    collective: bool = False
    minor: Literal["m", "n"] = "m"
    strip: Strip = 8
    blocks: int = arch.SM_100A.sm_count
    dynamic: bool = False

    def __post_init__(self):
        n, k = self.tile_n, self.tile_k
        # Both accumulators share the 512 columns of TMEM. K is 16 per instruction, and
        # the swizzle of B's rows needs N in multiples of 16.
        step_n = 16 * self.ctas
        if not step_n <= n <= 256 or n % step_n or k < 16 or k % 16:
            raise errors.ArgumentError(
                "BlackwellMatmulConfig: the tensor core does not support this tile",
                expected=f"tile_n a multiple of {step_n} up to 256, tile_k of 16",
                got=f"tile_n={n}, tile_k={k}",
                hint="start from BlackwellMatmulConfig()",
            )
        part = self.epilogue_n
        if part is not None and (part < 16 or part % 16 or n % part):
            raise errors.ArgumentError(
                "BlackwellMatmulConfig: the epilogue's parts do not divide the tile",
                expected=f"a multiple of 16 that divides {n}",
                got=f"epilogue_n={part}",
                hint="None suits most tiles",
            )
        self.require_blocks()

    @property
    def step(self) -> tuple[int, int, int]:
        """Of what M, N and K must be multiples: a tile, and a step."""
        return _BLOCK_M * self.ctas, self.tile_n, self.tile_k

    def part_n(self, out_dtype: Any) -> int:
        """Columns that the epilogue stores at once."""
        if self.epilogue_n is not None:
            return self.epilogue_n
        return math.gcd(self.tile_n, 128 // jnp.dtype(out_dtype).itemsize)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Which tiles a block computes, and in which order.

    Attributes:
      m, n, k: sizes; the last tiles may reach over the edge.
      step: a tile, and the depth of a step.
      config: blocks of a tile, and the order of tiles, see `BlackwellMatmulConfig`.
      accumulators: in TMEM.
      part_n: columns that the epilogue stores at once.
      shared_n: columns that both accumulators have: the last ones of the first, which
        are the first ones of the second. The epilogue reads them first.
    """

    m: int
    n: int
    k: int
    step: tuple[int, int, int]
    config: Any
    accumulators: int
    part_n: int
    shared_n: int = 0

    @property
    def tile_n(self) -> int:
        """Columns of a tile."""
        return self.step[1]

    @property
    def tiles(self) -> plgpu.TileSchedule:
        """The tiles, and their order."""
        c, (tile_m, tile_n, _) = self.config, self.step
        minor = 0 if c.minor == "m" else 1
        return plgpu.TileSchedule(
            (self.m, self.n), (tile_m, tile_n), minor=minor, strip=c.strip
        )

    @property
    def steps(self) -> int:
        """Steps along K of one tile."""
        return plgpu.cdiv(self.k, self.step[2])

    @property
    def launch(self) -> dict[str, Any]:
        """The grid, cluster and warpgroups of the launch."""
        c, tiles = self.config, self.tiles
        clusters = tiles.clusters(c.blocks // c.ctas)
        options = {
            "grid": (tiles.count if c.dynamic else clusters,),
            "grid_names": ("worker",),
            "num_threads": 3 if c.dynamic else 2,
            "thread_name": "wg",
        }
        if c.ctas > 1:
            options |= {"cluster": (c.ctas,), "cluster_names": (PAIR,)}
        return options

    def tile(self, info: Any) -> tuple[Any, Any, Any]:
        """Returns the rows and columns of a tile, and its number in this cluster."""
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

        @plgpu.when(wg == _EPILOGUE)
        def _():
            plgpu.wait_smem_to_gmem(0)

    def _run_apart(self, wg, load, multiply, store, first) -> None:
        """Each role has its own loop; two of them are warps of a warpgroup."""

        def for_each_tile(visit):
            @plgpu.nd_loop((self.tiles.count,), collective_axes="worker")
            def _(info):
                visit(*self.tile(info))

        @plgpu.when(wg == _ISSUERS)
        def _():
            @plgpu.warp_map
            def _(warp):
                @plgpu.when(warp == _TMA_WARP)
                def _():
                    for_each_tile(load)

                @plgpu.when(jnp.logical_and(warp == _MMA_WARP, first))
                def _():
                    for_each_tile(multiply)

        @plgpu.when(wg == _EPILOGUE)
        def _():
            for_each_tile(store)

    def _run_together(self, wg, load, multiply, store, first) -> None:
        """The roles are warpgroups: only these learn which tile is next."""
        cluster = self.launch.get("cluster_names", ())

        @plgpu.dynamic_scheduling_loop("worker", thread_axis="wg", cluster_axes=cluster)
        def _(info):
            tile = self.tile(info)

            @plgpu.when(jnp.logical_and(wg == _ISSUERS, first))
            def _():
                multiply(*tile)

            @plgpu.when(wg == _EPILOGUE)
            def _():
                store(*tile)

            # The last warpgroup requests the next tile, which it needs first.
            @plgpu.when(wg == _LOADER)
            def _():
                load(*tile)

    def for_each_step(self, number: Any, visit: Any) -> None:
        """Calls `visit(ki, step)` for the steps along K of a tile.

        `step` counts the steps of all tiles of the block.
        """
        first = number * self.steps
        plgpu.loop(0, self.steps)(lambda ki: visit(ki, first + ki))

    def accumulator(self, acc: Any, number: Any) -> tuple[Any, Any]:
        """Returns the part of TMEM, and its index, for a tile of the block."""
        which = lax.rem(number, np.int32(self.accumulators))
        start = which * (self.tile_n - self.shared_n)
        return acc.at[:, plgpu.ds(start, self.tile_n)], which

    @property
    def tmem_columns(self) -> int:
        """Columns of TMEM of all accumulators."""
        return self.accumulators * self.tile_n - self.shared_n

    @property
    def reads(self) -> int:
        """Barriers that say what has been read: of each accumulator, or of the shared
        columns."""
        return 1 if self.shared_n else self.accumulators

    def wait_for_accumulator(self, read: Any, number: Any) -> None:
        """Waits until the columns of a tile's accumulator have been read."""
        # Whoever has read the shared columns of a tile has read all of the one before.
        earlier = 1 if self.shared_n else self.accumulators

        @plgpu.when(number >= earlier)
        def _():
            plgpu.barrier_wait(read.at[lax.rem(number, np.int32(self.reads))])

    def parts(self, which: Any) -> list[tuple[Any, bool]]:
        """The first columns of the parts of a tile, as the epilogue reads them.

        And whether the columns for which the next product waits have been read then.
        """
        starts = range(0, self.tile_n, self.part_n)
        if not self.shared_n:
            return [(start, start == starts[-1]) for start in starts]
        own_n = self.tile_n - self.shared_n
        # The shared columns are the last ones of the first accumulator.
        shared, own = (1 - which) * own_n, which * self.shared_n
        first = range(0, self.shared_n, self.part_n)
        rest = range(0, own_n, self.part_n)
        return [
            *((shared + start, start == first[-1]) for start in first),
            *((own + start, False) for start in rest),
        ]

    def starts_inside(self, row: Any, column: Any) -> Any:
        """Whether a part has elements of the result; None if all have."""
        rows, columns = self.tiles.extent
        if rows - self.m < _BLOCK_M and columns - self.n < self.part_n:
            return None
        return jnp.logical_and(row < self.m, column < self.n)


@cached
def make_kernel(
    m, n, k, dtype, out_dtype, config: BlackwellMatmulConfig, compiler_params, interpret
):
    """Returns the kernel for a problem that the tiles divide."""
    c = config
    part_n = c.part_n(out_dtype)
    schedule = Schedule(m, n, k, c.step, c, _ACCUMULATORS, part_n)

    def windows(rows, columns):
        def at(ki):
            depth = plgpu.ds(ki * c.tile_k, c.tile_k)
            return [(0, (rows, depth)), (1, (depth, columns))]

        return at

    def multiply(ki, tile, slot, axis):
        left, right = slot.buffers
        plgpu.tcgen05_mma(
            tile, left, right, slot.empty, accumulate=ki > 0, collective_axis=axis
        )

    return launch(
        schedule,
        [
            tiles((c.stages, _BLOCK_M, c.tile_k), dtype),
            tiles((c.stages, c.tile_k, c.tile_n // c.ctas), dtype),
        ],
        jnp.dtype(out_dtype),
        windows,
        multiply,
        shares=[plgpu.CopyPartition.PARTITIONED(axis) for axis in range(2)],
        kernel_name="matmul",
        compiler_params=compiler_params,
        interpret=interpret,
    )


def launch(
    schedule: Schedule,
    buffers: list[Any],
    out_dtype: jnp.dtype,
    windows: Any,
    multiply: Any,
    *,
    shares: list[Any],
    oob_mode: Any = None,
    scratch: Mapping[str, Any] = types.MappingProxyType({}),
    compiler_params: plgpu.CompilerParams | None,
    **options: Any,
) -> Any:
    """Returns a kernel: a function of the sources of its copies, and of any factor.

    Args:
      schedule: the tiles.
      buffers: the ring's buffers, one for each source.
      out_dtype: of the result.
      windows: `windows(rows, columns)` returns a function of a step of the tile, which
        returns the position of the buffer, and the window, for each source.
      multiply: `multiply(ki, tile, slot, axis, **scratch)` issues the products
        of a step, and releases its slot.
      shares: for each source, what each block of a pair loads. The first one's barrier
        counts.
      oob_mode: of the copies.
      scratch: declarations of what only `multiply` uses.
      compiler_params, **options: of `plgpu.kernel`.
    """
    collective = schedule.config.ctas > 1
    axis = PAIR if collective else None

    def load(sources, operands):
        def visit_tile(rows, columns, number):
            windows_at = windows(rows, columns)

            def visit_step(ki, step):
                slot = operands.fill(step)
                copies = zip(sources, windows_at(ki), shares, strict=True)
                for source, (i, window), share in copies:
                    plgpu.copy_gmem_to_smem(
                        source.at[window],
                        slot.buffers[i],
                        slot.full,
                        collective_axes=axis,
                        leader_tracked=share if collective else None,
                        oob_mode=oob_mode,
                    )

            schedule.for_each_step(number, visit_step)

        return visit_tile

    def multiplies(operands, acc, computed, read, memory):
        def visit_tile(rows, columns, number):
            tile, which = schedule.accumulator(acc, number)
            schedule.wait_for_accumulator(read, number)
            schedule.for_each_step(
                number,
                lambda ki, step: multiply(
                    ki, tile, operands.take(step), axis, **memory
                ),
            )
            plgpu.tcgen05_commit_arrive(computed.at[which], collective_axis=axis)

        return visit_tile

    def body(*refs, operands, out_smem, acc, computed, read, **memory):
        *sources, out = refs
        factor = sources.pop() if len(sources) > len(buffers) else None
        schedule.run(
            load(sources, operands),
            multiplies(operands, acc, computed, read, memory),
            _stores(schedule, out, out_smem, acc, computed, read, factor),
        )

    params = compiler_params or plgpu.CompilerParams()
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((schedule.m, schedule.n), out_dtype),
        **schedule.launch,
        compiler_params=dataclasses.replace(params, target=TARGET),
        scratch_types={**scratch, **_scratch(schedule, buffers, out_dtype)},
        **options,
    )


def _scratch(schedule: Schedule, buffers: list[Any], out_dtype: jnp.dtype) -> Any:
    collective = schedule.config.ctas > 1
    ring = plgpu.Ring.of(buffers)
    done = functools.partial(plgpu.Barrier, orders_tensor_core=True)
    read: Any = done(num_barriers=schedule.reads)
    if collective:
        # Both blocks must have read their rows.
        read = plgpu.ClusterBarrier(
            collective_axes=PAIR,
            num_barriers=schedule.reads,
            orders_tensor_core=True,
            leader_tracked=True,
        )
    acc_shape = _BLOCK_M, schedule.tmem_columns
    return {
        "operands": dataclasses.replace(ring, empty=done(num_barriers=ring.stages)),
        "out_smem": tiles((2, _BLOCK_M, schedule.part_n), out_dtype),
        "acc": plgpu.TMEM(acc_shape, jnp.float32, collective=collective),
        "computed": done(num_barriers=schedule.accumulators),
        "read": read,
    }


def _stores(schedule: Schedule, out, buffers, acc, computed, read, scale=None) -> Any:
    """Returns what stores a tile part by part; the copies overlap with what follows.

    Args:
      scale: reference to a factor of the result.
    """
    width = schedule.part_n
    store = plgpu.TileStore(buffers, schedule.tile_n // width)

    def visit_tile(rows, columns, number):
        tile, which = schedule.accumulator(acc, number)
        first = rows.start
        if schedule.config.ctas > 1:
            first += lax.axis_index(PAIR) * _BLOCK_M
        own = plgpu.ds(first, _BLOCK_M)
        plgpu.barrier_wait(computed.at[which])
        for part, (start, is_free) in enumerate(schedule.parts(which)):
            value = plgpu.async_load_tmem(tile.at[:, plgpu.ds(start, width)])
            if is_free:
                # The accumulator is free before this part is stored.
                plgpu.wait_load_tmem()
                plgpu.barrier_arrive(read.at[lax.rem(number, np.int32(schedule.reads))])
            column = columns.start + start
            store.store(
                part,
                value if scale is None else value * scale[0],
                out.at[own, plgpu.ds(column, width)],
                predicate=schedule.starts_inside(first, column),
            )

    return visit_tile
