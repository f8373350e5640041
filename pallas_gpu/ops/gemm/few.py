# SPDX-License-Identifier: Apache-2.0
"""A matrix product for Hopper with few rows, or few tiles: K divided among a cluster.

With few rows the time is that of reading the other matrix, W. So a block computes the
tile transposed: columns of W are the rows of the tensor core's product, of which an
instruction has 64, and the rows of X are its columns, of which it has any multiple of
8. The last warpgroup of a block copies tiles of W and X into a ring of SMEM buffers by
TMA; each of the others multiplies its columns of W.

Where the tiles are fewer than the SMs, the blocks of a cluster each take a part of K.
They then store their sums to SMEM, and each adds those of all blocks for its share of
the rows, in a fixed order: results are the same in every run, and no sum goes through
GMEM. Only for one or a few tiles of a long K several clusters divide it further; the
last one then adds the sums of the others from GMEM.

    barrier    completes when                              releases
    full       a buffer of the ring has been loaded        the consumers
    empty      the products that read it are complete      the producer
    written    all blocks of the cluster have stored sums  the sum over the cluster
    read       all blocks of the cluster have added them   the next sums
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import arch, errors, expect
from pallas_gpu.ops.rules import is_axis
from pallas_gpu.ops.tiles import tiles

# Floats between the rows of sums in SMEM: 8 columns of 4 pairs of rows, the elements
# that a warp stores at once, are then in different banks.
_PAD = 4


@expect.arguments(
    tile_m=expect.integer(),
    tile_n=expect.integer(),
    tile_k=expect.integer(),
    stages=expect.integer(),
    warpgroups=expect.integer(),
    split=expect.integer(),
    clusters=expect.integer(),
    pair=expect.anything,
    part_m=expect.optional(expect.integer()),
    blocks=expect.integer(),
)
@dataclasses.dataclass(frozen=True)
class SplitMatmulConfig:
    """Tile sizes and schedule of `matmul` on Hopper for few rows or few tiles.

    Attributes:
      tile_m: rows of a tile, a multiple of 8 up to 256.
      tile_n: columns of a tile, 64 or 128 for each of the warpgroups.
      tile_k: depth of one step.
      stages: SMEM buffers of the ring.
      warpgroups: warpgroups of a block that multiply.
      split: blocks of a cluster that divide K.
      clusters: clusters that divide K among each other.
      pair: what two blocks of a cluster share beside that: "n", the same rows of the
        left operand, for different columns; "m", the same columns of the right one;
        or None. Each loads one half and multicasts it to both.
      part_m: rows that are stored at once; None: up to 64.
      blocks: maximum number of blocks of the launch, which then loop over tiles.

    Raises:
      ArgumentError: sizes that do not match each other or the tensor core.
    """

    tile_m: int = 64
    tile_n: int = 128
    tile_k: int = 64
    stages: int = 4
    warpgroups: int = 2
    split: int = 1
    clusters: int = 1
    pair: Literal["m", "n"] | None = None
    part_m: int | None = None
    blocks: int = 2 * arch.SM_90A.sm_count

    def __post_init__(self):
        m, n, k = self.tile_m, self.tile_n, self.tile_k
        # wgmma: N is a multiple of 8 up to 256, K of 16 for 16-bit types.
        if not 8 <= m <= 256 or m % 8 or k < 16 or k % 16:
            raise errors.ArgumentError(
                "SplitMatmulConfig: the tensor core does not support this tile",
                expected="tile_m a multiple of 8 up to 256, tile_k of 16",
                got=f"tile_m={m}, tile_k={k}",
                hint="start from SplitMatmulConfig()",
            )
        if self.warpgroups < 1 or n not in (
            64 * self.warpgroups,
            128 * self.warpgroups,
        ):
            raise errors.ArgumentError(
                "SplitMatmulConfig: the warpgroups do not divide the columns",
                expected="tile_n of 64 or 128 for each warpgroup",
                got=f"tile_n={n}, warpgroups={self.warpgroups}",
                hint="start from SplitMatmulConfig()",
            )
        if self.split not in (1, 2, 4, 8) or self.cluster_size > 8:
            raise errors.ArgumentError(
                "SplitMatmulConfig: invalid division of K",
                expected="split 1, 2, 4 or 8, with a pair up to 4",
                got=f"split={self.split}, pair={self.pair!r}",
                hint="every GPU can run clusters of up to 8 blocks",
            )
        if not (self.pair is None or is_axis(self.pair)):
            raise errors.ArgumentError(
                "SplitMatmulConfig: invalid pair",
                expected="'m', 'n' or None",
                got=repr(self.pair),
                hint="'n' shares rows of A, 'm' columns of B",
            )
        part = self.part
        if part < 8 or part % 8 or m % part:
            raise errors.ArgumentError(
                "SplitMatmulConfig: the parts do not divide the rows of a tile",
                expected=f"a multiple of 8 that divides {m}",
                got=f"part_m={part}",
                hint="None suits most tiles",
            )
        blocks = self.cluster_size * self.clusters
        if self.stages < 2 or not 1 <= blocks <= self.blocks:
            raise errors.ArgumentError(
                "SplitMatmulConfig: there are too few stages, clusters or blocks",
                expected=f"two or more stages, a cluster or more, {blocks} or more "
                "blocks",
                got=f"stages={self.stages}, clusters={self.clusters}, "
                f"blocks={self.blocks}",
                hint="start from SplitMatmulConfig()",
            )

    @property
    def pair_size(self) -> int:
        """Blocks that share an operand."""
        return 1 if self.pair is None else 2

    @property
    def cluster_size(self) -> int:
        """Blocks of a cluster."""
        return self.split * self.pair_size

    @property
    def part(self) -> int:
        """Rows that are stored at once."""
        return math.gcd(self.tile_m, 64) if self.part_m is None else self.part_m

    @property
    def own_n(self) -> int:
        """Columns of one warpgroup."""
        return self.tile_n // self.warpgroups


@dataclasses.dataclass(frozen=True)
class _Schedule:
    """Which tiles a cluster computes, and which part of K a block."""

    m: int
    n: int
    k: int
    config: SplitMatmulConfig

    @property
    def plane(self) -> tuple[int, int]:
        """Tiles of clusters along M and N; the last ones may exceed the problem."""
        c = self.config
        rows, columns = plgpu.cdiv(self.m, c.tile_m), plgpu.cdiv(self.n, c.tile_n)
        if c.pair == "m":
            return plgpu.cdiv(rows, 2), columns
        return rows, plgpu.cdiv(columns, c.pair_size)

    @property
    def workers(self) -> int:
        """Clusters for each part of K: no more than there are tiles."""
        c = self.config
        most = c.blocks // (c.cluster_size * c.clusters)
        return min(most, math.prod(self.plane))

    @property
    def padded(self) -> tuple[int, int]:
        """Rows and columns of all tiles together."""
        c, (rows, columns) = self.config, self.plane
        pairs = [c.pair_size if c.pair == axis else 1 for axis in ("m", "n")]
        return rows * pairs[0] * c.tile_m, columns * pairs[1] * c.tile_n

    def depth(self) -> tuple[Any, Any]:
        """Returns this block's first step along K, and the number of its steps."""
        c = self.config
        parts = c.split * c.clusters
        every, more = divmod(plgpu.cdiv(self.k, c.tile_k), parts)
        if parts == 1:
            return 0, every
        i = lax.mul(lax.axis_index("part"), np.int32(c.split))
        i = lax.add(i, lax.axis_index("split"))
        if more == 0:
            return lax.mul(i, np.int32(every)), every
        first = lax.add(lax.mul(i, np.int32(every)), lax.min(i, np.int32(more)))
        return first, lax.add(np.int32(every), (i < more).astype(np.int32))

    def for_each_tile(self, visit: Any) -> None:
        """Calls `visit(row, column, first_step)` for the tiles of this block.

        `first_step` counts the steps of all its tiles.
        """
        c = self.config
        steps = self.depth()[1]

        @plgpu.nd_loop((math.prod(self.plane),), collective_axes="worker")
        def _(info):
            # Neighbours share columns of W, which is the larger operand.
            ni, mi = lax.div(info.index[0], np.int32(self.plane[0])), info.index[0]
            mi = lax.rem(mi, np.int32(self.plane[0]))
            if c.pair == "m":
                mi = mi * 2 + lax.axis_index("pair")
            elif c.pair == "n":
                ni = ni * 2 + lax.axis_index("pair")
            visit(mi * c.tile_m, ni * c.tile_n, info.local_index * steps)


@functools.lru_cache(maxsize=256)
def make_kernel(
    m, n, k, transpose_b, dtype, out_dtype, config, compiler_params, interpret
):
    """Returns the kernel of (M, K) @ (K, N), or (N, K) with `transpose_b`."""
    c: SplitMatmulConfig = config
    if c.split * c.clusters > plgpu.cdiv(k, c.tile_k):
        raise errors.ArgumentError(
            "matmul: a block has no part of K",
            expected=f"at most {plgpu.cdiv(k, c.tile_k)} blocks that divide K={k} in "
            f"steps of {c.tile_k}",
            got=f"split={c.split}, clusters={c.clusters}",
            hint="omit config",
        )
    schedule = _Schedule(m, n, k, c)
    w_shape = (c.tile_n, c.tile_k) if transpose_b else (c.tile_k, c.tile_n)
    empty: Any = plgpu.Barrier(
        num_arrivals=c.warpgroups, num_barriers=c.stages, initially_complete=True
    )
    if c.pair is not None:
        # A buffer is empty when the consumers of both blocks have read it.
        empty = plgpu.ClusterBarrier(
            collective_axes="pair",
            num_arrivals=c.warpgroups,
            num_barriers=c.stages,
            initially_complete=True,
        )
    scratch: dict[str, Any] = {
        "x_smem": tiles((c.stages, c.tile_m, c.tile_k), dtype),
        "w_smem": tiles((c.stages, *w_shape), dtype),
        "sums": plgpu.SMEM((c.warpgroups, c.part, c.own_n + _PAD), jnp.float32),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=c.stages),
        "empty": empty,
    }
    for name in ("written", "read") if c.split > 1 else ():
        scratch[name] = plgpu.ClusterBarrier(
            collective_axes="split",
            num_barriers=c.warpgroups,
            initially_complete=name == "read",
        )
    return plgpu.kernel(
        functools.partial(_body, schedule, transpose_b),
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        # The last part waits for those before it: blocks start in this order.
        grid=(c.clusters, schedule.workers),
        grid_names=("part", "worker"),
        cluster=(c.split, c.pair_size),
        cluster_names=("split", "pair"),
        num_threads=c.warpgroups + 1,
        thread_name="wg",
        kernel_name="split_matmul",
        compiler_params=compiler_params,
        interpret=interpret,
        scratch_types=scratch,
    )


def _body(
    schedule, transpose_b, x, w, out, *, x_smem, w_smem, full, empty, **epilogue
) -> None:
    c = schedule.config
    wg = lax.axis_index("wg")

    @plgpu.when(wg == c.warpgroups)
    def _():
        _produce(schedule, transpose_b, x, w, x_smem, w_smem, full, empty)

    @plgpu.when(wg < c.warpgroups)
    def _():
        own = plgpu.ds(wg * c.own_n, c.own_n)

        def columns(slot):
            # (own_n, tile_k), whichever way it is stored.
            return w_smem.at[slot, own] if transpose_b else w_smem.at[slot, :, own].T

        _consume(schedule, wg, out, x_smem, columns, full, empty, **epilogue)


def _produce(schedule, transpose_b, x, w, x_smem, w_smem, full, empty) -> None:
    c = schedule.config
    share_x, share_w = (("pair",) if c.pair == axis else () for axis in ("n", "m"))
    first, steps = schedule.depth()

    def visit(row, column, first_step):
        rows, columns = plgpu.ds(row, c.tile_m), plgpu.ds(column, c.tile_n)

        @plgpu.loop(0, steps)
        def _(ki):
            slot = lax.rem(first_step + ki, np.int32(c.stages))
            plgpu.barrier_wait(empty.at[slot])
            depth = plgpu.ds((first + ki) * c.tile_k, c.tile_k)
            part_of_w = w.at[columns, depth] if transpose_b else w.at[depth, columns]
            for source, buffer, axes in (
                (part_of_w, w_smem, share_w),
                (x.at[rows, depth], x_smem, share_x),
            ):
                # The tile of a pair's second block may lie outside.
                plgpu.copy_gmem_to_smem(
                    source,
                    buffer.at[slot],
                    full.at[slot],
                    collective_axes=axes,
                    oob_mode=plgpu.OOBFillMode.ZEROS,
                )

    schedule.for_each_tile(visit)


def _consume(schedule, wg, out, x_smem, columns, full, empty, **epilogue) -> None:
    c = schedule.config
    steps = schedule.depth()[1]

    def visit(row, column, first_step):
        def accumulate(acc):
            @plgpu.loop(0, steps)
            def _(ki):
                slot = lax.rem(first_step + ki, np.int32(c.stages))
                plgpu.barrier_wait(full.at[slot])
                plgpu.wgmma(acc, columns(slot), x_smem.at[slot].T)
                # One product stays under way; the buffer of the one before is free.
                plgpu.wgmma_wait(1)

                @plgpu.when(ki > 0)
                def _():
                    before = lax.rem(first_step + ki - 1, np.int32(c.stages))
                    plgpu.barrier_arrive(empty.at[before])

            product = acc[...]
            last = lax.rem(first_step + steps - 1, np.int32(c.stages))
            plgpu.barrier_arrive(empty.at[last])
            return product

        product = plgpu.run_scoped(accumulate, plgpu.ACC((c.own_n, c.tile_m)))
        column = column + wg * c.own_n
        for start in range(0, c.tile_m, c.part):
            value = product[:, start : start + c.part]
            _store(schedule, wg, value, out, row + start, column, **epilogue)

    schedule.for_each_tile(visit)


def _store(schedule, wg, product, out, row, column, *, sums, written=None, read=None):
    """Adds the products of the cluster's blocks, and stores a share of the rows."""
    c = schedule.config
    columns = plgpu.ds(0, c.own_n)
    share, first = c.part // c.split, 0
    if c.split > 1:
        first = lax.axis_index("split") * share
        plgpu.barrier_wait(read.at[wg])
    sums.at[wg, :, columns].T[...] = product
    if c.split > 1:
        plgpu.barrier_arrive(written.at[wg])
        plgpu.barrier_wait(written.at[wg])

    @plgpu.when((row + first < schedule.m) & (column < schedule.n))
    def _():
        own = wg, plgpu.ds(first, share), columns
        if c.split == 1:
            total = sums[own]
        else:
            blocks = [plgpu.cluster_ref(sums, {"split": i}) for i in range(c.split)]
            total = functools.reduce(lax.add, [block[own] for block in blocks])
        if c.clusters == 1:
            _store_inside(schedule, total, out, row + first, column)
        else:
            _add_clusters(schedule, total, out, row + first, column)

    if c.split > 1:
        plgpu.barrier_arrive(read.at[wg])


def _add_clusters(schedule, total, out, row, column) -> None:
    """Adds the sums of the clusters that divide K, and stores the result."""
    c = schedule.config
    m, n = schedule.padded
    rows, columns = total.shape
    place = plgpu.ds(row, rows), plgpu.ds(column, columns)
    others = plgpu.get_global(plgpu.GMEM((c.clusters - 1, m, n), jnp.float32))
    stored = plgpu.get_global(plgpu.SemaphoreType.REGULAR((m // rows, n // columns)))
    stored = stored.at[lax.div(row, np.int32(rows)), lax.div(column, np.int32(columns))]
    part = lax.axis_index("part")

    @plgpu.when(part < c.clusters - 1)
    def _():
        others[part, *place] = total
        plgpu.semaphore_signal(stored, memory_scope="gpu")

    @plgpu.when(part == c.clusters - 1)
    def _():
        # The wait leaves zero, for the next launch.
        plgpu.semaphore_wait(stored, c.clusters - 1, memory_scope="gpu")
        before = [others[i, *place] for i in range(c.clusters - 1)]
        _store_inside(
            schedule, functools.reduce(lax.add, [*before, total]), out, row, column
        )


def _store_inside(schedule, total, out, row, column) -> None:
    """Stores what lies inside of the result."""
    value = total.astype(out.dtype)
    rows, columns = value.shape
    place = plgpu.ds(row, rows), plgpu.ds(column, columns)
    if schedule.m % schedule.config.tile_m == 0 and schedule.n % columns == 0:
        out[place] = value
        return
    inside_m = plgpu.broadcasted_iota(jnp.int32, value.shape, 0) < schedule.m - row
    inside_n = plgpu.broadcasted_iota(jnp.int32, value.shape, 1) < schedule.n - column
    plgpu.store(out, place, value, mask=inside_m & inside_n)
