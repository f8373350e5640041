# SPDX-License-Identifier: Apache-2.0
"""Reshapes, and arrays of one element that become scalars."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

from pallas_gpu import errors
from pallas_gpu.emitters import registers as regs
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.registers import default_placement
from pallas_gpu.layouts import LinearLayout
from pallas_gpu.layouts.moves import rearrange as plans
from pallas_gpu.layouts.registers.placement import Placement
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.families.moves.rearrange import (
    moved,
    related_moved,
    through_scratch,
)
from pallas_gpu.lowering.inference import relations
from pallas_gpu.lowering.inference.collect import Node, Symbol
from pallas_gpu.lowering.rules import emits, relates


@emits("reshape")
def _reshape(ctx: RuleContext, x: Any, *, dimensions: Any) -> Any:
    return _array_in_shape(ctx, x, dimensions)


@emits("squeeze")
def _array_in_shape(ctx: RuleContext, x: Any, dimensions: Any = None) -> Any:
    shape = ctx.out_aval.shape
    if isinstance(x, regs.Splat):
        return regs.reshape(x, shape)
    if not shape:
        return _element(ctx.kernel, ctx.placed(x, "element"))
    if _permutes(x.shape, dimensions):
        return moved(ctx, plans.reshape(x.shape, shape, dimensions), [x])
    if x.shape == shape:
        return x
    if ctx.target("moved") is None:
        with contextlib.suppress(errors.LayoutError):
            return regs.reshape(ctx.operand(x), shape)
    rename = functools.partial(_renamed, shape)
    return moved(ctx, plans.reshape(x.shape, shape), [x], rename=rename)


def _renamed(
    shape: tuple[int, ...],
    held: Sequence[regs.RegisterArray],
    target: Placement | None,
) -> Any:
    """The array with its registers renamed; None if data moves."""
    renamed = relations.Reshape(held[0].shape, shape).forward(held[0].layout)
    if renamed is None or target not in (None, renamed):
        return None
    return regs.reshape(held[0], shape)


@relates("reshape")
def _relate_reshape(node: Node, x: Symbol, *, dimensions: Any) -> Symbol:
    return _related_shape(node, x, dimensions)


@relates("squeeze")
def _related_shape(node: Node, x: Symbol, dimensions: Any = None) -> Symbol:
    """Axes of size one are inserted and removed in any layout."""
    (aval,) = node.op.results
    old, new = x.shape, tuple(aval.shape)
    if not old or x.deferred == "splat":
        return node.defer("splat", aval) if new else node.scalar(aval)
    if not new:
        variable = node.variable(x, moved_bits=max(x.bits, 8))
        node.take(x, variable, "element")
        return node.scalar(aval)
    if _permutes(old, dimensions):
        return related_moved(node, [x], aval)
    if old == new:
        return x
    relation = relations.Reshape(old, new)
    if [n for n in old if n != 1] == [n for n in new if n != 1]:
        return node.related(x, aval, relation)
    return related_moved(node, [x], aval, renames=[relation])


def _permutes(shape: Sequence[int], dimensions: Sequence[int] | None) -> bool:
    """Whether a reshape with dimensions is more than one without."""
    kept = [a for a in dimensions or () if shape[a] != 1]
    return kept != sorted(kept)


def _element(kernel: Any, x: regs.RegisterArray) -> regs.Splat:
    """The element of an array of one: each thread has it, if not in its layout."""
    shape = x.shape
    if not _is_everywhere(x.layout):
        target = default_placement(shape, dtypes.bits(x.dtype))
        x = through_scratch(kernel, plans.reshape(shape, shape), [x], (), None, target)
    return regs.splat(dtypes.extract(x.values[0], 0), x.dtype)


def _is_everywhere(layout: Placement) -> bool:
    linear = isinstance(layout, LinearLayout)
    return linear and not any(map(any, layout.thread_columns))  # type: ignore[union-attr]
