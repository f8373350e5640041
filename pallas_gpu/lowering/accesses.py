# SPDX-License-Identifier: Apache-2.0
"""Loads and stores of parts of arrays, by the fastest method that admits the part.

A part of a tiled array that cuts through tiles is accessed element by element, any
other by vectors and matrices. What is slow is a warning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxlib.mlir import ir

from pallas_gpu import errors
from pallas_gpu.emitters import gmem, indexed, smem
from pallas_gpu.emitters.registers import RegisterArray
from pallas_gpu.layouts.registers.placement import Placement
from pallas_gpu.layouts.smem.access_plan import Kind
from pallas_gpu.layouts.smem.window import consists_of_tiles
from pallas_gpu.lowering import slow

Line = Callable[[], str | None]


def load(
    view: Any,
    layout: Placement,
    optimized: bool | None,
    where: Line,
    reduction: str | None = None,
) -> RegisterArray:
    """Loads a part of an array.

    Args:
      view: the part, in SMEM or GMEM.
      layout: of the result.
      optimized: True refuses bank conflicts, None warns of them.
      where: returns the line of the load.
      reduction: by which the arrays of all devices are combined, of a view of them.

    Raises:
      LayoutError: it has bank conflicts, and is to have none.
    """
    if isinstance(view, gmem.GmemView):
        array = gmem.load(view, layout, reduction=reduction)
    elif by_element(view, layout, "load"):
        slow.access(view, layout, "load", where, by_element=True)
        return indexed.load_part(view, layout)
    else:
        array = smem.load(view, layout, optimized=bool(optimized))
    slow.access(view, layout, "load", where, optimized)
    return array


def store(
    view: Any, value: RegisterArray, where: Line, optimized: bool | None = None
) -> None:
    """Stores to a part of an array; the arguments are those of `load`."""
    if isinstance(view, gmem.GmemView):
        gmem.store(view, value)
    elif by_element(view, value.layout, "store"):
        slow.access(view, value.layout, "store", where, by_element=True)
        indexed.store_part(view, value)
        return
    else:
        smem.store(view, value, optimized=bool(optimized))
    slow.access(view, value.layout, "store", where, optimized)


def load_scalar(view: Any, reduction: str | None = None) -> ir.Value:
    """Loads one element into every thread."""
    if isinstance(view, gmem.GmemView):
        return gmem.load_scalar(view, reduction)
    return smem.load_scalar(view) if is_plain(view) else indexed.load_scalar(view)


def store_scalar(view: Any, value: ir.Value) -> None:
    """Stores one element from the elected thread."""
    if isinstance(view, gmem.GmemView):
        gmem.store_scalar(view, value)
    elif is_plain(view):
        smem.store_scalar(view, value)
    else:
        indexed.store_scalar(view, value)


def by_element(view: smem.SmemView, layout: Placement, kind: Kind) -> bool:
    """Whether each element needs an address of its own.

    It does if a part of a tiled array does not consist of whole tiles, or if a layout's
    threads do not follow the tiles.
    """
    if not consists_of_tiles(view.layout, view.window):
        return True
    try:
        smem.plan(view, layout, kind)
    except errors.LayoutError:
        return True
    return False


def is_plain(view: smem.SmemView) -> bool:
    """Whether the array of a part is stored row-major."""
    return view.layout.is_plain
