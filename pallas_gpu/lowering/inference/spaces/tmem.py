# SPDX-License-Identifier: Apache-2.0
"""The layouts of arrays in TMEM, and what each use of one requires.

Most uses admit one layout only: tcgen05 reads accumulators, operands and scales in one
layout each. Loads and stores support the layouts that an instruction transfers from or
to registers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from jaxlib.mlir import ir

from pallas_gpu import errors
from pallas_gpu.layouts import TmemKind, TmemLayout, transfers
from pallas_gpu.layouts.registers.placement import Placement
from pallas_gpu.layouts.tmem.access import register_layouts
from pallas_gpu.layouts.tmem.layout import COLUMN_BITS, allocated_columns
from pallas_gpu.lowering.inference import sources
from pallas_gpu.lowering.inference.network import TmemArray, Use

_HALF_ROWS = 64
_KINDS = list(TmemKind)


def storages(array: TmemArray) -> list[TmemLayout]:
    """The candidate layouts of an array, in order of preference.

    Raises:
      LayoutError: there is none for its shape.
    """
    found: list[TmemLayout] = []
    if not isinstance(array.base, ir.Value):
        return [array.base.given]
    op, (rows, *rest) = array.op, array.shape
    packings = sorted({1, max(1, COLUMN_BITS // array.bits)})
    makers: list[Callable[[int], TmemLayout]] = [TmemLayout.default]
    if rows == _HALF_ROWS and rest:
        makers = [
            lambda packing: TmemLayout.half_lane(rest[0], packing),
            lambda packing: TmemLayout.m64_collective(rest[0], packing),
        ]
        if _flag(op, "collective"):
            makers.reverse()
    refused = None
    for make, packing in itertools.product(makers, packings):
        try:
            found.append(make(packing))
        except errors.LayoutError as error:
            refused = error.with_location(sources.where(op))
    admitted = {layout for use in array.uses for layout in use.admitted}
    found += sorted(admitted - set(found), key=_order)
    if not found and refused is not None:
        raise refused
    return found


def _order(layout: TmemLayout) -> tuple[int, int, int]:
    return _KINDS.index(layout.kind), layout.packing, layout.tile_columns


def _flag(op: ir.Operation, name: str) -> bool:
    return name in op.attributes and ir.BoolAttr(op.attributes[name]).value


def refusal(use: Use, storage: TmemLayout) -> errors.LayoutError | None:
    """The error for a use that does not support a layout of its array, or None."""
    try:
        match use.kind:
            case "alloc":
                storage.check(use.part.window.array_shape)
                _check_room(use, storage)
            case "constrain":
                _check_admitted(use, storage)
                _check_part(use, storage)
            case "load" | "store":
                _check_part(use, storage)
                _check_carried(use, storage)
    except errors.LayoutError as error:
        return error
    return None


def _check_room(use: Use, storage: TmemLayout) -> None:
    """Refuses a layout that does not fit the columns of the allocation."""
    op = use.op
    if op.name == "mosaic_gpu.tmem_alloc":
        packing = ir.IntegerAttr(op.attributes["packing"]).value
        if storage.packing != packing:
            raise errors.LayoutError(
                f"the allocation reserves a column for {packing} elements",
                expected=f"a layout with {packing} elements per column",
                got=storage,
                hint=f"allocate it with packing {storage.packing}",
            )
        return
    source = op.operands[0].owner
    if isinstance(source, ir.Block) or source.operation.name != "mosaic_gpu.tmem_alloc":
        return
    packing = ir.IntegerAttr(source.operation.attributes["packing"]).value
    reserved = allocated_columns(ir.MemRefType(op.operands[0].type).shape[1] // packing)
    first = ir.IntegerAttr(op.attributes["offset"]).value
    columns = storage.columns(use.part.window.array_shape)
    if first + columns > reserved:
        raise errors.LayoutError(
            "the array exceeds its allocation",
            expected=f"columns 0 to {reserved - 1}",
            got=f"columns {first} to {first + columns - 1} in {storage}",
            hint="allocate more columns, or pack the array's elements",
        )


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
