# SPDX-License-Identifier: Apache-2.0
"""Which copies need no tensor map: those of bytes adjacent in both memories."""

from __future__ import annotations

from typing import Any

from pallas_gpu.emitters.gmem import GmemView
from pallas_gpu.emitters.smem import SmemView
from pallas_gpu.layouts.gmem.line import is_row, line_bytes, require_line
from pallas_gpu.types import OOBFillMode
from pallas_gpu.types.copies.reductions import CopyReduction, lacks_tensor_map

_PROMISED = OOBFillMode.PROMISE_IN_BOUNDS
# Modes in which a copy of several rows is one of adjacent bytes, too. Otherwise it is a
# tensor copy if that is a single one. Streams of both are equally fast on an H200.
_SEVERAL_ROWS = (_PROMISED, OOBFillMode.UNDEFINED)


def size_bytes(
    gmem: GmemView,
    smem_view: SmemView,
    mode: OOBFillMode | None = None,
    *,
    is_box: bool = True,
) -> int | None:
    """Returns the size of a copy that needs no tensor map; None if it needs one.

    Args:
      gmem: a slice of GMEM.
      smem_view: of the same shape and element type.
      mode: what the author says about elements outside of the array.
      is_box: whether the copy may be one tensor copy.
    """
    if gmem.shape != smem_view.shape or gmem.dtype != smem_view.dtype:
        return None
    if is_box and mode not in _SEVERAL_ROWS and not is_row(gmem.window):
        return None
    return line_bytes(
        gmem.window, smem_view.layout, smem_view.window, in_bounds=mode is _PROMISED
    )


def reduced_bytes(gmem: GmemView, smem_view: SmemView) -> int | None:
    """Returns the size of a reduction that needs no tensor map; None if it needs one.

    Raises:
      LayoutError: no tensor map describes the elements, nor are the bytes adjacent.
    """
    if not lacks_tensor_map(gmem.dtype):
        return size_bytes(gmem, smem_view)
    window, layout = smem_view.window, smem_view.layout
    require_line(gmem.window, layout, window, "a reduction of float64")
    return size_bytes(gmem, smem_view, _PROMISED)


def suffix(reduction: CopyReduction, dtype: Any) -> str:
    """Returns operation and type of a reduction as cp.reduce.async.bulk has them.

    PTX ISA: integers that are combined bit by bit are `.b`, sums of halves `.noftz`.
    """
    element = reduction.element(dtype)
    bits = 8 * element.itemsize
    if reduction.operation in ("and", "or", "xor"):
        return f"{reduction.operation}.b{bits}"
    if element.kind in "iu":
        return f"{reduction.operation}.{'s' if element.kind == 'i' else 'u'}{bits}"
    name = "bf16" if element.name == "bfloat16" else f"f{bits}"
    exact = ".noftz" if reduction.operation == "add" and bits == 16 else ""
    return f"{reduction.operation}{exact}.{name}"
