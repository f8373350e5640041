# SPDX-License-Identifier: Apache-2.0
"""A persistent matrix product for Hopper: two blocks of a cluster share a tile of B.

A warpgroup copies, two multiply: each has half of the rows of the block's tile. The
blocks of a cluster have tiles below each other, so each loads half of the columns' tile
and multicasts it.
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

X = gpu.Dimension.x
MULTIPLYING = 2
SWIZZLE = 128
# Registers of a thread that copies, and of one that multiplies.
FEW_REGISTERS, MANY_REGISTERS = 40, 232


@dataclasses.dataclass(frozen=True)
class Matmul(Steps):
    """The sizes of a product.

    Attributes:
      mgpu: the module with the names of the Mosaic level.
      m, n, k: sizes of the matrices, multiples of a cluster's tile.
      dtype: of A, B and the result.
      tile_n: columns of a tile; its rows are 128.
      stages: tiles of A and B in flight.
      blocks: of the launch, an even number.
    """

    mgpu: ModuleType
    m: int
    n: int
    k: int
    dtype: Any = jnp.float16
    tile_n: int = 256
    stages: int = 4
    blocks: int = 132

    tile_m = 128
    rows = tile_m // MULTIPLYING

    @property
    def tile_k(self) -> int:
        """Elements of a swizzled row."""
        return SWIZZLE // jnp.dtype(self.dtype).itemsize

    @property
    def steps(self) -> int:
        """Products of a tile."""
        return self.k // self.tile_k

    @property
    def stored_n(self) -> int:
        """Columns that are stored at a time."""
        return min(self.tile_n, 128)

    def kernel(self) -> Any:
        """Returns the function of A (m, k) and B (k, n)."""
        mgpu, struct = self.mgpu, jax.ShapeDtypeStruct
        tiles = lambda *shape: mgpu.tile_shape(shape, (8, self.tile_k))  # noqa: E731
        scratch = (
            struct((self.stages, *tiles(self.tile_m, self.tile_k)), self.dtype),
            struct((self.stages, *tiles(self.tile_k, self.tile_n)), self.dtype),
            struct((MULTIPLYING, *tiles(self.rows, self.stored_n)), self.dtype),
            mgpu.Barrier(1, self.stages),
            mgpu.ClusterBarrier((X,), MULTIPLYING, self.stages),
        )
        return mgpu.as_gpu_kernel(
            self.body,
            (self.blocks, 1, 1),
            (128 * (MULTIPLYING + 1), 1, 1),
            (
                struct((self.m, self.k), self.dtype),
                struct((self.k, self.n), self.dtype),
            ),
            struct((self.m, self.n), self.dtype),
            scratch,
            cluster=(2, 1, 1),
            kernel_name="matmul",
        )

    # --- positions --------------------------------------------------------------------

    def tiles(self) -> ir.Value:
        """Returns how many tiles this block computes."""
        total = (self.m // (2 * self.tile_m)) * (self.n // self.tile_n)
        clusters = self.blocks // 2
        behind = arith.subi(self.index(total + clusters - 1), self.cluster())
        return arith.divui(behind, self.index(clusters))

    def cluster(self) -> ir.Value:
        """Returns the number of this block's cluster."""
        return arith.divui(gpu.block_id(X), self.index(2))

    def corner(self, i: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Returns the row and the column in which the i-th tile starts."""
        stride = arith.muli(i, self.index(self.blocks // 2))
        number = arith.addi(self.cluster(), stride)
        down = self.index(self.m // (2 * self.tile_m))
        pair, column = arith.remui(number, down), arith.divui(number, down)
        row = arith.addi(arith.muli(pair, self.index(2)), gpu.cluster_block_id(X))
        return (
            arith.muli(row, self.index(self.tile_m)),
            arith.muli(column, self.index(self.tile_n)),
        )

    # --- the body ---------------------------------------------------------------------

    def body(self, ctx, a, b, c, scratch) -> None:
        """Multiplies: the last warpgroup copies."""
        mgpu = self.mgpu
        warpgroup = mgpu.warpgroup_idx()
        i32 = ir.IntegerType.get_signless(32)
        last = mgpu.c(MULTIPLYING, i32)
        copies = arith.cmpi(arith.CmpIPredicate.eq, warpgroup, last)
        multiplies = arith.cmpi(arith.CmpIPredicate.ne, warpgroup, last)
        action = nvvm.SetMaxRegisterAction
        with mgpu.when(copies):
            nvvm.setmaxregister(FEW_REGISTERS, action.decrease)
            with mgpu.single_thread(mgpu.ThreadSubset.WARPGROUP):
                self.copy(ctx, a, b, scratch)
        with mgpu.when(multiplies):
            nvvm.setmaxregister(MANY_REGISTERS, action.increase)
            self.multiply(
                ctx, c, scratch, arith.index_cast(ir.IndexType.get(), warpgroup)
            )
        # No block ends while the other one arrives on its barriers.
        nvvm.cluster_arrive(aligned=True)
        nvvm.cluster_wait(aligned=True)

    def copy(self, ctx, a, b, scratch) -> None:
        """Copies the tiles of A and B, in one thread."""
        mgpu = self.mgpu
        a_smem, b_smem, _, full, empty = scratch
        tile = mgpu.TileTransform((8, self.tile_k))
        itemsize = jnp.dtype(self.dtype).itemsize
        size = self.tile_k * (self.tile_m + self.tile_n) * itemsize
        steps = self.index(self.steps)

        @mgpu.fori(self.tiles(), ())
        def _(i, _):
            row, column = self.corner(i)

            @mgpu.fori(steps, ())
            def _(k, _):
                slot, odd = self.slot(arith.addi(arith.muli(i, steps), k))
                free = arith.xori(odd, mgpu.c(1, odd.type))
                empty[slot].wait_parity(free)
                full[slot].arrive_expect_tx(size)
                start = arith.muli(k, self.index(self.tile_k))
                part = mgpu.ds(start, self.tile_k)
                shared = {
                    "gmem_transform": tile, "swizzle": SWIZZLE, "barrier": full[slot],
                    "arrive": False, "predicate": None,
                }  # fmt: skip
                ctx.async_copy(
                    src_ref=a, dst_ref=mgpu.memref_slice(a_smem, slot),
                    gmem_slice=(mgpu.ds(row, self.tile_m), part), **shared,
                )  # fmt: skip
                ctx.async_copy(
                    src_ref=b, dst_ref=mgpu.memref_slice(b_smem, slot),
                    gmem_slice=(part, mgpu.ds(column, self.tile_n)), collective=X,
                    **shared,
                )  # fmt: skip
                return ()

            return ()

    def multiply(self, ctx, c, scratch, warpgroup: ir.Value) -> None:
        """Multiplies and stores the rows of a warpgroup."""
        mgpu = self.mgpu
        a_smem, b_smem, c_smem, full, empty = scratch
        steps, one, high = self.index(self.steps), self.index(1), self.rows // 8
        own = mgpu.ds(arith.muli(warpgroup, self.index(high)), high)

        @mgpu.fori(self.tiles(), ())
        def _(i, _):
            row, column = self.corner(i)
            row = arith.addi(row, arith.muli(warpgroup, self.index(self.rows)))
            before = arith.muli(i, steps)

            def release(step: ir.Value) -> None:
                mgpu.warpgroup_barrier()
                empty[self.slot(step)[0]].arrive()

            @mgpu.fori(steps, mgpu.WGMMAAccumulator.zero(self.rows, self.tile_n))
            def products(k, acc):
                step = arith.addi(before, k)
                slot, odd = self.slot(step)
                full[slot].wait_parity(odd)
                left = mgpu.memref_slice(a_smem, (slot, own))
                acc = mgpu.wgmma(acc, left, mgpu.memref_slice(b_smem, slot))
                nvvm.wgmma_commit_group_sync_aligned()
                nvvm.wgmma_wait_group_sync_aligned(1)
                later = arith.CmpIPredicate.ne
                with mgpu.when(arith.cmpi(later, k, self.index(0))):
                    release(arith.subi(step, one))
                return acc

            nvvm.wgmma_wait_group_sync_aligned(0)
            release(arith.subi(arith.addi(before, steps), one))
            made = products.result.value.astype(mgpu_type(self.dtype))
            self.store(ctx, made, c, mgpu.memref_slice(c_smem, warpgroup), row, column)
            return ()

        ctx.await_async_copy(0)

    def store(self, ctx, made, c, c_smem, row: ir.Value, column: ir.Value) -> None:
        """Stores the rows of a warpgroup, some columns at a time."""
        mgpu = self.mgpu
        for first in range(0, self.tile_n, self.stored_n):
            # The copy before has read what is overwritten.
            ctx.await_async_copy(0, await_read_only=True)
            made[:, first : first + self.stored_n].store_tiled(c_smem, swizzle=SWIZZLE)
            mgpu.commit_shared()
            start = arith.addi(column, self.index(first))
            ctx.async_copy(
                src_ref=c_smem, dst_ref=c, swizzle=SWIZZLE,
                gmem_slice=(mgpu.ds(row, self.rows), mgpu.ds(start, self.stored_n)),
                gmem_transform=mgpu.TileTransform((8, self.tile_k)),
            )  # fmt: skip


def mgpu_type(dtype: Any) -> ir.Type:
    """Returns MLIR's type of a dtype."""
    types = {"float16": ir.F16Type, "bfloat16": ir.BF16Type, "float32": ir.F32Type}
    return types[jnp.dtype(dtype).name].get()
