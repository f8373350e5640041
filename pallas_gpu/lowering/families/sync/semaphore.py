# SPDX-License-Identifier: Apache-2.0
"""Semaphores: addresses in the arrays that the launch adds, signals, waits, reads."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

from pallas_gpu.emitters import elementwise, gmem
from pallas_gpu.emitters.devices import multimem, peers
from pallas_gpu.emitters.sync import semaphore as emitter
from pallas_gpu.lowering import scratch
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.references import I32, Reference
from pallas_gpu.lowering.rules import emits
from pallas_gpu.primitives.sync.semaphore import (
    semaphore_read_p,
    semaphore_signal_p,
    semaphore_signal_parallel_p,
    semaphore_wait_p,
)


def _pointer(ctx: RuleContext, ref: Reference) -> ir.Value:
    return gmem.slice_pointer(ctx.view(ref))


@emits(semaphore_signal_p, semaphore=None)
def _signal(ctx: RuleContext, semaphore: Reference, inc: Any, *, memory_scope) -> None:
    one = _signalled(ctx, semaphore, inc)
    _order_aliases(ctx)
    emitter.signal(one, memory_scope)


def _signalled(ctx: RuleContext, semaphore: Reference, inc: Any) -> emitter.Signal:
    view, amount = ctx.view(semaphore), vals.scalar_value(inc)
    return emitter.Signal(gmem.slice_pointer(view), amount, view.owner == peers.ALL)


def _order_aliases(ctx: RuleContext) -> None:
    """Orders what the issuer has accessed, or will, with multimem addresses of it."""
    if ctx.builder.spec.multicasts and ctx.builder.spec.devices > 1:
        multimem.fence_alias()


@emits(semaphore_signal_parallel_p, semaphore=None)
def _signal_parallel(ctx: RuleContext, *invals: Any) -> None:
    signals = [_signalled(ctx, **x) for x in ctx.operands(invals)]
    _order_aliases(ctx)
    emitter.signal_parallel(signals)


@emits(semaphore_wait_p, semaphore=None)
def _wait(
    ctx: RuleContext, semaphore: Reference, value: Any, *, memory_scope, decrement
) -> None:
    pointer, least = _pointer(ctx, semaphore), vals.scalar_value(value)
    emitter.wait(pointer, least, memory_scope, decrement=decrement)
    _order_aliases(ctx)


# --- reads, which exchange a value between warps --------------------------------------


@emits(semaphore_read_p, semaphore=None)
def _read(ctx: RuleContext, semaphore: Reference) -> Any:
    pointer = _pointer(ctx, semaphore)
    needed = emitter.read_scratch_bytes()
    room = scratch.of_bytes(ctx.kernel, needed, "semaphore_read", "one semaphore")
    value = emitter.read(pointer, room)
    _order_aliases(ctx)
    return elementwise.scalar(value, I32)
