# SPDX-License-Identifier: Apache-2.0
"""A matrix product for Blackwell: one block a tile, or a pair of blocks.

A warp copies, another one multiplies with tcgen05; then the warpgroup stores the tile
from tensor memory. The blocks of a pair load half of each operand's tile, and the first
one multiplies for both.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, nvvm

from tests.support.mosaic_level import Steps

X, Y = gpu.Dimension.x, gpu.Dimension.y
SWIZZLE = 128
TILE_M = 128


@dataclasses.dataclass(frozen=True)
class Matmul(Steps):
    """The sizes of a product of float16.

    Attributes:
      mgpu: the module with the names of the Mosaic level.
      m, n, k: sizes of the matrices, multiples of the tiles.
      pair: whether pairs of blocks multiply.
      tile_n: columns of a tile.
      stages: tiles of A and B in flight.
    """

    mgpu: ModuleType
    m: int
    n: int
    k: int
    pair: bool = False
    tile_n: int = 256
    stages: int = 4

    tile_k = SWIZZLE // 2
    tile = (8, SWIZZLE // 2)

    @property
    def blocks(self) -> int:
        """Blocks that compute a tile."""
        return 2 if self.pair else 1

    @property
    def stored_n(self) -> int:
        """Columns that are stored at a time."""
        return min(self.tile_n, 64)

    def kernel(self) -> Any:
        """Returns the function of A (m, k) and B (k, n)."""
        mgpu, f16, struct = self.mgpu, jnp.float16, jax.ShapeDtypeStruct
        tiles = lambda *shape: mgpu.tile_shape(shape, self.tile)  # noqa: E731
        scratch = (
            struct((self.stages, *tiles(TILE_M, self.tile_k)), f16),
            struct((self.stages, *tiles(self.tile_k, self.tile_n // self.blocks)), f16),
            struct(tiles(TILE_M, self.stored_n), f16),
            mgpu.Barrier(2, self.stages),
            mgpu.Barrier(1, self.stages),
            mgpu.Barrier(1),
            mgpu.TMEM((TILE_M, self.tile_n), jnp.float32, collective=self.pair),
        )
        return mgpu.as_gpu_kernel(
            self.body,
            (self.m // TILE_M, self.n // self.tile_n, 1),
            (128, 1, 1),
            (struct((self.m, self.k), f16), struct((self.k, self.n), f16)),
            struct((self.m, self.n), f16),
            scratch,
            cluster=(self.blocks, 1, 1),
            kernel_name="matmul",
        )

    def is_equal(self, a: ir.Value, b: int) -> ir.Value:
        """Returns whether a value is a number."""
        return arith.cmpi(arith.CmpIPredicate.eq, a, self.mgpu.c(b, a.type))

    def body(self, ctx, a, b, c, scratch) -> None:
        """Computes a tile, or the rows of it that are this block's."""
        mgpu, done = self.mgpu, scratch[5]
        warp, alone = mgpu.warp_idx(), mgpu.ThreadSubset.WARP
        multiplies = self.is_equal(warp, 1)
        if self.pair:
            first = self.is_equal(gpu.cluster_block_id(X), 0)
            multiplies = arith.andi(multiplies, first)
        with mgpu.when(self.is_equal(warp, 0)), mgpu.single_thread(alone):
            self.copy(ctx, a, b, scratch)
        with mgpu.when(multiplies), mgpu.single_thread(alone):
            self.multiply(ctx, scratch)
        mgpu.warpgroup_barrier()
        done.wait(orders_tensor_core=True)
        self.store(ctx, c, scratch)
        if self.pair:
            # No block ends while the other one's copies and arrivals reach it.
            nvvm.cluster_arrive(aligned=True)
            nvvm.cluster_wait(aligned=True)

    def copy(self, ctx, a, b, scratch) -> None:
        """Copies the tiles of A and B, in one thread."""
        mgpu = self.mgpu
        a_smem, b_smem, _, full, empty, _, _ = scratch
        rows = TILE_M * self.blocks
        pair = arith.divui(gpu.block_id(X), self.index(self.blocks))
        row = mgpu.ds(arith.muli(pair, self.index(rows)), rows)
        column = arith.muli(gpu.block_id(Y), self.index(self.tile_n))

        def half_of(axis: int) -> dict[str, Any]:
            if not self.pair:
                return {}
            partition = mgpu.CopyPartition.PARTITIONED(axis)
            return {"collective": X, "leader_tracked": partition}

        @mgpu.fori(self.index(self.k // self.tile_k), ())
        def _(step, _):
            slot, odd = self.slot(step)
            empty[slot].wait_parity(arith.xori(odd, mgpu.c(1, odd.type)))
            part = mgpu.ds(arith.muli(step, self.index(self.tile_k)), self.tile_k)
            how = {
                "gmem_transform": mgpu.TileTransform(self.tile), "swizzle": SWIZZLE,
                "barrier": full[slot], "predicate": None,
            }  # fmt: skip
            ctx.async_copy(
                src_ref=a, dst_ref=mgpu.memref_slice(a_smem, slot),
                gmem_slice=(row, part), **how, **half_of(0),
            )  # fmt: skip
            ctx.async_copy(
                src_ref=b, dst_ref=mgpu.memref_slice(b_smem, slot),
                gmem_slice=(part, mgpu.ds(column, self.tile_n)), **how, **half_of(1),
            )  # fmt: skip
            return ()

    def multiply(self, ctx, scratch) -> None:
        """Multiplies, in one thread of the block or of the pair."""
        mgpu, tcgen05 = self.mgpu, self.mgpu.tcgen05
        a_smem, b_smem, _, full, empty, done, sums = scratch

        @mgpu.fori(self.index(self.k // self.tile_k), ())
        def _(step, _):
            slot, odd = self.slot(step)
            full[slot].wait_parity(odd, orders_tensor_core=True)
            adds = arith.cmpi(arith.CmpIPredicate.ne, step, self.index(0))
            tcgen05.mma(
                sums, mgpu.memref_slice(a_smem, slot), mgpu.memref_slice(b_smem, slot),
                a_swizzle=SWIZZLE, b_swizzle=SWIZZLE, accumulate=adds,
                collective=self.pair,
            )  # fmt: skip
            tcgen05.commit_arrive(empty[slot], collective=self.pair, ctx=ctx)
            return ()

        tcgen05.commit_arrive(done, collective=self.pair, ctx=ctx)

    def store(self, ctx, c, scratch) -> None:
        """Stores the tile from tensor memory, some columns at a time."""
        mgpu = self.mgpu
        c_smem, sums = scratch[2], scratch[6]
        row = arith.muli(gpu.block_id(X), self.index(TILE_M))
        column = arith.muli(gpu.block_id(Y), self.index(self.tile_n))
        for first in range(0, self.tile_n, self.stored_n):
            part = sums.slice(slice(None), mgpu.ds(first, self.stored_n)).load()
            made = part.astype(ir.F16Type.get())
            # The copy before has read what is overwritten.
            ctx.await_async_copy(0, await_read_only=True)
            made.store_tiled(c_smem, swizzle=SWIZZLE)
            mgpu.commit_shared()
            start = arith.addi(column, self.index(first))
            ctx.async_copy(
                src_ref=c_smem, dst_ref=c, swizzle=SWIZZLE,
                gmem_slice=(mgpu.ds(row, TILE_M), mgpu.ds(start, self.stored_n)),
                gmem_transform=mgpu.TileTransform(self.tile),
            )  # fmt: skip
        mgpu.tcgen05.wait_load_tmem()
        ctx.await_async_copy(0)
