# SPDX-License-Identifier: Apache-2.0
"""Semaphores: addresses in the arrays that the launch adds, signals, waits, reads."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

from pallas_gpu.lowering import scratch
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import I32, RuleContext, part_window
from pallas_gpu.lowering.inference.collect import Node
from pallas_gpu.lowering.rules import emits, relates
from pallas_gpu.mosaic import elementwise, gmem
from pallas_gpu.mosaic.sync import semaphore
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives.sync.semaphore import (
    semaphore_read_p,
    semaphore_signal_p,
    semaphore_signal_parallel_p,
    semaphore_wait_p,
)


def _pointer(ctx: RuleContext, operand: Any) -> ir.Value:
    handle = operand.ref
    window = part_window(handle, operand.transforms)
    pointer = ctx.builder.buffers[handle.buffer_index]
    return gmem.slice_pointer(
        gmem.GmemView(pointer, handle.buffer_index, handle.dtype, window)
    )


def _operands(ctx: RuleContext, invals: Any) -> tuple[Any, Any]:
    """Returns the operands with constant indices as numbers, and those with values."""
    values = ops.unflatten(ctx.eqn.params["tree"], list(invals))
    return ctx.operands(invals), values


@relates(
    semaphore_signal_p, semaphore_signal_parallel_p, semaphore_wait_p, semaphore_read_p
)
def _relate(node: Node, *_: Any) -> list[Any]:
    """They access GMEM, whose layout is given."""
    return [node.scalar(x, i) for i, x in enumerate(node.op.results)]


@emits(semaphore_signal_p)
def _signal(ctx: RuleContext, *invals: Any) -> list[Any]:
    indexed, values = _operands(ctx, invals)
    pointer = _pointer(ctx, indexed["semaphore"])
    inc = vals.scalar_value(values["inc"])
    semaphore.signal(pointer, inc, ctx.eqn.params["memory_scope"])
    return []


@emits(semaphore_signal_parallel_p)
def _signal_parallel(ctx: RuleContext, *invals: Any) -> list[Any]:
    signals = [
        (_pointer(ctx, indexed["semaphore"]), vals.scalar_value(values["inc"]))
        for indexed, values in zip(*_operands(ctx, invals), strict=True)
    ]
    semaphore.signal_parallel(signals)
    return []


@emits(semaphore_wait_p)
def _wait(ctx: RuleContext, *invals: Any) -> list[Any]:
    indexed, values = _operands(ctx, invals)
    semaphore.wait(
        _pointer(ctx, indexed["semaphore"]),
        vals.scalar_value(values["value"]),
        ctx.eqn.params["memory_scope"],
        decrement=ctx.eqn.params["decrement"],
    )
    return []


# --- reads, which exchange a value between warps --------------------------------------


def _emit_read(kernel: Any, pointer: ir.Value) -> ir.Value:
    room = scratch.of_bytes(
        kernel, semaphore.read_scratch_bytes(), "semaphore_read", "one semaphore"
    )
    return semaphore.read(pointer, room)


@emits(semaphore_read_p)
def _read(ctx: RuleContext, *invals: Any) -> Any:
    pointer = _pointer(ctx, ctx.operands(invals)["semaphore"])
    return elementwise.scalar(_emit_read(ctx.kernel, pointer), I32)
