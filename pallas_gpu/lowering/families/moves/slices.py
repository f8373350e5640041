# SPDX-License-Identifier: Apache-2.0
"""Slices of arrays in registers: static, with strides, and with dynamic starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu import errors
from pallas_gpu.emitters import arith, elementwise
from pallas_gpu.emitters import registers as regs
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.layouts.moves import rearrange as plans
from pallas_gpu.layouts.moves.rearrange import Rearrangement
from pallas_gpu.layouts.registers.placement import Placement
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.families.moves.rearrange import moved, related_moved
from pallas_gpu.lowering.inference import relations
from pallas_gpu.lowering.inference.collect import Node, Symbol
from pallas_gpu.lowering.references import index_value
from pallas_gpu.lowering.rules import emits, relates
from pallas_gpu.program.nodes import Constant


@emits("slice")
def _slice(ctx: RuleContext, x: Any, *, start_indices: Any, strides: Any) -> Any:
    return _part(ctx, x, start_indices, ctx.out_aval.shape, strides)


def _part(
    ctx: RuleContext,
    x: Any,
    starts: Sequence[int],
    sizes: tuple[int, ...],
    steps: Sequence[int] | None = None,
    slot: str = "moved",
) -> Any:
    if isinstance(x, regs.Splat):
        return regs.splat(x.value, x.dtype, sizes)
    if x.shape == sizes:
        return x
    plan = plans.part(x.shape, starts, sizes, steps)

    def part(held: Sequence[regs.RegisterArray], target: Placement | None) -> Any:
        """The part, if it consists of registers of the array; else None."""
        try:
            found = regs.static_slice(held[0], starts, sizes)
        except errors.LayoutError:
            return None
        return found if target in (None, getattr(found, "layout", None)) else None

    renames = all(step == 1 for step in steps or ())
    return moved(ctx, plan, [x], rename=part if renames else None, slot=slot)


def _related_part(
    node: Node,
    x: Symbol,
    starts: Sequence[int],
    aval: Any,
    steps: Sequence[int] | None = None,
    slot: str = "moved",
) -> Symbol:
    sizes = tuple(aval.shape)
    if x.deferred == "splat":
        return node.defer("splat", aval, slot)
    if x.shape == sizes:
        return x
    renames = []
    if all(step == 1 for step in steps or ()):
        renames = [relations.Slice(x.shape, tuple(starts), sizes)]
    return related_moved(node, [x], aval, renames=renames, slot=slot)


@relates("slice")
def _relate_slice(node: Node, x: Symbol, *, start_indices: Any, strides: Any) -> Symbol:
    return _related_part(node, x, start_indices, node.op.results[0], strides)


@relates("split")
def _relate_split(node: Node, x: Symbol) -> list[Symbol]:
    return [
        _related_part(node, x, starts, aval, slot=f"part {i}")
        for i, ((starts, _), aval) in enumerate(
            zip(_pieces(node.op.equation), node.op.results, strict=True)
        )
    ]


@emits("split")
def _split(ctx: RuleContext, x: Any) -> list[Any]:
    return [
        _part(ctx, x, *part, slot=f"part {i}")
        for i, part in enumerate(_pieces(ctx.eqn))
    ]


def _pieces(eqn: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The starts and the sizes of the parts."""
    axis, sizes = eqn.params["axis"], eqn.params["sizes"]
    rank = len(eqn.invars[0].aval.shape)
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    return [
        (tuple(start * (a == axis) for a in range(rank)), tuple(v.aval.shape))
        for start, v in zip(starts, eqn.outvars, strict=True)
    ]


# --- dynamic slices -------------------------------------------------------------------


def _starts(
    plan: Rearrangement,
    shape: Sequence[int],
    sizes: Sequence[int],
    indices: Sequence[Any],
    sign: int,
) -> tuple[Rearrangement, list[ir.Value]]:
    """The plan with its static starts, and the values of those that remain.

    As lax does, starts are clamped such that the slice is within bounds.
    """
    values, kept = [], []
    firsts = list(plan.firsts)
    for axis in plan.dynamic:
        most = shape[axis] - sizes[axis]
        known = index_value(indices[axis])
        if isinstance(known, (int, np.integer)):
            firsts[axis] += sign * min(max(int(known), 0), most)
            continue
        start = vals.scalar_value(_clamped(known, most))
        if sign < 0:
            start = arith.subi(dtypes.constant(0, dtypes.I32), start)
        values.append(start)
        kept.append(axis)
    fixed = dataclasses.replace(plan, firsts=tuple(firsts), dynamic=tuple(kept))
    return fixed, values


def _clamped(index: Any, most: int) -> Any:
    """i32: an index between 0 and a number."""
    if index.dtype.itemsize < dtypes.I32.itemsize:
        index = elementwise.astype(index, dtypes.I32)
    low, high = (vals.constant(n, index.dtype) for n in (0, most))
    return elementwise.astype(elementwise.apply("clamp", low, index, high), dtypes.I32)


@emits("dynamic_slice")
def _dynamic_slice(ctx: RuleContext, x: Any, *indices: Any) -> Any:
    sizes = tuple(ctx.out_aval.shape)
    if isinstance(x, regs.Splat):
        return regs.splat(x.value, x.dtype, sizes)
    plan, starts = _starts(
        plans.dynamic_part(x.shape, sizes), x.shape, sizes, indices, -1
    )
    if not starts:
        return _part(ctx, x, [-first for first in plan.firsts], sizes)
    return moved(ctx, plan, [x], starts=starts)


@relates("dynamic_slice")
def _relate_dynamic_slice(node: Node, x: Symbol, *indices: Symbol) -> Symbol:
    (aval,) = node.op.results
    if x.deferred == "splat":
        return node.defer("splat", aval)
    given = node.op.inputs[1:]
    starts = [int(x.value) for x in given if isinstance(x, Constant)]
    if len(starts) == len(given):
        most = [n - size for n, size in zip(x.shape, aval.shape, strict=True)]
        known = [min(max(s, 0), m) for s, m in zip(starts, most, strict=True)]
        return _related_part(node, x, known, aval)
    if x.shape == tuple(aval.shape):
        return x
    return related_moved(node, [x], aval)


@relates("dynamic_update_slice")
def _relate_update(node: Node, x: Symbol, part: Symbol, *indices: Symbol) -> Symbol:
    if not plans.update(x.shape, part.shape).dynamic:
        return part
    return related_moved(node, [part], node.op.results[0], other=x)


@emits("dynamic_update_slice")
def _update(ctx: RuleContext, x: Any, part: Any, *indices: Any) -> Any:
    if not plans.update(x.shape, part.shape).dynamic:
        return part
    plan, starts = _starts(
        plans.update(x.shape, part.shape), x.shape, part.shape, indices, 1
    )
    return moved(ctx, plan, [part], starts=starts, other=x)
