# SPDX-License-Identifier: Apache-2.0
"""Barriers: mbarriers in SMEM, and the hardware barriers of warps, warpgroups and CTAs.

An mbarrier here counts one arrival per warpgroup, not per thread: after a warpgroup
barrier the elected thread arrives for all. In code that each warp executes on its own,
the same holds for each warp. So an mbarrier is initialized with the number of arrivals
that the kernel states.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, nvvm

from pallas_gpu import errors
from pallas_gpu.emitters import elected, module, operations
from pallas_gpu.emitters.control import predicated
from pallas_gpu.emitters.elements import arith

# The suspend time hint of one try_wait, in ns; the wait loops in any case.
_SUSPEND_HINT_NS = 10_000_000
# The scope of a release or an acquire (PTX ISA, Memory Consistency Model, Scope).
MemoryScope = Literal["cta", "cluster"]
_FULL_MASK = -1
_BYTES = 8
_WARPS = module.WARPGROUP_THREADS // module.WARP_THREADS
# So many one thread initializes: in turns, a kernel with five spilled registers.
_FEW = 6


def synchronize() -> None:
    """Synchronizes the threads of the builder's issuer: a warpgroup or a warp."""
    if module.current().issuer == "warp":
        warp_barrier()
    else:
        warpgroup_barrier()


def warp_barrier() -> None:
    """Waits until all lanes of the warp have arrived.

    PTX: `bar.warp.sync`. Their memory accesses before it are visible to all of them
    after it.
    """
    nvvm.bar_warp_sync(module.current().i32(_FULL_MASK))


def warpgroup_barrier() -> None:
    """Waits until all threads of the warpgroup have arrived.

    PTX: `barrier.sync 1 + warpgroup, 128`. All threads of the warpgroup issue it. Their
    SMEM and GMEM accesses before it are visible to all of them after it. Barrier 0 is
    reserved for the whole block.

    Raises:
      InternalError: a single warp executes the code; the others would never arrive.
    """
    kernel = module.current()
    if kernel.issuer == "warp":
        raise errors.InternalError("a warpgroup barrier in code of a single warp")
    nvvm.barrier(
        barrier_id=_warpgroup_identifier(),
        number_of_threads=kernel.i32(module.WARPGROUP_THREADS),
    )


def _warpgroup_identifier() -> ir.Value:
    """The number of the warpgroup's own barrier."""
    kernel = module.current()

    def identifier() -> ir.Value:
        if kernel.spec.warpgroups == 1:
            return kernel.i32(1)
        return arith.addi(kernel.threads.warpgroup, kernel.i32(1))

    return kernel.hoisted("warpgroup barrier", identifier)


def block_barrier() -> None:
    """Waits until all threads of the block have arrived. PTX: `barrier.sync 0`."""
    nvvm.barrier()


def block_leader() -> ir.Value:
    """i1: true in one thread of the block."""
    kernel = module.current()

    def emit() -> ir.Value:
        if kernel.spec.warpgroups == 1:
            return kernel.threads.elected
        first = arith.cmpi(
            arith.CmpIPredicate.eq, kernel.threads.warpgroup, kernel.i32(0)
        )
        return arith.andi(kernel.threads.elected, first)

    return kernel.hoisted("block leader", emit)


def init(pointer: ir.Value, count: int) -> None:
    """Initializes an mbarrier; one thread of the block issues it.

    PTX: `mbarrier.init.shared.b64`. Since: sm_80. `KernelBuilder.sync_after_init` makes
    it visible to the others.

    Args:
      pointer: `!llvm.ptr<3>`, 8-byte aligned.
      count: number of arrivals that complete a phase.
    """
    kernel = module.current()
    nvvm.mbarrier_init(pointer, kernel.i32(count), predicate=block_leader())


def init_each(offset_bytes: int, counts: Sequence[int]) -> None:
    """Initializes adjacent mbarriers; of many, the warps of the block take turns.

    PTX: `mbarrier.init.shared.b64`. Since: sm_80. All threads of the block issue it.
    One thread takes about 30 ns for each of them (docs/performance.md).

    Args:
      offset_bytes: of the first one from the start of the dynamic SMEM.
      counts: for each, the number of arrivals that complete a phase.
    """
    kernel = module.current()
    threads, warps = kernel.threads, kernel.spec.warpgroups * _WARPS
    if len(counts) <= _FEW:
        for i, count in enumerate(counts):
            init(kernel.smem_pointer(offset_bytes + _BYTES * i), count)
        return
    warp = threads.warp
    if kernel.spec.warpgroups > 1:
        first = arith.muli(threads.warpgroup, kernel.i32(_WARPS))
        warp = arith.addi(first, warp)
    past = arith.muli(warp, kernel.i32(_BYTES))

    def is_before(n: int) -> ir.Value:
        return arith.cmpi(arith.CmpIPredicate.ult, warp, kernel.i32(n))

    for start in range(0, len(counts), warps):
        own = counts[start : start + warps]
        count = kernel.i32(own[-1])
        for i, (one, following) in reversed([*enumerate(itertools.pairwise(own), 1)]):
            if one != following:
                count = arith.select(is_before(i), kernel.i32(one), count)
        predicate = threads.warp_elected
        if len(own) < warps:
            predicate = arith.andi(predicate, is_before(len(own)))
        place = kernel.smem_pointer(offset_bytes + _BYTES * start)
        nvvm.mbarrier_init(operations.offset(place, past), count, predicate=predicate)


def arrive(
    pointer: ir.Value,
    *,
    sync: bool = True,
    orders_tensor_core: bool = False,
    count: int = 1,
) -> None:
    """Arrives once for the warpgroup, or for the warp in code of single warps.

    PTX: `barrier.sync` or `bar.warp.sync`, then
    `mbarrier.arrive.release.cta.shared.b64` by one thread. Since: sm_90. The SMEM
    accesses of all threads of the issuer are ordered before the arrival.

    Args:
      pointer: `!llvm.ptr<3>` of the mbarrier.
      sync: False if the caller has synchronized its threads already.
      orders_tensor_core: see `fence_before_arrival`; needs `sync`.
      count: how many arrivals it counts as.
    """
    if orders_tensor_core:
        fence_before_arrival()
    if sync:
        synchronize()
    # Not a predicate: ptxas moves arithmetic across one, and the loop of attention took
    # 1.05 times as long.
    with predicated(module.current().elected):
        emit_arrive(pointer, count)


def emit_arrive(pointer: ir.Value, count: int = 1) -> None:
    """Emits only the instruction, for code that only the elected thread executes."""
    # nvvm.mbarrier.arrive with an unused result crashes the CUDA plugin of jax 0.11.2
    # during compilation; the sink `_` needs no result.
    text = f"mbarrier.arrive.release.cta.shared::cta.b64 _, [$0]{counted(count)}"
    elected.instruction(text, [pointer], "r")


def counted(count: int) -> str:
    """The operand of an arrival that counts as several; nothing for one."""
    return "" if count == 1 else f", {count}"


def expect_tx(barrier: ir.Value, num_bytes: int) -> None:
    """Adds bytes of asynchronous work to the phase's tx-count, without an arrival.

    PTX: `mbarrier.expect_tx.relaxed.cta.shared::cta.b64` by one thread. Since: sm_90.

    Args:
      barrier: `!llvm.ptr<3>` of the mbarrier.
      num_bytes: below 2**20 (PTX ISA, "Tracking asynchronous operations").
    """
    text = "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [$0], $1"
    with elected.thread() as by:
        elected.instruction(text, [barrier, module.current().i32(num_bytes)], "rr", by)


def fence_before_arrival() -> None:
    """Orders earlier tcgen05 operations of the thread before what it does to signal.

    PTX: `tcgen05.fence::before_thread_sync`. Since: sm_100. All threads issue it, and
    meet before one of them arrives for all.
    """
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC)


def fence_after_wait() -> None:
    """Orders later tcgen05 operations of the thread after what it has waited for.

    PTX: `tcgen05.fence::after_thread_sync`. Since: sm_100. All threads that have waited
    issue it.
    """
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)


def arrive_expect_tx(pointer: ir.Value, num_bytes: int | ir.Value) -> None:
    """Arrives once and adds bytes of asynchronous copies to the phase's tx-count.

    PTX: `mbarrier.arrive.expect_tx.release.cta.shared.b64`. Since: sm_90. One thread
    issues it, before the copies.

    Args:
      pointer: `!llvm.ptr<3>` of the mbarrier.
      num_bytes: below 2**20 (PTX ISA, "Tracking asynchronous operations").
    """
    with elected.thread() as by:
        emit_arrive_expect_tx(pointer, num_bytes, by)


def emit_arrive_expect_tx(
    pointer: ir.Value, num_bytes: int | ir.Value, by: ir.Value | None
) -> None:
    """Emits only the instruction, with the predicate of `elected.thread`."""
    count = module.current().i32(num_bytes)
    text = "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [$0], $1"
    elected.instruction(text, [pointer, count], "rr", by)


def wait(
    pointer: ir.Value, parity: ir.Value, memory_scope: MemoryScope | None = None
) -> None:
    """Waits until the phase with the given parity has completed.

    PTX: `mbarrier.try_wait.parity.acquire.{cta,cluster}.shared::cta.b64` in a loop.
    Since: sm_90. Any thread may wait; all threads of a warpgroup do, so that all
    observe the copied data.

    Args:
      pointer: `!llvm.ptr<3>` of the mbarrier.
      parity: i32, 0 for the first phase, then alternating.
      memory_scope: that of the arrivals of blocks of a cluster; None: only this block
        arrives.
    """
    ticks = module.current().i32(_SUSPEND_HINT_NS)
    if memory_scope is None:
        nvvm.mbarrier_try_wait_parity(pointer, parity, ticks)
        return
    # Labels inside braces are local, so copies of the text do not collide.
    text = (
        "{ .reg .pred done;\n"
        f"again: mbarrier.try_wait.parity.acquire.{memory_scope}.shared::cta.b64 "
        "done, [$0], $1, $2;\n"
        "@!done bra again;\n}"
    )
    operands = [pointer, parity, ticks]
    llvm.inline_asm(None, operands, text, "r,r,r,~{memory}", has_side_effects=True)


def test(
    pointer: ir.Value, parity: ir.Value, memory_scope: MemoryScope | None = None
) -> ir.Value:
    """i1: the phase with the given parity has completed; does not wait.

    PTX: `mbarrier.test_wait.parity.acquire.{cta,cluster}.shared::cta.b64`. Since:
    sm_90. The arguments are those of `wait`.
    """
    if memory_scope is None:
        i1 = ir.IntegerType.get_signless(1)
        return nvvm.mbarrier_test_wait(pointer, parity, results=[i1])
    text = (
        "{ .reg .pred done;\n"
        f"mbarrier.test_wait.parity.acquire.{memory_scope}.shared::cta.b64 "
        "done, [$1], $2;\n"
        "selp.u32 $0, 1, 0, done;\n}"
    )
    i32 = ir.IntegerType.get_signless(32)
    operands = [pointer, parity]
    done = llvm.inline_asm(
        i32, operands, text, "=r,r,r,~{memory}", has_side_effects=True
    )
    return arith.cmpi(arith.CmpIPredicate.ne, done, module.current().i32(0))


def agree(holds: ir.Value) -> ir.Value:
    """i1, the same in all threads of the issuer: the predicate holds in all of them.

    PTX: `barrier.cta.red.and.pred` with the barrier of the warpgroup, or
    `vote.sync.all.pred`. Since: sm_70. All threads of the issuer issue it, as a
    barrier.

    Args:
      holds: i1.
    """
    kernel = module.current()
    if kernel.issuer == "warp":
        operands, meet = [], "vote.sync.all.pred all, all, 0xffffffff;"
        constraints = "=r,r"
    else:
        operands = [_warpgroup_identifier()]
        meet = f"barrier.cta.red.and.pred all, $2, {module.WARPGROUP_THREADS}, all;"
        constraints = "=r,r,r,~{memory}"
    i32 = ir.IntegerType.get_signless(32)
    result = llvm.inline_asm(
        i32,
        [arith.extui(i32, holds), *operands],
        "{ .reg .pred all;\n"
        f"setp.ne.u32 all, $1, 0;\n{meet}\nselp.u32 $0, 1, 0, all;\n}}",
        constraints,
        has_side_effects=True,
    )
    return arith.cmpi(arith.CmpIPredicate.ne, result, kernel.i32(0))
