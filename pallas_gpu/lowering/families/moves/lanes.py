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
from pallas_gpu.lowering.inference.collect import Node, Slot
from pallas_gpu.lowering.rules import emits_and_relates
from pallas_gpu.primitives.moves.lanes import KINDS, PRIMITIVES


def _layout(shape: tuple[int, ...], threads: int) -> LinearLayout:
    return divided_layout(tuple(shape), len(shape) - 1, 1, threads)


def _make(name: str) -> Any:
    def rule(on: RuleContext | Node, *invals: Any) -> Any:
        slots = [slot for slot in ("x", "lane") if slot in on.op.operands]
        operands, (aval,) = on.named(slots, invals), on.op.results
        x = operands[0]
        layout = made = _layout(x.shape, threads_of(on))
        if not KINDS[name].of_lanes and aval.shape:
            made = layout.reduce(len(x.shape) - 1)
        given = zip(operands, slots, strict=True)
        arrays = [in_layout(on, x, slot, layout, "lanes") for x, slot in given]
        if isinstance(on, Node):
            if not aval.shape:
                return on.scalar(aval)
            return on.make(on.variable(aval, "lanes", fixed=made), aval)
        params = {k: v for k, v in on.eqn.params.items() if k != "tree"}
        values = [
            lanes.EMITTERS[name](value, x.dtype, *others, **params)
            for value, *others in zip(*(a.values for a in arrays), strict=True)
        ]
        dtype = np.dtype(aval.dtype)
        if not aval.shape:
            return regs.Splat(dtypes.extract(values[0], 0), dtype, ())
        return on.result(regs.RegisterArray(tuple(values), made, dtype), 0)

    return rule


def threads_of(on: RuleContext | Node) -> int:
    """Returns how many threads execute an operation: of a warpgroup or a warp."""
    if isinstance(on, Node):
        return WARP_LANES if on.network.in_warp else THREADS
    return on.builder.issuer_threads


def in_layout(
    on: RuleContext | Node, x: Any, slot: Slot, layout: LinearLayout, role: str
) -> Any:
    """Returns an operand in a layout that the operation requires."""
    if isinstance(on, Node):
        if x.shape:
            on.take(x, on.variable(x, role, fixed=layout), slot)
        return x
    if vals.is_scalar(x):
        x = vals.as_shape(x, layout.shape)
    x = on.operand(x, slot)
    if isinstance(x, regs.Deferred):
        x = agreement.in_layout(on.kernel, x, layout, repeats_chosen=True)
    if isinstance(x, regs.Deferred):
        return x.materialize(layout)
    return scratch.relayouted(on.kernel, x, layout)


for _name, _primitive in PRIMITIVES.items():
    emits_and_relates(_primitive)(_make(_name))
