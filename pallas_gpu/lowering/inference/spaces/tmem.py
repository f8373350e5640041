# SPDX-License-Identifier: Apache-2.0
"""The layouts of arrays in TMEM, and what each use of one requires.

Most uses admit one layout only: tcgen05 reads accumulators, operands and scales in one
layout each. Loads and stores support the layouts that an instruction transfers from or
to registers.
"""

from __future__ import annotations

from pallas_gpu import errors
from pallas_gpu.layouts import TmemLayout, transfers
from pallas_gpu.layouts.registers.placement import Placement
from pallas_gpu.layouts.tmem.access import register_layouts
from pallas_gpu.lowering.inference.network import Array, Use


def storages(array: Array) -> list[TmemLayout]:
    """The one layout of an array, which its declaration gives."""
    return [array.base.given]


def refusal(use: Use, storage: TmemLayout) -> errors.LayoutError | None:
    """The error for a use that does not support a layout of its array, or None."""
    try:
        match use.kind:
            case "constrain":
                _check_admitted(use, storage)
                _check_part(use, storage)
            case "load" | "store":
                _check_part(use, storage)
                _check_carried(use, storage)
    except errors.LayoutError as error:
        return error
    return None


def _check_admitted(use: Use, storage: TmemLayout) -> None:
    if storage not in use.admitted:
        raise errors.LayoutError(
            "it supports one layout of the array only"
            if len(use.admitted) == 1
            else "it supports some layouts of the array only",
            expected=" or ".join(map(str, use.admitted)),
            got=storage,
            hint="use a separate array, or omit the array's layout",
        )


def _check_part(use: Use, storage: TmemLayout) -> None:
    """Refuses a part that is not of whole tiles of columns, in the array's order."""
    window = use.part.window
    rows, start = window.array_shape[0], window.starts[1]
    storage.check(window.array_shape)
    if window.axes != (0, 1) or window.sizes[0] != rows:
        raise errors.LayoutError(
            "arrays in TMEM can be sliced along their columns only",
            expected=f"all {rows} rows, and axes in order",
            got=f"sizes {window.sizes}, axes {window.axes}",
            hint="load the array and slice it in registers",
        )
    tile = storage.base_tile_shape[1]
    if window.sizes[1] % tile or window.multiples[1] % tile:
        first = f"column {start}"
        if not isinstance(start, int):
            first = f"a column known to be a multiple of {window.multiples[1]}"
        raise errors.LayoutError(
            "a part of an array in TMEM must consist of whole tiles",
            expected=f"a start and a size that are multiples of {tile} columns",
            got=f"{window.sizes[1]} columns from {first}",
            hint="slice at multiples of the tile, or use one array per part",
        )


def _check_carried(use: Use, storage: TmemLayout) -> None:
    if next(register_layouts(storage, use.part.window.shape, use.part.bits), None):
        return
    verb, word = ("store", "to") if use.kind == "store" else ("load", "from")
    raise errors.LayoutError(
        f"no instruction can {verb} {word} this TMEM layout",
        expected="elements that fill 32-bit columns, or one of 16 bits to a column",
        got=f"{storage}, elements of {use.part.bits} bits",
        hint="pack the array's elements, or copy it through SMEM",
    )


# --- loads and stores -----------------------------------------------------------------


def carries(use: Use, storage: TmemLayout, placement: Placement) -> bool:
    """Whether an instruction transfers the part between registers and its array."""
    return transfers(placement, storage, use.part.bits)
