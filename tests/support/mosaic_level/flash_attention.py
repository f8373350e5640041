# SPDX-License-Identifier: Apache-2.0
"""Attention for Hopper: two or more warpgroups of queries share the keys and values.

The last warpgroup copies blocks of keys and of values ahead. Each of the others has 64
queries: it multiplies them with the keys, keeps the softmax in registers, and
multiplies the weights, from registers, with the values.
"""

from __future__ import annotations

import dataclasses
import math
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, nvvm

from tests.support.mosaic_level import Steps

X, Y = gpu.Dimension.x, gpu.Dimension.y
SWIZZLE = 128
ROWS = 64
# Registers of a thread that copies, and of one of several warpgroups that multiply.
FEW_REGISTERS, MANY_REGISTERS = 32, {2: 232, 3: 160}


@dataclasses.dataclass(frozen=True)
class Attention(Steps):
    """The sizes of attention, of all heads of a batch.

    Attributes:
      mgpu: the module with the names of the Mosaic level.
      heads, length, head_dim: of queries, keys and values, in float16.
      block_kv: keys of a block.
      stages: blocks in flight.
      multiplying: warpgroups that multiply.
    """

    mgpu: ModuleType
    heads: int
    length: int
    head_dim: int = 128
    block_kv: int = 128
    stages: int = 2
    multiplying: int = 2

    tile = (8, SWIZZLE // 2)

    @property
    def block_q(self) -> int:
        """Queries of a block."""
        return ROWS * self.multiplying

    def kernel(self) -> Any:
        """Returns the function of Q, K and V (heads, length, head_dim)."""
        mgpu, f16 = self.mgpu, jnp.float16
        whole = jax.ShapeDtypeStruct((self.heads, self.length, self.head_dim), f16)

        def tiles(rows: int, *lead: int) -> jax.ShapeDtypeStruct:
            shape = mgpu.tile_shape((rows, self.head_dim), self.tile)
            return jax.ShapeDtypeStruct((*lead, *shape), f16)

        scratch = (
            tiles(ROWS, self.multiplying),
            tiles(self.block_kv, self.stages),
            tiles(self.block_kv, self.stages),
            # Of the queries; of keys and values that have arrived, and that were read.
            mgpu.Barrier(1, self.multiplying),
            [mgpu.Barrier(1, self.stages) for _ in range(2)],
            [mgpu.Barrier(self.multiplying, self.stages) for _ in range(2)],
        )
        return mgpu.as_gpu_kernel(
            self.body,
            (self.length // self.block_q, self.heads, 1),
            (128 * (self.multiplying + 1), 1, 1),
            (whole, whole, whole),
            whole,
            scratch,
            kernel_name="attention",
        )

    def body(self, ctx, q, k, v, o, scratch) -> None:
        """Computes attention of a block of queries: the last warpgroup copies."""
        mgpu, i32 = self.mgpu, ir.IntegerType.get_signless(32)
        warpgroup, last = mgpu.warpgroup_idx(), mgpu.c(self.multiplying, i32)
        equal, unequal = arith.CmpIPredicate.eq, arith.CmpIPredicate.ne
        action = nvvm.SetMaxRegisterAction
        with mgpu.when(arith.cmpi(equal, warpgroup, last)):
            nvvm.setmaxregister(FEW_REGISTERS, action.decrease)
            with mgpu.single_thread(mgpu.ThreadSubset.WARPGROUP):
                self.copy(ctx, q, k, v, scratch)
        with mgpu.when(arith.cmpi(unequal, warpgroup, last)):
            nvvm.setmaxregister(MANY_REGISTERS[self.multiplying], action.increase)
            self.attend(
                ctx, o, scratch, arith.index_cast(ir.IndexType.get(), warpgroup)
            )

    def rows_of(self, warpgroup: ir.Value | int) -> Any:
        """Returns the slice of the queries of a warpgroup."""
        mgpu = self.mgpu
        if isinstance(warpgroup, int):
            warpgroup = self.index(warpgroup)
        first = arith.muli(gpu.block_id(X), self.index(self.block_q))
        start = arith.addi(first, arith.muli(warpgroup, self.index(ROWS)))
        return (gpu.block_id(Y), mgpu.ds(start, ROWS))

    def copy(self, ctx, q, k, v, scratch) -> None:
        """Copies queries, keys and values, in one thread."""
        mgpu = self.mgpu
        q_smem, k_smem, v_smem, q_full, full, empty = scratch
        how = {
            "gmem_transform": mgpu.TileTransform(self.tile), "swizzle": SWIZZLE,
            "predicate": None,
        }  # fmt: skip
        for i in range(self.multiplying):
            ctx.async_copy(
                src_ref=q, dst_ref=mgpu.memref_slice(q_smem, i), barrier=q_full[i],
                gmem_slice=self.rows_of(i), **how,
            )  # fmt: skip

        @mgpu.fori(self.index(self.length // self.block_kv), ())
        def _(step, _):
            slot, odd = self.slot(step)
            start = arith.muli(step, self.index(self.block_kv))
            part = (gpu.block_id(Y), mgpu.ds(start, self.block_kv))
            pairs = ((k, k_smem), (v, v_smem))
            for i, (source, target) in enumerate(pairs):
                empty[i][slot].wait_parity(arith.xori(odd, mgpu.c(1, odd.type)))
                ctx.async_copy(
                    src_ref=source, dst_ref=mgpu.memref_slice(target, slot),
                    barrier=full[i][slot], gmem_slice=part, **how,
                )  # fmt: skip
            return ()

    def attend(self, ctx, o, scratch, warpgroup: ir.Value) -> None:
        """Computes attention of the queries of a warpgroup."""
        mgpu, f16, f32 = self.mgpu, ir.F16Type.get(), ir.F32Type.get()
        q_smem, k_smem, v_smem, q_full, full, empty = scratch
        queries, row = mgpu.memref_slice(q_smem, warpgroup), mgpu.WGMMA_ROW_LAYOUT
        scale = math.log2(math.e) / math.sqrt(self.head_dim)

        def rows(value: float) -> Any:
            return mgpu.FragmentedArray.splat(mgpu.c(value, f32), (ROWS,), row)

        def release(which: int, step: ir.Value) -> None:
            mgpu.warpgroup_barrier()
            chosen = mgpu.single_thread_predicate(mgpu.ThreadSubset.WARPGROUP)
            empty[which][self.slot(step)[0]].arrive(predicate=chosen)

        def complete(groups: int) -> None:
            nvvm.wgmma_commit_group_sync_aligned()
            nvvm.wgmma_wait_group_sync_aligned(groups)

        q_full[warpgroup].wait()
        steps = self.index(self.length // self.block_kv)
        start = (
            mgpu.WGMMAAccumulator.zero(ROWS, self.head_dim), rows(-math.inf), rows(0.0)
        )  # fmt: skip

        @mgpu.fori(steps, start)
        def loop(step, carry):
            sums, maximum, total = carry
            slot, odd = self.slot(step)
            full[0][slot].wait_parity(odd)
            keys = mgpu.memref_transpose(mgpu.memref_slice(k_smem, slot), (1, 0, 3, 2))
            scores = mgpu.WGMMAAccumulator.zero(ROWS, self.block_kv)
            scores = mgpu.wgmma(scores, queries, keys)
            # The product with the values of the step before is complete, too.
            complete(0)
            release(0, step)
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ne, step, self.index(0))):
                release(1, arith.subi(step, self.index(1)))
            scaled = scores.value * scale
            largest = maximum.max(scaled.reduce("max", 1))
            correction = (maximum - largest).exp2(approx=True)
            weights = (scaled - largest.broadcast_minor(self.block_kv)).exp2(
                approx=True
            )
            total = total * correction + weights.reduce("add", 1)
            old = sums.value * correction.broadcast_minor(self.head_dim)
            sums = mgpu.WGMMAAccumulator.from_registers(old)
            full[1][slot].wait_parity(odd)
            sums = mgpu.wgmma(
                sums, weights.astype(f16), mgpu.memref_slice(v_smem, slot)
            )
            nvvm.wgmma_commit_group_sync_aligned()
            return sums, largest, total

        nvvm.wgmma_wait_group_sync_aligned(0)
        sums, _, total = loop.results
        made = (sums.value / total.broadcast_minor(self.head_dim)).astype(f16)
        # The queries are not needed any more.
        made.store_tiled(queries, swizzle=SWIZZLE)
        mgpu.commit_shared()
        ctx.async_copy(
            src_ref=queries, dst_ref=o, swizzle=SWIZZLE,
            gmem_slice=self.rows_of(warpgroup),
            gmem_transform=mgpu.TileTransform(self.tile),
        )  # fmt: skip
        ctx.await_async_copy(0)
