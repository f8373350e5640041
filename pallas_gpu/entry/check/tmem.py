# SPDX-License-Identifier: Apache-2.0
"""Parts of arrays in TMEM: ranges of columns that consist of whole tiles."""

from __future__ import annotations

from typing import Any

from pallas_gpu import errors
from pallas_gpu.layouts.registers.placement import place_registers
from pallas_gpu.layouts.tmem.access import register_layouts, transfers
from pallas_gpu.layouts.window import Window
from pallas_gpu.types.transforms import itemsize_bits


def check_part(aval: Any, window: Window) -> None:
    """Raises unless an instruction can address the part.

    Args:
      aval: the array's abstract reference.
      window: the part.

    Raises:
      UnsupportedError: a transpose, an index of a row or a column, a part of the rows.
      LayoutError: the columns are not whole tiles of the layout.
    """
    rank = len(window.array_shape)
    if (
        window.axes != (rank - 2, rank - 1)
        or window.sizes[-2] != window.array_shape[-2]
    ):
        raise errors.UnsupportedError(
            "an array in TMEM is indexed by rows, by a single column, or transposed",
            expected="all rows and a range of columns: ref.at[:, 0:64], behind any "
            "part of the dimensions before them",
            got=f"sizes {window.sizes} of {window.array_shape}, axes {window.axes}",
            hint="load it, and index or transpose the value",
        )
    tile = aval.storage.layout.base_tile_shape[1]
    start, size = window.starts[-1], window.sizes[-1]
    if size % tile or (isinstance(start, int) and start % tile):
        raise errors.LayoutError(
            "a part of an array in TMEM does not consist of whole tiles",
            expected=f"a start and a size that are multiples of {tile} columns, in "
            f"{aval.storage.layout}",
            got=f"{size} columns from {start if isinstance(start, int) else 'a value'}",
            hint="slice at multiples of the tile, or declare an array for each part",
        )


def check_transfer(aval: Any, window: Window, layout: Any) -> None:
    """Raises LayoutError unless an instruction loads or stores the part.

    Args:
      aval: the array's abstract reference.
      window: the part.
      layout: of the registers; None for any.
    """
    stored, bits = aval.storage.layout, itemsize_bits(aval.dtype)
    shape = window.shape
    if layout is None:
        if next(register_layouts(stored, shape, bits), None) is not None:
            return
        raise errors.LayoutError(
            "no instruction transfers an array with this layout in TMEM",
            expected="elements that fill 32-bit columns, or one of 16 bits to a column",
            got=f"{stored}, elements of {bits} bits",
            hint="pack the array's elements, or copy it from SMEM",
        )
    if transfers(place_registers(layout, shape), stored, bits):
        return
    raise errors.LayoutError(
        "async_load_tmem: no instruction loads the array to this register layout",
        expected="Layout.TCGEN05 or TCGEN05_TMEM_NATIVE for 128 rows, Layout.WGMMA or "
        "TCGEN05_M64_COLLECTIVE for 64",
        got=f"{layout} from {stored}, elements of {bits} bits",
        hint="omit the layout, and apply layout_cast to the result",
    )
