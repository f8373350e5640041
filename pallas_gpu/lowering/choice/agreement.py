# SPDX-License-Identifier: Apache-2.0
"""Lane semantics: the operands of one operation in one layout.

An array whose layout nobody has chosen is converted to that of the others: a default
layout, or one that follows from a slice or a broadcast. Two layouts that have names, as
authors give them, remain an error of the operation.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

from pallas_gpu import errors
from pallas_gpu.emitters import registers as regs
from pallas_gpu.emitters import smem
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.moves import image, rearrange
from pallas_gpu.emitters.registers import default_placement, spread_layout
from pallas_gpu.layouts import Layout, LinearLayout
from pallas_gpu.layouts.moves import rearrange as plans
from pallas_gpu.layouts.registers import fragments
from pallas_gpu.layouts.registers.placement import Placement, describe, place_registers
from pallas_gpu.lowering import accesses, scratch
from pallas_gpu.lowering.inference import relations

# Widths for which default layouts differ.
_WIDTHS = (32, 64)
# A conversion between layouts stores and loads each element once more.
_TOLERATED_CONFLICTS = 2.0


def agreed(kernel: Any, operands: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the operands of an elementwise operation with register arrays alike."""
    target = _common(operands) or _of_broadcasts(operands)
    if target is None:
        return tuple(operands)
    # Beside an array whose layout nobody has chosen, what a broadcast repeats converts.
    converts = _is_default(target)
    return tuple(_in_layout(kernel, x, target, converts) for x in operands)


def in_layout(
    kernel: Any, x: Any, target: Placement, *, repeats_chosen: bool = False
) -> Any:
    """Returns an array in a layout unless an author may have chosen its own.

    Args:
      repeats_chosen: whether to convert also what repeats an array whose layout an
        author may have chosen; otherwise that is an error.
    """
    if isinstance(x, regs.RegisterArray) and _is_chosen(x):
        return x
    return _in_layout(kernel, x, target, repeats_chosen)


def preferred(operands: Sequence[Any]) -> Placement | None:
    """Returns the layout for an operation of several arrays, None if none has one.

    It is that of the first array whose layout an author may have chosen.
    """
    arrays = [x for x in operands if isinstance(x, regs.RegisterArray)]
    chosen = next((x.layout for x in arrays if _is_chosen(x)), None)
    return chosen or _common(arrays)


def linear(kernel: Any, x: regs.RegisterArray) -> regs.RegisterArray:
    """Returns an array in a layout that has a linear form, as reductions need."""
    if isinstance(x.layout, LinearLayout) or x.layout.is_linear:
        return x
    return _in_layout(kernel, x, spread_layout(x.shape, dtypes.bits(x.dtype)))


def to_store(
    kernel: Any, view: smem.SmemView, x: regs.RegisterArray
) -> regs.RegisterArray:
    """Returns an array in a layout that is stored to internal scratch efficiently.

    It is converted if its own has many bank conflicts, or needs an address for each
    element.
    """
    now = _conflicts(view, x.layout)
    if now <= _TOLERATED_CONFLICTS:
        return x
    best = min(_storable(x.shape), key=lambda s: _conflicts(view, s))
    return _in_layout(kernel, x, best) if _conflicts(view, best) < now else x


def _conflicts(view: smem.SmemView, layout: Placement) -> float:
    """The time of a store relative to one without bank conflicts."""
    if accesses.by_element(view, layout, "store"):
        return math.inf
    plan = smem.plan(view, layout, "store")
    return plan.wavefronts_per_access / plan.ideal_wavefronts


def _storable(shape: tuple[int, ...]) -> Iterator[Placement]:
    """Layouts in which a matrix is stored to tiles without conflicts, if they fit."""
    yield spread_layout(shape)
    if len(shape) != 2:
        return
    rows, columns = shape
    for layout in (Layout.WGMMA, *(fragments.mma_acc(w) for w in (4, 2, 1))):
        with contextlib.suppress(errors.LayoutError):
            yield place_registers(layout, shape)
        with contextlib.suppress(errors.LayoutError):
            turned = place_registers(layout, (columns, rows))
            if isinstance(turned, LinearLayout):
                yield turned.transpose((1, 0))


def _common(operands: Sequence[Any]) -> Placement | None:
    """The layout of all register arrays; None if there is none, or they disagree."""
    arrays = [x for x in operands if isinstance(x, regs.RegisterArray)]
    if len({x.layout for x in arrays}) < 2:
        return arrays[0].layout if arrays else None
    chosen = dict.fromkeys(x.layout for x in arrays if _is_chosen(x))
    if len(chosen) > 1:
        return None
    derived = [x.layout for x in arrays if not _is_default(x.layout)]
    return next(iter([*chosen, *derived, arrays[0].layout]))


def _is_chosen(x: regs.RegisterArray) -> bool:
    """Whether an author may have given the layout: it has a name."""
    named = describe(x.layout).startswith(("Layout.", "WG_STRIDED("))
    return named and not _is_default(x.layout)


def _of_broadcasts(operands: Sequence[Any]) -> Placement | None:
    """The default layout, if broadcasts cannot be materialized in one of theirs."""
    if any(isinstance(x, regs.RegisterArray) for x in operands):
        return None
    found = [b for x in operands for b in regs.broadcasts(x)]
    if len({(b.operand.layout, b.dims) for b in found}) < 2:
        return None
    zero = dtypes.constant(0, found[0].dtype)
    try:
        regs.placed(regs.Mapped(lambda *_: zero, tuple(found), found[0].dtype))
    except errors.LayoutError:
        return default_placement(found[0].shape, 32)
    return None


def _is_default(layout: Placement) -> bool:
    return any(layout == default_placement(layout.shape, bits) for bits in _WIDTHS)


def _in_layout(
    kernel: Any,
    x: Any,
    target: Placement,
    repeats_chosen: bool = False,
    done: dict[int, Any] | None = None,
) -> Any:
    """Returns an array in a layout, or with operands that can be materialized in it."""
    # An operand that is used twice is visited once: expressions such as a hash's would
    # otherwise double with each step.
    done = {} if done is None else done
    if id(x) in done:
        return done[id(x)]
    result = x
    match x:
        case regs.RegisterArray():
            result = scratch.relayouted(kernel, x, target)
        case regs.Broadcast():
            result = _broadcast(kernel, x, target, repeats_chosen)
        case regs.Mapped():
            operands = [
                _in_layout(kernel, o, target, repeats_chosen, done) for o in x.operands
            ]
            result = _mapped(x, operands, target)
    done[id(x)] = result
    return result


def _mapped(x: regs.Mapped, operands: list[Any], target: Placement) -> Any:
    """The function of converted operands: an array as soon as one of them is."""
    if not any(isinstance(o, regs.RegisterArray) for o in operands):
        return regs.Mapped(x.emit, tuple(operands), x.dtype)
    columns = [regs.regroup(o, target) for o in operands]
    values = regs.map_registers(x.emit, [c.values for c in columns])  # type: ignore[union-attr]
    return regs.RegisterArray(values, target, x.dtype)


def _broadcast(
    kernel: Any, x: regs.Broadcast, target: Placement, repeats_chosen: bool
) -> Any:
    """A broadcast that can be materialized in a layout."""
    try:
        return x.materialize(target)
    except errors.LayoutError:
        if _is_chosen(x.operand) and not repeats_chosen:
            raise
    operand = x.operand
    relation = relations.Broadcast(operand.shape, x.shape, x.dims)
    narrow = relation.backward(target) if isinstance(target, LinearLayout) else None
    if narrow is not None:
        held = scratch.relayouted(kernel, operand, narrow)
        return regs.Broadcast(held, x.shape, x.dims).materialize(target)
    plan = plans.broadcast(operand.shape, x.shape, x.dims)
    room = scratch.for_data(kernel, image.size_bytes(plan.size, operand.dtype))
    return rearrange.rearrange(plan, [operand], target, room)
