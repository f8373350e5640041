# SPDX-License-Identifier: Apache-2.0
"""Semaphores: addresses in the arrays that the launch adds, signals, waits, reads."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

from pallas_gpu.emitters import elementwise, gmem
from pallas_gpu.emitters.devices import multimem, peers
from pallas_gpu.emitters.sync import semaphore
from pallas_gpu.lowering import scratch
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.inference.collect import Node
from pallas_gpu.lowering.references import I32, Reference
from pallas_gpu.lowering.rules import emits, relates, used
from pallas_gpu.primitives.sync.semaphore import (
    semaphore_read_p,
    semaphore_signal_p,
    semaphore_signal_parallel_p,
    semaphore_wait_p,
)


def _pointer(ctx: RuleContext, ref: Reference) -> ir.Value:
    return gmem.slice_pointer(ctx.view(ref))


@relates(
    semaphore_signal_p, semaphore_signal_parallel_p, semaphore_wait_p, semaphore_read_p
)
def _relate(node: Node, *_: Any) -> list[Any]:
    """They access GMEM, whose layout is given."""
    return used(node)


@emits(semaphore_signal_p)
def _signal(ctx: RuleContext, *invals: Any) -> list[Any]:
    one = _signalled(ctx, ctx.operands(invals, numbers=False))
    _order_aliases(ctx)
    semaphore.signal(one, ctx.eqn.params["memory_scope"])
    return []


def _signalled(ctx: RuleContext, operands: Any) -> semaphore.Signal:
    view = ctx.view(operands["semaphore"])
    inc = vals.scalar_value(operands["inc"])
    return semaphore.Signal(gmem.slice_pointer(view), inc, view.owner == peers.ALL)


def _order_aliases(ctx: RuleContext) -> None:
    """Orders what the issuer has accessed, or will, with multimem addresses of it."""
    if ctx.kernel.traits.multicasts and ctx.builder.spec.devices > 1:
        multimem.fence_alias()


@emits(semaphore_signal_parallel_p)
def _signal_parallel(ctx: RuleContext, *invals: Any) -> list[Any]:
    signals = [_signalled(ctx, x) for x in ctx.operands(invals, numbers=False)]
    _order_aliases(ctx)
    semaphore.signal_parallel(signals)
    return []


@emits(semaphore_wait_p)
def _wait(ctx: RuleContext, *invals: Any) -> list[Any]:
    operands = ctx.operands(invals, numbers=False)
    semaphore.wait(
        _pointer(ctx, operands["semaphore"]),
        vals.scalar_value(operands["value"]),
        ctx.eqn.params["memory_scope"],
        decrement=ctx.eqn.params["decrement"],
    )
    _order_aliases(ctx)
    return []


# --- reads, which exchange a value between warps --------------------------------------


@emits(semaphore_read_p)
def _read(ctx: RuleContext, *invals: Any) -> Any:
    pointer = _pointer(ctx, ctx.operands(invals)["semaphore"])
    needed = semaphore.read_scratch_bytes()
    room = scratch.of_bytes(ctx.kernel, needed, "semaphore_read", "one semaphore")
    value = semaphore.read(pointer, room)
    _order_aliases(ctx)
    return elementwise.scalar(value, I32)
