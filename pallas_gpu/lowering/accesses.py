# SPDX-License-Identifier: Apache-2.0
"""Loads and stores of parts of arrays, by the fastest method that admits the part.

A part of a tiled array that cuts through tiles is accessed element by element, any
other by vectors and matrices. What is slow is a warning.
"""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

from pallas_gpu import errors
from pallas_gpu.emitters import gmem, indexed, smem
from pallas_gpu.emitters.registers import RegisterArray
from pallas_gpu.layouts.registers.placement import Placement, describe
from pallas_gpu.layouts.smem.access_plan import Kind
from pallas_gpu.layouts.smem.window import consists_of_tiles
from pallas_gpu.lowering import notes, slow
from pallas_gpu.lowering.context import RuleContext


def load(
    ctx: RuleContext,
    view: Any,
    layout: Placement,
    optimized: bool | None,
    reduction: str | None = None,
) -> RegisterArray:
    """Loads a part of an array.

    Args:
      view: the part, in SMEM or GMEM.
      layout: of the result.
      optimized: True refuses bank conflicts, None warns of them.
      reduction: by which the arrays of all devices are combined, of a view of them.

    Raises:
      LayoutError: it has bank conflicts, and is to have none.
    """
    cut = by_element(view, layout, "load")
    if isinstance(view, gmem.GmemView):
        array = gmem.load(view, layout, reduction=reduction)
    elif cut:
        array = indexed.load_part(view, layout)
    else:
        array = smem.load(view, layout, optimized=bool(optimized))
    _note(ctx, view, layout, "load", optimized, cut)
    return array


def store(
    ctx: RuleContext, view: Any, value: RegisterArray, optimized: bool | None
) -> None:
    """Stores to a part of an array; the arguments are those of `load`."""
    cut = by_element(view, value.layout, "store")
    if isinstance(view, gmem.GmemView):
        gmem.store(view, value)
    elif cut:
        indexed.store_part(view, value)
    else:
        smem.store(view, value, optimized=bool(optimized))
    _note(ctx, view, value.layout, "store", optimized, cut)


def _note(
    ctx: RuleContext,
    view: Any,
    layout: Placement,
    kind: Kind,
    optimized: bool | None,
    cut: bool,
) -> None:
    """Notes an access that has been emitted, and warns if it is slow."""
    is_internal = isinstance(view, smem.SmemView) and view.internal
    warns = (optimized is None or cut) and not is_internal
    if not warns and notes.current() is None:
        return
    note = (slow.by_element if cut else slow.of_view)(view, layout, kind)
    notes.take(lambda: note)
    if warns:
        slow.too_large(view, layout, lambda: ctx.op.where)
        got = f"{note.got} in {describe(layout)}"
        slow.warn_of(note, got, lambda: ctx.op.where)


def load_scalar(view: Any, reduction: str | None = None) -> ir.Value:
    """Loads one element into every thread."""
    if isinstance(view, gmem.GmemView):
        return gmem.load_scalar(view, reduction)
    if view.layout.is_plain:
        return smem.load_scalar(view)
    return indexed.load_scalar(view)


def store_scalar(view: Any, value: ir.Value) -> None:
    """Stores one element from the elected thread."""
    if isinstance(view, gmem.GmemView):
        gmem.store_scalar(view, value)
    elif view.layout.is_plain:
        smem.store_scalar(view, value)
    else:
        indexed.store_scalar(view, value)


def by_element(view: Any, layout: Placement, kind: Kind) -> bool:
    """Whether each element needs an address of its own.

    It does if a part of a tiled array does not consist of whole tiles, or if a layout's
    threads do not follow the tiles.
    """
    if isinstance(view, gmem.GmemView):
        return False
    if not consists_of_tiles(view.layout, view.window):
        return True
    try:
        smem.plan(view, layout, kind)
    except errors.LayoutError:
        return True
    return False
