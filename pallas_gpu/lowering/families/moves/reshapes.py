# SPDX-License-Identifier: Apache-2.0
"""Reshapes, and arrays of one element that become scalars."""

from __future__ import annotations

import contextlib
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
from pallas_gpu.lowering.families.moves.rearrange import moved, through_scratch
from pallas_gpu.lowering.inference import relations
from pallas_gpu.lowering.inference.collect import Node
from pallas_gpu.lowering.rules import emits_and_relates


@emits_and_relates("reshape")
def _reshape(on: RuleContext | Node, x: Any, *, dimensions: Any) -> Any:
    return _in_shape(on, x, dimensions)


@emits_and_relates("squeeze")
def _in_shape(on: RuleContext | Node, x: Any, dimensions: Any = None) -> Any:
    (aval,) = on.op.results
    old, new = x.shape, tuple(aval.shape)
    if on.is_splat(x):
        return on.splat(x, aval)
    if not new:
        return _element(on, x)
    if _permutes(old, dimensions):
        return moved(on, plans.reshape(old, new, dimensions), [x], aval)
    if old == new:
        return x
    relation = relations.Reshape(old, new)
    if (kept := _in_place(on, x, aval, relation)) is not None:
        return kept
    return moved(on, plans.reshape(old, new), [x], aval, renames=[relation])


def _in_place(
    on: RuleContext | Node, x: Any, aval: Any, relation: relations.Reshape
) -> Any:
    """The result if its layout follows from the operand's; None if data may move.

    Axes of size one are inserted and removed in any layout.
    """
    old, new = relation.old, relation.new
    if isinstance(on, Node):
        same = [n for n in old if n != 1] == [n for n in new if n != 1]
        return on.related(x, aval, relation) if same else None
    if on.target("moved") is None:
        with contextlib.suppress(errors.LayoutError):
            return regs.reshape(on.operand(x), new)
    return None


def _permutes(shape: Sequence[int], dimensions: Sequence[int] | None) -> bool:
    """Whether a reshape with dimensions is more than one without."""
    kept = [a for a in dimensions or () if shape[a] != 1]
    return kept != sorted(kept)


def _element(on: RuleContext | Node, x: Any) -> Any:
    """The element of an array of one: each thread has it, if not in its layout."""
    if isinstance(on, Node):
        variable = on.variable(x, moved_bits=max(x.bits, 8))
        on.take(x, variable, "element")
        return on.scalar(on.op.results[0])
    x = on.placed(x, "element")
    shape = x.shape
    if not _is_everywhere(x.layout):
        target, plan = default_placement(shape, dtypes.bits(x.dtype)), plans.reshape
        x = through_scratch(on.kernel, plan(shape, shape), [x], (), None, target)
    return regs.splat(dtypes.extract(x.values[0], 0), x.dtype)


def _is_everywhere(layout: Placement) -> bool:
    linear = isinstance(layout, LinearLayout)
    return linear and not any(map(any, layout.thread_columns))  # type: ignore[union-attr]
