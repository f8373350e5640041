# SPDX-License-Identifier: Apache-2.0
"""Votes, matches and shuffles: arrays with an element of each row in each lane."""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_gpu.emitters import registers as regs
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.moves import lanes
from pallas_gpu.layouts import LinearLayout
from pallas_gpu.layouts.registers.divided import divided_layout
from pallas_gpu.layouts.registers.linear import THREADS, WARP_LANES
from pallas_gpu.lowering import scratch
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.choice import agreement
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.inference.collect import Node, Slot, Symbol
from pallas_gpu.lowering.rules import emits, relates
from pallas_gpu.primitives.moves.lanes import KINDS, PRIMITIVES


def _layout(shape: tuple[int, ...], threads: int) -> LinearLayout:
    return divided_layout(tuple(shape), len(shape) - 1, 1, threads)


def _make(name: str) -> Any:
    def rule(ctx: RuleContext, *invals: Any) -> Any:
        operands = ctx.operands(invals)
        x = operands["x"]
        layout = _layout(x.shape, ctx.builder.issuer_threads)
        arrays = [
            in_layout(ctx, operands[slot], slot, layout)
            for slot in ("x", "lane")
            if slot in operands
        ]
        params = {k: v for k, v in ctx.eqn.params.items() if k != "tree"}
        values = [
            lanes.EMITTERS[name](value, x.dtype, *others, **params)
            for value, *others in zip(*(a.values for a in arrays), strict=True)
        ]
        dtype = np.dtype(ctx.out_aval.dtype)
        if not KINDS[name].of_lanes:
            if len(x.shape) == 1:
                return regs.Splat(dtypes.extract(values[0], 0), dtype, ())
            layout = layout.reduce(len(x.shape) - 1)
        result = regs.RegisterArray(tuple(values), layout, dtype)
        return ctx.result(result, 0)

    return rule


def in_layout(
    ctx: RuleContext, x: Any, slot: Slot, layout: LinearLayout
) -> regs.RegisterArray:
    """Returns an operand in a layout that the operation requires."""
    if vals.is_scalar(x):
        x = vals.as_shape(x, layout.shape)
    x = ctx.operand(x, slot)
    if isinstance(x, regs.Deferred):
        x = agreement.in_layout(ctx.kernel, x, layout, repeats_chosen=True)
    if isinstance(x, regs.Deferred):
        return x.materialize(layout)
    return scratch.relayouted(ctx.kernel, x, layout)


def _relate(node: Node, *_: Any) -> Symbol:
    operands, (aval,) = node.operands, node.op.results
    x = operands["x"]
    layout = _layout(x.shape, WARP_LANES if node.network.in_warp else THREADS)
    for slot, operand in operands.items():
        if operand.shape:
            node.take(operand, node.variable(operand, "lanes", fixed=layout), slot)
    if not aval.shape:
        return node.scalar(aval)
    made = layout if aval.shape == x.shape else layout.reduce(len(x.shape) - 1)
    return node.make(node.variable(aval, "lanes", fixed=made), aval)


for _name, _primitive in PRIMITIVES.items():
    emits(_primitive)(_make(_name))
    relates(_primitive)(_relate)
