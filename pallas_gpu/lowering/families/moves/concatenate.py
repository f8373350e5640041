# SPDX-License-Identifier: Apache-2.0
"""Concatenations, reversals and padding."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu import errors
from pallas_gpu.emitters import registers as regs
from pallas_gpu.layouts import LinearLayout
from pallas_gpu.layouts.moves import rearrange as plans
from pallas_gpu.layouts.registers.placement import Placement
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.families.moves.rearrange import moved, related_moved
from pallas_gpu.lowering.inference import relations
from pallas_gpu.lowering.inference.collect import Node, Symbol
from pallas_gpu.lowering.rules import emits, relates


@emits("concatenate")
def _concatenate(ctx: RuleContext, *operands: Any, dimension: int) -> Any:
    if len(operands) == 1:
        return operands[0]
    shapes_ = [x.shape for x in operands]
    plan = plans.concatenation(shapes_, dimension)
    if len(set(shapes_)) > 1:
        return moved(ctx, plan, operands)
    first = next((x for x in operands if isinstance(x, regs.RegisterArray)), None)
    if first is not None and ctx.target("moved") is None:
        operands = tuple(_like(x, first.layout) for x in operands)
    starts = _join_starts(shapes_, dimension)
    rename = functools.partial(_joined, starts, ctx.out_aval.shape)
    return moved(ctx, plan, operands, rename=rename)


def _joined(
    starts: Sequence[Sequence[int]],
    shape: tuple[int, ...],
    held: Sequence[regs.RegisterArray],
    target: Placement | None,
) -> regs.RegisterArray | None:
    """The registers of all operands as those of the whole; None if data would move."""
    target = target or relations.repeated(held[0].layout, shape)
    if not isinstance(target, LinearLayout):
        return None
    values: dict[int, ir.Value] = {}
    for x, start in zip(held, starts, strict=True):
        try:
            if target.slice(start, x.shape) != x.layout:
                return None
            chosen = target.slice_registers(start, x.shape)
        except errors.LayoutError:
            return None
        values.update(zip(chosen, x.values, strict=True))
    ordered = tuple(values[r] for r in range(target.num_registers))
    return regs.RegisterArray(ordered, target, held[0].dtype)


@relates("concatenate")
def _relate_concatenate(node: Node, *operands: Symbol, dimension: int) -> Symbol:
    if len(operands) == 1:
        return operands[0]
    (aval,) = node.op.results
    sizes = [x.shape for x in operands]
    renames: list[relations.Relation] = []
    if len(set(sizes)) == 1:
        starts = _join_starts(sizes, dimension)
        renames = [relations.Join(sizes[0], tuple(aval.shape), s) for s in starts]
    return related_moved(node, operands, aval, renames=renames)


def _like(x: regs.Array, layout: Placement) -> regs.Array:
    """A deferred array in a layout, if no data moves."""
    if isinstance(x, regs.Deferred):
        with contextlib.suppress(errors.LayoutError):
            return x.materialize(layout)
    return x


def _join_starts(
    shapes_: Sequence[tuple[int, ...]], axis: int
) -> list[tuple[int, ...]]:
    starts = np.cumsum([0, *(shape[axis] for shape in shapes_[:-1])]).tolist()
    rank = len(shapes_[0])
    return [tuple(start * (a == axis) for a in range(rank)) for start in starts]


@emits("rev")
def _rev(ctx: RuleContext, x: Any, *, dimensions: Any) -> Any:
    if isinstance(x, regs.Splat):
        return x
    return moved(ctx, plans.reversal(x.shape, dimensions), [x])


@relates("rev")
def _relate_rev(node: Node, x: Symbol) -> Symbol:
    if x.deferred == "splat":
        return x
    return related_moved(node, [x], node.op.results[0])


@relates("pad")
def _relate_pad(node: Node, x: Symbol, value: Symbol, *, padding_config: Any) -> Symbol:
    if not x.shape:
        return x
    plan = plans.padding(x.shape, padding_config)
    other = None if plan.is_total else value
    return related_moved(node, [x], node.op.results[0], other=other)


@emits("pad")
def _pad(ctx: RuleContext, x: Any, value: Any, *, padding_config: Any) -> Any:
    if vals.is_scalar(x):
        return x
    plan = plans.padding(x.shape, padding_config)
    other = None if plan.is_total else regs.splat(value.value, x.dtype, plan.shape)
    return moved(ctx, plan, [x], other=other)
