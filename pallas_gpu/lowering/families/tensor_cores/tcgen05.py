# SPDX-License-Identifier: Apache-2.0
"""tcgen05: products with an accumulator in TMEM, and their commits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pallas_gpu import errors, types
from pallas_gpu.layouts import TmemLayout
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.families.mbarrier import barrier_pointer
from pallas_gpu.lowering.families.tmem import constrain, packed
from pallas_gpu.lowering.inference.collect import Node, Part
from pallas_gpu.lowering.rules import emits, relates
from pallas_gpu.mosaic.tensor_cores import tcgen05
from pallas_gpu.primitives.tensor_cores import tcgen05 as primitives

_HALF_ROWS, _ROWS = 64, 128


# The attribute that says which operands there are.
@emits(primitives.tcgen05_mma_p)
def _mma(ctx: RuleContext, *invals: Any) -> list[Any]:
    return _multiply(ctx, invals, tcgen05.mma)


def _multiply(
    ctx: RuleContext, invals: Sequence[Any], multiply: Callable[..., None]
) -> list[Any]:
    operands = ctx.operands(invals)
    parts = [ctx.view(operands[name]) for name in ("acc", "a", "b")]
    accumulate = operands["accumulate"]
    if not isinstance(accumulate, bool):
        accumulate = vals.scalar_value(accumulate)
    scaled = None
    if operands["a_scale"] is not None:
        scaled = tuple(ctx.view(operands[name]) for name in ("a_scale", "b_scale"))
    metadata = operands["a_sparse_metadata"]
    if metadata is not None:
        metadata = ctx.view(metadata)
    multiply(*parts, accumulate, scaled, metadata, collective=_is_collective(ctx))
    if operands["barrier"] is not None:
        _commit(ctx, operands["barrier"])
    return []


@relates(primitives.tcgen05_mma_p)
def _relate(node: Node, *_: Any) -> list[Any]:
    operands = node.operands
    collective = node.params["collective_axis"] is not None
    accumulator, left = node.part(operands["acc"]), node.part(operands["a"])
    half = accumulator.window.sizes[0] == _HALF_ROWS
    constrain(
        node, accumulator, "accumulator", lambda: _accumulator(accumulator, collective)
    )
    if left.space is types.TMEM:
        _check_left(node, left)
        constrain(node, left, "left operand", lambda: packed(left))
    else:
        node.use(left, "mma", role="left operand")
    pieces = 2 if half and not collective else 1
    right = node.part(operands["b"])
    node.use(right, "mma", role="right operand", pieces=pieces)
    both = TmemLayout.scales_m64_collective if collective and half else None
    for name, role, make in (
        ("a_scale", "scales of the left operand", TmemLayout.scales),
        ("b_scale", "scales of the right operand", both or TmemLayout.scales),
        ("a_sparse_metadata", "metadata", TmemLayout.sparse_metadata),
    ):
        if operands[name] is not None:
            constrain(node, node.part(operands[name]), role, make)
    return []


@emits(primitives.tcgen05_commit_arrive_p)
def _commit_arrive(ctx: RuleContext, *invals: Any) -> list[Any]:
    _commit(ctx, ctx.operands(invals)["barrier"])
    return []


def _commit(ctx: RuleContext, barrier: Any) -> None:
    pointer = barrier_pointer(ctx, barrier)
    tcgen05.commit_arrive(pointer, collective=_is_collective(ctx))


def _is_collective(ctx: RuleContext) -> bool:
    """Whether the operation is one of a pair of CTAs."""
    return ctx.eqn.params["collective_axis"] is not None


def _accumulator(part: Part, collective: bool) -> TmemLayout:
    """One element per column; the layout of 64 rows depends on one or two CTAs."""
    if part.window.sizes[0] != _HALF_ROWS:
        return TmemLayout.default()
    if collective:
        return TmemLayout.m64_collective(part.window.sizes[1])
    return TmemLayout.half_lane(part.window.sizes[1])


def _check_left(node: Node, part: Part) -> None:
    window = part.window
    if window.sizes[0] != _ROWS:
        raise errors.UnsupportedError(
            f"tcgen05_mma: a left operand in TMEM cannot have {window.sizes[0]} rows",
            expected=f"{_ROWS} rows",
            got=f"shape {window.shape}",
            hint="pass the left operand in SMEM",
            where=node.where,
        )
