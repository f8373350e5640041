# SPDX-License-Identifier: Apache-2.0
"""Copies of one pixel of each of some windows."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

from pallas_gpu.emitters.copies import im2col
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.references import i32, index_value
from pallas_gpu.lowering.rules import emits
from pallas_gpu.primitives.copies import im2col as primitives


def _scalars(ctx: RuleContext, values: Any) -> list[ir.Value]:
    return [ctx.builder.i32(i32(index_value(x))) for x in values]


@emits(primitives.copy_im2col_p, dst="im2col")
def _copy(
    ctx: RuleContext, src, dst, barrier, start, offsets, predicate, *, windows
) -> None:
    im2col.load(
        windows,
        ctx.view(src),
        ctx.view(dst),
        ctx.view(barrier),
        _scalars(ctx, start),
        _scalars(ctx, offsets),
        ctx.argument(predicate),
    )
