# SPDX-License-Identifier: Apache-2.0
"""Which copies need no tensor map: those of bytes adjacent in both memories."""

from __future__ import annotations

from pallas_gpu.layouts.gmem.line import is_row, line_bytes
from pallas_gpu.mosaic.gmem import GmemView
from pallas_gpu.mosaic.smem import SmemView
from pallas_gpu.types import OOBFillMode

_PROMISED = OOBFillMode.PROMISE_IN_BOUNDS
# Modes in which a copy of several rows is one of adjacent bytes, too. Otherwise a
# tensor map describes it: it has not been measured which is faster.
_SEVERAL_ROWS = (_PROMISED, OOBFillMode.UNDEFINED)


def size_bytes(
    gmem: GmemView, smem_view: SmemView, mode: OOBFillMode | None = None
) -> int | None:
    """Returns the size of a copy that needs no tensor map; None if it needs one.

    Args:
      gmem: a slice of GMEM.
      smem_view: of the same shape and element type.
      mode: what the author says about elements outside of the array.
    """
    if gmem.shape != smem_view.shape or gmem.dtype != smem_view.dtype:
        return None
    if mode not in _SEVERAL_ROWS and not is_row(gmem.window):
        return None
    return line_bytes(
        gmem.window, smem_view.layout, smem_view.window, in_bounds=mode is _PROMISED
    )
