# SPDX-License-Identifier: Apache-2.0
"""The marks of a profiled kernel."""

from __future__ import annotations

import math
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_gpu.emitters.debug.profiler import Recorder
from pallas_gpu.emitters.module import KernelBuilder
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
        builder.buffers[index],
        _number(builder),
        ctx.op.params["names"],
    )
    return []


def _number(builder: KernelBuilder) -> ir.Value:
    """Returns the number of the CTA in the launch, x fastest; batch axes come first."""
    number = builder.threads.block_id[2]
    for i in (1, 0):
        size, at = builder.spec.grid[i], builder.threads.block_id[i]
        if math.prod(builder.spec.grid[i + 1 :]) == 1:
            number = at
        elif size > 1:
            number = arith.addi(arith.muli(number, builder.i32(size)), at)
    return number


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
