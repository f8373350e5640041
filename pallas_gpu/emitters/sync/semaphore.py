# SPDX-License-Identifier: Apache-2.0
"""Semaphores: 32-bit counters in GMEM with release and acquire semantics.

One thread accesses a semaphore for its warpgroup, or warp. A barrier before a release
and after an acquire extends both to the other threads: causality order is transitive
(PTX ISA, Memory Consistency Model, Causality order).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_gpu.emitters import addressing, atomics, mbarrier, module
from pallas_gpu.emitters.control import predicated
from pallas_gpu.emitters.devices import multimem
from pallas_gpu.emitters.moves import scratch as scratches

_I32 = np.dtype(np.int32)


@dataclasses.dataclass(frozen=True)
class Signal:
    """An addition to a semaphore.

    Attributes:
      pointer: `!llvm.ptr` of the semaphore.
      inc: i32.
      multicast: whether the pointer is a multimem address: to those of all devices.
    """

    pointer: ir.Value
    inc: ir.Value
    multicast: bool = False


def signal(one: Signal, memory_scope: str) -> None:
    """Adds to a semaphore, after the earlier accesses of the issuer's threads.

    PTX: a barrier of the issuer, then `red.release.{gpu,sys}.global.add.u32`, or
    `multimem.red`. Since: sm_70.

    Args:
      memory_scope: "gpu" or "sys".
    """
    mbarrier.synchronize()
    with predicated(module.current().elected):
        _add(one, "release", memory_scope)


def signal_parallel(signals: Sequence[Signal]) -> None:
    """Adds to several semaphores, after the earlier accesses of the issuer's threads.

    PTX: a barrier of the issuer, `fence.acq_rel.sys`, then
    `red.relaxed.sys.global.add.u32` for each: the one fence before all of them makes
    each a release (PTX ISA, Release and Acquire Patterns). Since: sm_70.

    """
    mbarrier.synchronize()
    with predicated(module.current().elected):
        text = "fence.acq_rel.sys;"
        llvm.inline_asm(None, [], text, "~{memory}", has_side_effects=True)
        for one in signals:
            _add(one, "relaxed", "sys")


def _add(one: Signal, order: str, memory_scope: str) -> None:
    if one.multicast:
        multimem.add(one.pointer, one.inc, order)
        return
    llvm.inline_asm(
        None,
        [one.pointer, one.inc],
        f"red.{order}.{memory_scope}.global.add.u32 [$0], $1;",
        "l,r,~{memory}",
        has_side_effects=True,
    )


def wait(
    pointer: ir.Value, value: ir.Value, memory_scope: str, *, decrement: bool
) -> None:
    """Waits until a semaphore has reached a value, and may subtract it.

    PTX: `ld.acquire.{gpu,sys}.global.s32` in a loop, `atom.acquire.global.cas.b32` to
    subtract, then a barrier of the issuer. Since: sm_70.

    Args:
      pointer: `!llvm.ptr` of the semaphore.
      value: i32, compared as a signed number.
      memory_scope: "gpu" or "sys".
      decrement: whether to subtract `value`, at once with the last comparison.
    """
    # Labels and registers inside braces are local, so copies of the text do not
    # collide. Plain loads poll: a compare-and-swap takes the line of L2 for itself.
    text = (
        "{ .reg .pred again; .reg .b32 seen, left, old;\n"
        f"poll: ld.acquire.{memory_scope}.global.s32 seen, [$0];\n"
        "setp.lt.s32 again, seen, $1;\n"
        "@again bra poll;\n"
    )
    if decrement:
        text += (
            "sub.s32 left, seen, $1;\n"
            f"atom.acquire.{memory_scope}.global.cas.b32 old, [$0], seen, left;\n"
            "setp.ne.s32 again, old, seen;\n"
            "@again bra poll;\n"
        )
    with predicated(module.current().elected):
        llvm.inline_asm(
            None, [pointer, value], text + "}", "l,r,~{memory}", has_side_effects=True
        )
    mbarrier.synchronize()


def read(pointer: ir.Value, room: scratches.SmemScratch | None) -> ir.Value:
    """i32: the value of a semaphore, the same in all threads of the issuer.

    PTX: `ld.acquire.sys.global.s32` by one thread, which hands it to the others: by
    shuffles in a warp, through SMEM in a warpgroup. Since: sm_70.

    Args:
      pointer: `!llvm.ptr` of the semaphore.
      room: scratch of `read_scratch_bytes()`.
    """
    copies = atomics.replicas(None)
    chosen = addressing.thread_bits_clear(copies)
    # The register of the other threads, whose load is predicated off, is zero.
    value = llvm.inline_asm(
        ir.IntegerType.get_signless(32),
        [pointer, chosen, module.current().i32(0)],
        "@$2 ld.acquire.sys.global.s32 $0, [$1];",
        "=r,l,b,0,~{memory}",
        has_side_effects=True,
    )
    (result,) = atomics.shared([value], _I32, copies, room)
    # A warp's shuffles exchange values; its barrier orders its threads' accesses.
    mbarrier.synchronize()
    return result


def read_scratch_bytes() -> int:
    """SMEM with which the warps of the issuer exchange what one thread has read."""
    return atomics.scratch_bytes(None, _I32)
