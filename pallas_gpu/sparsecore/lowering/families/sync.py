# SPDX-License-Identifier: Apache-2.0
"""Semaphores, the barrier of a core's subcores, fetch-and-add."""

from __future__ import annotations

from typing import Any

from jaxlib.mosaic.python import tpu

from pallas_gpu.sparsecore.emitters import memory
from pallas_gpu.sparsecore.emitters.values import I32, Array, i32, index
from pallas_gpu.sparsecore.lowering.state import emits
from pallas_gpu.sparsecore.primitives import sync


@emits(sync.semaphore_signal_p)
def _signal(ctx: Any, semaphore: Any, inc: Any, core: Any, subcore: Any) -> None:
    if core is not None or subcore is not None:
        own = [Array((), I32, (x,)) for x in ctx.kernel.module.positions]
        core = core or own[0]
        subcore = subcore or (own[1] if len(own) > 1 else None)
    tpu.sem_signal(
        memory.view(semaphore),
        inc.value,
        core_id=None if core is None else core.value,
        subcore_id=None if subcore is None else subcore.value,
    )


@emits(sync.semaphore_wait_p)
def _wait(ctx: Any, semaphore: Any, value: Any) -> None:
    tpu.sem_wait(memory.view(semaphore), value.value)


@emits(sync.semaphore_read_p)
def _read(ctx: Any, semaphore: Any) -> Array:
    return Array((), I32, (tpu.sem_read(memory.view(semaphore)),))


@emits(sync.subcore_barrier_p)
def _barrier(ctx: Any, *_: Any) -> None:
    tpu.barrier(index(0))


@emits(sync.fetch_and_add_p)
def _fetch_and_add(ctx: Any, ref: Any, value: Any, subcore: Any) -> Array:
    # The operand that MLIR calls core_id names a subcore of the core.
    before = tpu.fetch_and_add_sync(
        ref.handle.memref,
        [i32(x) for x in ref.window.starts],
        value.value,
        subcore.value,
    )
    return Array((), I32, (before,))
