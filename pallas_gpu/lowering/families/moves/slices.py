# SPDX-License-Identifier: Apache-2.0
"""Slices of arrays in registers: static, with strides, and with dynamic starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_gpu.emitters import elementwise
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.layouts.moves import rearrange as plans
from pallas_gpu.layouts.moves.rearrange import Rearrangement
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.families.moves.rearrange import moved
from pallas_gpu.lowering.inference import relations
from pallas_gpu.lowering.inference.collect import Node, Symbol
from pallas_gpu.lowering.references import index_value
from pallas_gpu.lowering.rules import emits_and_relates


@emits_and_relates("slice")
def _slice(on: RuleContext | Node, x: Any, *, start_indices: Any, strides: Any) -> Any:
    return _part(on, x, start_indices, on.op.results[0], strides)


def _part(
    on: RuleContext | Node,
    x: Any,
    starts: Sequence[int],
    aval: Any,
    steps: Sequence[int] | None = None,
    slot: str = "moved",
) -> Any:
    sizes = tuple(aval.shape)
    if on.is_splat(x):
        return on.splat(x, aval, slot)
    if x.shape == sizes:
        return x
    renames = []
    if all(step == 1 for step in steps or ()):
        renames = [relations.Slice(x.shape, tuple(starts), sizes)]
    plan = plans.part(x.shape, starts, sizes, steps)
    return moved(on, plan, [x], aval, renames=renames, slot=slot)


@emits_and_relates("split")
def _split(on: RuleContext | Node, x: Any) -> list[Any]:
    axis, sizes = on.op.params["axis"], on.op.params["sizes"]
    firsts = np.cumsum([0, *sizes[:-1]]).tolist()
    return [
        _part(on, x, [s * (a == axis) for a in range(len(x.shape))], aval, None, slot)
        for s, aval, slot in zip(
            firsts, on.op.results, map("part {}".format, range(len(sizes))), strict=True
        )
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
        most, given = shape[axis] - sizes[axis], indices[axis]
        is_symbol = isinstance(given, Symbol)
        known = given.known if is_symbol else index_value(given)
        if isinstance(known, int | np.integer):
            firsts[axis] += sign * min(max(int(known), 0), most)
            continue
        kept.append(axis)
        if not is_symbol:
            start = vals.scalar_value(_clamped(known, most))
            if sign < 0:
                start = arith.subi(dtypes.constant(0, dtypes.I32), start)
            values.append(start)
    fixed = dataclasses.replace(plan, firsts=tuple(firsts), dynamic=tuple(kept))
    return fixed, values


def _clamped(index: Any, most: int) -> Any:
    """i32: an index between 0 and a number."""
    if index.dtype.itemsize < dtypes.I32.itemsize:
        index = elementwise.astype(index, dtypes.I32)
    low, high = (elementwise.scalar(n, index.dtype) for n in (0, most))
    return elementwise.astype(elementwise.apply("clamp", low, index, high), dtypes.I32)


@emits_and_relates("dynamic_slice")
def _dynamic_slice(on: RuleContext | Node, x: Any, *indices: Any) -> Any:
    (aval,) = on.op.results
    if on.is_splat(x):
        return on.splat(x, aval)
    plan = plans.dynamic_part(x.shape, aval.shape)
    plan, starts = _starts(plan, x.shape, aval.shape, indices, -1)
    if not plan.dynamic:
        return _part(on, x, [-first for first in plan.firsts], aval)
    return moved(on, plan, [x], aval, starts=starts)


@emits_and_relates("dynamic_update_slice")
def _update(on: RuleContext | Node, x: Any, part: Any, *indices: Any) -> Any:
    plan = plans.update(x.shape, part.shape)
    if not plan.dynamic:
        return part
    plan, starts = _starts(plan, x.shape, part.shape, indices, 1)
    return moved(on, plan, [part], on.op.results[0], starts=starts, other=x)
