# SPDX-License-Identifier: Apache-2.0
"""The marks of a profiled kernel."""

from __future__ import annotations

import math
from typing import Any

from jaxlib.mlir import ir

from pallas_gpu.emitters.debug.profiler import Recorder
from pallas_gpu.emitters.elements import arith
from pallas_gpu.emitters.module import KernelBuilder
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.references import Reference
from pallas_gpu.lowering.rules import emits
from pallas_gpu.primitives.profiler import (
    profile_mark_p,
    profile_start_p,
    profile_stop_p,
)


@emits(profile_start_p, traces=None)
def _start(ctx: RuleContext, traces: Reference, *, recording: Any, names: Any) -> None:
    builder = ctx.builder
    buffer = builder.buffers[traces.handle.buffer_index]
    ctx.kernel.recorder = Recorder(recording, buffer, _number(builder), names)


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
def _mark(ctx: RuleContext, *, tag: int) -> None:
    ctx.kernel.recorder.mark(tag)


@emits(profile_stop_p, traces=None)
def _stop(ctx: RuleContext, *_: Any) -> None:
    ctx.kernel.recorder.stop()
