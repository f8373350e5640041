# SPDX-License-Identifier: Apache-2.0
"""The marks of a profiled kernel."""

from __future__ import annotations

from typing import Any

from pallas_gpu.emitters.debug.profiler import Recorder
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.inference.collect import Node
from pallas_gpu.lowering.rules import emits, relates
from pallas_gpu.primitives.profiler import (
    profile_mark_p,
    profile_start_p,
    profile_stop_p,
)


@emits(profile_start_p)
def _start(ctx: RuleContext, *invals: Any) -> list[Any]:
    kernel, builder = ctx.kernel, ctx.builder
    index = ctx.operands(invals)["traces"].handle.buffer_index
    kernel.recorder = Recorder(
        ctx.op.params["recording"],
        kernel.plan.profiler_offset_bytes,
        # Batch axes come first, as in the number of a block.
        builder.buffers[index],
        builder.threads.block_id[0],
        ctx.op.params["names"],
    )
    return []


@emits(profile_mark_p)
def _mark(ctx: RuleContext) -> list[Any]:
    ctx.kernel.recorder.mark(ctx.op.params["tag"])
    return []


@emits(profile_stop_p)
def _stop(ctx: RuleContext, *_: Any) -> list[Any]:
    ctx.kernel.recorder.stop()
    return []


@relates(profile_start_p, profile_stop_p)
def _relate(node: Node, *_: Any) -> list[Any]:
    return []
