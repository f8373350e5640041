# SPDX-License-Identifier: Apache-2.0
"""A matrix product for Hopper: persistent, warp-specialised, clustered.

A block has three warpgroups. The last one is the producer: it copies tiles of A and B
into a ring of SMEM buffers by TMA. The other two are consumers: each multiplies its
half of the block's rows on the tensor core and stores its result through SMEM. A `full`
barrier completes when a buffer has been loaded, an `empty` barrier when it may be
overwritten. In a cluster of two blocks that need the same rows
of A (or the same columns of B), each loads one half and multicasts it to both.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import arch, errors, expect
from pallas_gpu.ops.rules import is_axis
from pallas_gpu.ops.tiles import tiles

_CONSUMERS = 2
_PRODUCER = _CONSUMERS
# Registers per thread: (2 * 232 + 40) * 128 threads use 64512 of an SM's 65536.
_PRODUCER_REGISTERS = 40
_CONSUMER_REGISTERS = 232


@expect.arguments(
    tile_m=expect.integer(),
    tile_n=expect.integer(),
    tile_k=expect.integer(),
    stages=expect.integer(),
    epilogue_m=expect.integer(),
    epilogue_n=expect.integer(),
    cluster=expect.anything,
    minor=expect.anything,
    strip=expect.integer(),
    blocks=expect.integer(),
)
@dataclasses.dataclass(frozen=True)
class MatmulConfig:
    """Tile sizes and schedule of `matmul` on Hopper.

    Attributes:
      tile_m: rows of one consumer's tile; a block has twice as many.
      tile_n: columns of a block's tile.
      tile_k: depth of one step.
      stages: SMEM buffers of the ring.
      epilogue_m, epilogue_n: part of a consumer's tile that is stored at once.
      cluster: the dimension along which two blocks form a cluster: `"n"` shares rows of
        A, `"m"` the columns of B, None has no clusters.
      minor: dimension of the output that the order of tiles cuts into strips.
      strip: width of a strip in tiles.
      blocks: number of blocks; one per SM.

    Raises:
      ArgumentError: sizes that do not match each other or the tensor core.
    """

    tile_m: int = 128
    tile_n: int = 128
    tile_k: int = 64
    stages: int = 4
    epilogue_m: int = 64
    epilogue_n: int = 64
    cluster: Literal["m", "n"] | None = "n"
    minor: Literal["m", "n"] = "m"
    strip: int = 8
    blocks: int = arch.SM_90A.sm_count

    def __post_init__(self):
        m, n, k = self.tile_m, self.tile_n, self.tile_k
        # wgmma: M is a multiple of 64, N at most 256, K a multiple of 16 for 16-bit
        # types; TMA's 16-byte rows and the swizzle need N in multiples of 16.
        if m < 1 or m % 64 or not 16 <= n <= 256 or n % 16 or k < 16 or k % 16:
            raise errors.ArgumentError(
                "MatmulConfig: the tensor core does not support this tile",
                expected="tile_m a multiple of 64, tile_n of 16 up to 256, tile_k "
                "of 16",
                got=f"tile_m={m}, tile_n={n}, tile_k={k}",
                hint="start from MatmulConfig()",
            )
        parts = self.epilogue_m, self.epilogue_n
        if min(parts) < 1 or m % parts[0] or n % parts[1] or parts[0] % 64:
            raise errors.ArgumentError(
                "MatmulConfig: the epilogue's parts do not divide the tile",
                expected=f"epilogue_m a multiple of 64 that divides {m}, epilogue_n a "
                f"divisor of {n}",
                got=f"epilogue_m={parts[0]}, epilogue_n={parts[1]}",
                hint="64 and 64 fit most tiles",
            )
        if not (self.cluster is None or is_axis(self.cluster)):
            raise errors.ArgumentError(
                "MatmulConfig: invalid cluster",
                expected="'m', 'n' or None",
                got=repr(self.cluster),
                hint="'n' shares rows of A, 'm' columns of B",
            )
        if not is_axis(self.minor) or self.strip < 1:
            raise errors.ArgumentError(
                "MatmulConfig: invalid order of tiles",
                expected="minor 'm' or 'n' and a positive strip",
                got=f"minor={self.minor!r}, strip={self.strip}",
                hint="strip is a number of tiles, e.g. 8",
            )
        if self.stages < 2:
            # A buffer is released when the product after its own has started.
            raise errors.ArgumentError(
                "MatmulConfig: there are too few stages",
                expected="stages of 2 or more",
                got=self.stages,
                hint="four hide the latency of copies on an H200",
            )
        if self.blocks < self.cluster_size:
            raise errors.ArgumentError(
                "MatmulConfig: there are fewer blocks than in a cluster",
                expected=f"blocks of {self.cluster_size} or more",
                got=self.blocks,
                hint="use one per SM",
            )

    @property
    def block_m(self) -> int:
        """Rows of a block's tile."""
        return _CONSUMERS * self.tile_m

    @property
    def cluster_size(self) -> int:
        """Blocks of a cluster."""
        return 1 if self.cluster is None else 2

    @property
    def step(self) -> tuple[int, int, int]:
        """Of what M, N and K must be multiples."""
        m, n = self.block_m, self.tile_n
        pairs = self.cluster_size
        if self.cluster == "m":
            return m * pairs, n, self.tile_k
        return m, n * pairs, self.tile_k


@functools.lru_cache(maxsize=64)
def make_kernel(
    m, n, k, dtype, out_dtype, config: MatmulConfig, compiler_params, interpret
):
    """Returns the kernel for a problem that the tiles divide."""
    c = config
    epilogue = (_CONSUMERS, 2, c.epilogue_m, c.epilogue_n)
    empty: Any = plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=c.stages)
    if c.cluster is not None:
        # A buffer is empty when the consumers of both blocks have read it.
        empty = plgpu.ClusterBarrier(
            collective_axes="pair", num_arrivals=_CONSUMERS, num_barriers=c.stages
        )
    schedule = _Schedule(m, n, k, c)
    return plgpu.kernel(
        functools.partial(_body, schedule),
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(schedule.clusters,),
        grid_names=("worker",),
        cluster=(c.cluster_size,),
        cluster_names=("pair",),
        num_threads=_CONSUMERS + 1,
        thread_name="wg",
        kernel_name="matmul",
        compiler_params=compiler_params,
        interpret=interpret,
        scratch_types={
            "a_smem": tiles((c.stages, c.block_m, c.tile_k), dtype),
            "b_smem": tiles((c.stages, c.tile_k, c.tile_n), dtype),
            "out_smem": tiles(epilogue, out_dtype),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=c.stages),
            "empty": empty,
        },
    )


@dataclasses.dataclass(frozen=True)
class _Schedule:
    """Which tiles a cluster computes, and in which order."""

    m: int
    n: int
    k: int
    config: MatmulConfig

    @property
    def plane(self) -> tuple[int, int]:
        """Tiles of clusters along M and N."""
        c = self.config
        rows, columns = self.m // c.block_m, self.n // c.tile_n
        if c.cluster == "m":
            return rows // 2, columns
        return rows, columns // c.cluster_size

    @property
    def clusters(self) -> int:
        """Clusters of the launch: no more than there is work for."""
        return min(
            self.config.blocks // self.config.cluster_size, math.prod(self.plane)
        )

    @property
    def steps(self) -> int:
        """Steps along K of one tile."""
        return self.k // self.config.tile_k

    def tile(self, linear: Any) -> tuple[Any, Any]:
        """Returns this block's tile (row, column) for a position of its cluster."""
        c = self.config
        mi, ni = plgpu.planar_snake(
            linear, self.plane, 0 if c.minor == "m" else 1, c.strip
        )
        pair = lax.axis_index("pair")
        if c.cluster == "m":
            mi = mi * 2 + pair
        elif c.cluster == "n":
            ni = ni * 2 + pair
        return mi, ni


def _body(
    schedule: _Schedule, a, b, out, *, a_smem, b_smem, out_smem, full, empty
) -> None:
    wg = lax.axis_index("wg")

    @plgpu.when(wg == _PRODUCER)
    def _():
        plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
        _produce(schedule, a, b, a_smem, b_smem, full, empty)

    @plgpu.when(wg < _CONSUMERS)
    def _():
        plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
        _consume(schedule, wg, out, a_smem, b_smem, out_smem, full, empty)


def _for_each_tile(schedule: _Schedule, visit: Any) -> None:
    @plgpu.nd_loop((math.prod(schedule.plane),), collective_axes="worker")
    def _(info):
        visit(*schedule.tile(info.index[0]), info.local_index * schedule.steps)


def _produce(schedule, a, b, a_smem, b_smem, full, empty) -> None:
    c = schedule.config
    share_a, share_b = (("pair",) if c.cluster == d else () for d in ("n", "m"))

    def visit(mi, ni, first_step):
        rows = plgpu.ds(mi * c.block_m, c.block_m)
        columns = plgpu.ds(ni * c.tile_n, c.tile_n)

        @plgpu.loop(0, schedule.steps)
        def _(ki):
            step = first_step + ki
            slot = lax.rem(step, np.int32(c.stages))

            @plgpu.when(step >= c.stages)
            def _():
                plgpu.barrier_wait(empty.at[slot])

            depth = plgpu.ds(ki * c.tile_k, c.tile_k)
            plgpu.copy_gmem_to_smem(
                a.at[rows, depth],
                a_smem.at[slot],
                full.at[slot],
                collective_axes=share_a,
            )
            plgpu.copy_gmem_to_smem(
                b.at[depth, columns],
                b_smem.at[slot],
                full.at[slot],
                collective_axes=share_b,
            )

    _for_each_tile(schedule, visit)


def _consume(schedule, wg, out, a_smem, b_smem, out_smem, full, empty) -> None:
    c = schedule.config
    own_rows = plgpu.ds(wg * c.tile_m, c.tile_m)

    def visit(mi, ni, first_step):
        def accumulate(acc):
            @plgpu.loop(0, schedule.steps)
            def _(ki):
                step = first_step + ki
                slot = lax.rem(step, np.int32(c.stages))
                plgpu.barrier_wait(full.at[slot])
                plgpu.wgmma(acc, a_smem.at[slot, own_rows], b_smem.at[slot])
                # One product stays under way; the buffer of the one before is free.
                plgpu.wgmma_wait(1)

                @plgpu.when(ki > 0)
                def _():
                    before = lax.rem(step - 1, np.int32(c.stages))
                    plgpu.barrier_arrive(empty.at[before])

            product = acc[...]
            last = lax.rem(first_step + schedule.steps - 1, np.int32(c.stages))
            plgpu.barrier_arrive(empty.at[last])
            return product

        product = plgpu.run_scoped(accumulate, plgpu.ACC((c.tile_m, c.tile_n)))
        row = mi * c.block_m + wg * c.tile_m
        _store(c, product.astype(out.dtype), out, out_smem.at[wg], row, ni * c.tile_n)

    _for_each_tile(schedule, visit)
    plgpu.wait_smem_to_gmem(0)


def _store(c: MatmulConfig, product, out, buffers, row, column) -> None:
    """Stores a tile part by part; the copies overlap with what comes after."""
    parts = [
        (i, j)
        for i in range(0, c.tile_m, c.epilogue_m)
        for j in range(0, c.tile_n, c.epilogue_n)
    ]
    for number, (i, j) in enumerate(parts):
        buffer = buffers.at[number % 2]
        # The copy before the last one has read this buffer; with an odd number of parts
        # a tile begins with the buffer that the tile before has ended with.
        repeated = number == 0 and len(parts) % 2 == 1
        plgpu.wait_smem_to_gmem(0 if repeated else 1, wait_read_only=True)
        buffer[...] = product[i : i + c.epilogue_m, j : j + c.epilogue_n]
        plgpu.commit_smem()
        target = out.at[
            plgpu.ds(row + i, c.epilogue_m), plgpu.ds(column + j, c.epilogue_n)
        ]
        plgpu.copy_smem_to_gmem(buffer, target)
