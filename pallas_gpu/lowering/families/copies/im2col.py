# SPDX-License-Identifier: Apache-2.0
"""Copies of one pixel of each of some windows."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

from pallas_gpu.emitters.copies import im2col
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.families.copies import cp_async
from pallas_gpu.lowering.families.mbarrier import predicate_value
from pallas_gpu.lowering.references import i32
from pallas_gpu.lowering.rules import emits, relates, used
from pallas_gpu.primitives.copies import im2col as primitives


def _scalars(ctx: RuleContext, values: Any) -> list[ir.Value]:
    found = map(i32, values)
    return [ctx.builder.i32(x) if isinstance(x, int) else x for x in found]


@emits(primitives.copy_im2col_p)
def _copy(ctx: RuleContext, *invals: Any) -> list[Any]:
    operands = ctx.operands(invals)
    pointer = cp_async.barrier_of(ctx, operands["barrier"])
    assert pointer is not None
    im2col.load(
        ctx.eqn.params["windows"],
        ctx.view(operands["src"]),
        ctx.view(operands["dst"]),
        pointer,
        _scalars(ctx, operands["start"]),
        _scalars(ctx, operands["offsets"]),
        predicate_value(operands["predicate"]),
    )
    return []


relates(primitives.copy_im2col_p)(lambda node, *_: used(node, dst="im2col"))
