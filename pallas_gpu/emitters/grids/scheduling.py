# SPDX-License-Identifier: Apache-2.0
"""Dynamic scheduling: a counter in GMEM, and its values in the SMEM of a cluster."""

from __future__ import annotations

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

from pallas_gpu.emitters import addressing, cluster, mbarrier, module
from pallas_gpu.emitters.control import predicated
from pallas_gpu.emitters.smem import SmemView, slice_pointer


def claim(counter: ir.Value, first: int, predicate: ir.Value) -> ir.Value:
    """Increments the counter; the elected thread's i32 is its old value plus `first`.

    PTX: `atom.relaxed.gpu.global.add.u32` (PTX ISA, Parallel Synchronization: atom).
    Since: sm_90. The clusters exchange nothing else through the counter, so that no
    other access needs to be ordered with it. The other threads' result is 0.

    Args:
      counter: `!llvm.ptr` of an i32 in GMEM.
      first: the first position that is counted.
      predicate: i1, uniform; False increments nothing.
    """
    kernel = module.current()
    i32 = ir.IntegerType.get_signless(32)
    chosen = arith.andi(kernel.elected, predicate)
    branch = scf.IfOp(chosen, [i32], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        old = llvm.inline_asm(
            i32,
            [counter, kernel.i32(1)],
            "atom.relaxed.gpu.global.add.u32 $0, [$1], $2;",
            "=r,l,r,~{memory}",
            has_side_effects=True,
        )
        scf.yield_([arith.addi(old, kernel.i32(first))])
    with ir.InsertionPoint(branch.else_block):
        scf.yield_([kernel.i32(0)])
    return branch.results[0]


def publish(
    position: ir.Value, dst: SmemView, barrier: ir.Value, predicate: ir.Value
) -> None:
    """Stores an i32 in the SMEM of all blocks of the cluster, and arrives there.

    PTX: `st.shared.b32` and `mbarrier.arrive.release.cta`, or for each block of a
    cluster `st.shared::cluster.b32` and `mbarrier.arrive.release.cluster`. Since:
    sm_90. The elected thread does both, so that its store is ordered before its arrival
    by program order, and before a wait that acquires at the scope of the arrival.

    Args:
      position: i32, in the elected thread.
      dst: one element.
      barrier: `!llvm.ptr<3>` of this block's mbarrier.
      predicate: i1, uniform; False does nothing.
    """
    kernel = module.current()
    pointer = slice_pointer(dst)
    with predicated(arith.andi(kernel.elected, predicate)):
        if not kernel.spec.has_cluster:
            llvm.store(position, pointer)
            mbarrier.emit_arrive(barrier)
            return
        i32 = ir.IntegerType.get_signless(32)
        for rank in range(kernel.spec.cluster[0]):
            block = kernel.i32(rank)
            remote = addressing.map_shared(pointer, block)
            llvm.inline_asm(
                None,
                [llvm.ptrtoint(i32, remote), position],
                "st.shared::cluster.b32 [$0], $1;",
                "r,r,~{memory}",
                has_side_effects=True,
            )
            cluster.emit_arrive_remote(addressing.map_shared(barrier, block))
