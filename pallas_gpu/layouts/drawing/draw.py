# SPDX-License-Identifier: Apache-2.0
"""Draws layouts of registers, of SMEM and of TMEM."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pallas_gpu import expect
from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts.drawing.drawing import Drawing, draw_with, part_of_array
from pallas_gpu.layouts.drawing.svg import Cell
from pallas_gpu.layouts.registers.catalogue import Layout, to_layout
from pallas_gpu.layouts.registers.descriptions import (
    RegisterLayout,
    TiledLayout,
    WGSplatLayout,
    WGStridedLayout,
)
from pallas_gpu.layouts.registers.linear import WARP_LANES, LinearLayout
from pallas_gpu.layouts.smem.layout import SmemLayout
from pallas_gpu.layouts.tmem.layout import TmemLayout

_MAX_ROWS, _MAX_COLUMNS = 128, 64
# Elements of an array with one axis that stand in a row.
_ROW = 16
# CUDA C++ programming guide, "Shared Memory": 32 banks of 4 bytes.
_BANKS, _BANK_BYTES = 32, 4

_LAYOUTS = (
    Layout, TiledLayout, WGStridedLayout, WGSplatLayout, LinearLayout, SmemLayout,
    TmemLayout,
)  # fmt: skip
AnyLayout = Layout | RegisterLayout | LinearLayout | SmemLayout | TmemLayout
# From row-major indices of elements to their cells.
Places = Callable[[np.ndarray], list[Cell]]


@expect.arguments(
    layout=expect.instance(*_LAYOUTS, written="plgpu.Layout.WGMMA"),
    shape=expect.optional(expect.integers(1)),
    part=part_of_array,
)
def draw(
    layout: AnyLayout, shape: Sequence[int] | None = None, part: Any = None
) -> Drawing:
    """Draws where the elements of an array are; also the method `draw` of layouts.

    A cell of a register layout reads `warp:lane rR.V`: the register, and the position
    in it; a `+` marks elements that more than one thread holds, of which the first is
    shown. A cell of SMEM has bank and byte address, one of TMEM lane and column.

    Args:
      layout: of registers, SMEM or TMEM: a name of the catalogue, or a description.
      shape: of the array; a layout that has a shape of its own does not need it.
      part: for larger arrays, which part to draw: an integer or a slice for each axis.

    Returns:
      A drawing: text by `str` and `print`, SVG in a notebook and as `.svg`.

    Raises:
      LayoutError: the layout does not fit the shape; or the part is larger than 128
        rows of 64 elements, or has more than two axes.

    Example:
      >>> print(plgpu.layouts.draw(plgpu.Layout.WGMMA, (64, 8)))
    """
    own = getattr(layout, "shape", None)
    if shape is None and own is None:
        raise LayoutError(
            "draw: the layout does not have a shape of its own",
            expected="the shape of an array",
            got="none",
            hint=f"pass a shape: draw({_example(layout)})",
        )
    shape = tuple(own or ()) if shape is None else tuple(shape)
    name, legend, places = _places(layout, shape)
    labels, indices = _selected(shape, part)
    cells = places(indices.reshape(-1))
    rows, columns = indices.shape
    whole = f"{name}, shape {shape}"
    return Drawing(
        whole if indices.size == math.prod(shape) else f"{whole}, a part of it",
        legend,
        *labels,
        tuple(tuple(cells[i * columns : (i + 1) * columns]) for i in range(rows)),
    )


def _example(layout: Any) -> str:
    return "(128, 32)" if isinstance(layout, TmemLayout) else "(64, 8)"


draw_with(draw)


# --- which elements -------------------------------------------------------------------


def _selected(
    shape: tuple[int, ...], part: Any
) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], np.ndarray]:
    """Returns labels of rows and columns, and the indices of the elements in them."""
    entries = (slice(None),) * len(shape) if part is None else part
    flat = np.arange(math.prod(shape)).reshape(shape)
    if len(entries) != len(shape):
        raise LayoutError(
            "draw: the part does not match the shape",
            expected=f"{len(shape)} integers and slices for shape {shape}",
            got=f"{len(entries)}",
            hint="write an integer or a slice for each axis",
        )
    for axis, entry in enumerate(entries):
        if not isinstance(entry, slice) and not 0 <= entry < shape[axis]:
            raise LayoutError(
                "draw: the part is out of bounds",
                expected=f"0 to {shape[axis] - 1} on axis {axis}",
                got=entry,
                hint=f"the shape is {shape}",
            )
    chosen = flat[tuple(entries)]
    kept = [
        range(*entry.indices(n))
        for entry, n in zip(entries, shape, strict=True)
        if isinstance(entry, slice)
    ]
    if chosen.ndim < 2:
        rows, columns = _wrapped(list(kept[0]) if kept else [0])
        chosen = chosen.reshape(len(rows), -1) if chosen.size else chosen
    elif chosen.ndim == 2:
        rows, columns = (tuple(map(str, axis)) for axis in kept)
    fits = chosen.ndim == 2 and chosen.size > 0
    if not fits or len(rows) > _MAX_ROWS or len(columns) > _MAX_COLUMNS:
        raise _too_large(shape, chosen.shape)
    return (rows, columns), chosen


def _wrapped(indices: list[int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Labels of the elements of one axis, in rows."""
    n = len(indices)
    width = next((w for w in range(_ROW, 0, -1) if n % w == 0), 1) if n > _ROW else n
    rows = tuple(str(i) for i in indices[::width]) if n else ("0",)
    return rows, tuple(
        f"+{i}" if len(rows) > 1 else str(indices[i]) for i in range(width)
    )


def _too_large(shape: tuple[int, ...], got: tuple[int, ...]) -> LayoutError:
    sizes = (1,) * (len(shape) - 2) + (16, 32)[-len(shape) :]
    parts = [
        "0" if axis < len(shape) - 2 else f"slice(0, {min(n, size)})"
        for axis, (n, size) in enumerate(zip(shape, sizes, strict=True))
    ]
    return LayoutError(
        "this array is too large to draw",
        expected=f"1 or 2 dimensions, at most {_MAX_ROWS} x {_MAX_COLUMNS} elements",
        got=f"shape {got}",
        hint=f"draw a part of it: part=({', '.join(parts)}{',' * (len(parts) == 1)})",
    )


# --- where they are -------------------------------------------------------------------


def _places(layout: Any, shape: tuple[int, ...]) -> tuple[str, str, Places]:
    """Returns the name of a layout, the legend, and the places of elements in it."""
    if isinstance(layout, SmemLayout):
        return _in_smem(layout, shape)
    if isinstance(layout, TmemLayout):
        return _in_tmem(layout, shape)
    return _in_registers(layout, shape)


def _in_registers(layout: Any, shape: tuple[int, ...]) -> tuple[str, str, Places]:
    name = f"Layout.{layout.name}" if isinstance(layout, Layout) else ""
    if not isinstance(layout, LinearLayout):
        layout = to_layout(layout)
        name = (
            name
            or {
                TiledLayout: "a tiled layout",
                WGStridedLayout: "Layout.WG_STRIDED",
                WGSplatLayout: "Layout.WG_SPLAT",
            }[type(layout)]
        )
    if isinstance(layout, WGSplatLayout):
        _require_shape(layout.shape or shape, shape)
        cell = Cell("all", "r0.0", 0, 210, 7)
        return name, "register 0 of every thread", lambda i: [cell] * len(i)
    if not isinstance(layout, (LinearLayout, WGStridedLayout)):
        layout = layout.linear(shape)
    _require_shape(layout.shape, shape)
    owners, copies = _owners(layout)
    legend = "warp:lane, register.position in it"
    if copies > 1:
        legend += f"; + the first of {copies} threads that hold it"
    mark = "+" if copies > 1 else ""

    def places(indices: np.ndarray) -> list[Cell]:
        return [_held(owners[i].tolist(), mark) for i in indices]

    return name or "a linear layout", legend, places


def _held(owner: Sequence[int], mark: str) -> Cell:
    thread, register, position = owner
    warp, lane = divmod(thread, WARP_LANES)
    # A hue for each warp; threads beside each other differ in lightness.
    hue = (210, 30, 130, 300)[warp]
    light = (lane % 4 * 2 + lane // 4 % 2) % 8
    return Cell(f"{warp}:{lane}", f"r{register}.{position}{mark}", thread, hue, light)


@functools.lru_cache(maxsize=64)
def _owners(layout: LinearLayout | WGStridedLayout) -> tuple[np.ndarray, int]:
    """For each element, row-major: first thread, register, position; copies of each."""
    coordinates = layout.all_coordinates()
    inside = (coordinates < np.array(layout.shape, dtype=np.int64)).all(-1)
    held = coordinates[inside]
    flat = np.ravel_multi_index(tuple(np.moveaxis(held, -1, 0)), layout.shape)
    order = np.argsort(flat, kind="stable")
    starts = np.unique(flat[order], return_index=True)[1]
    places = np.argwhere(inside)[order[starts]]
    return places, flat.size // len(starts)


def _require_shape(own: tuple[int, ...], shape: tuple[int, ...]) -> None:
    if own != shape:
        raise LayoutError(
            "the layout is for a different shape",
            expected=own,
            got=shape,
            hint=f"draw it with shape {own}",
        )


def _in_smem(layout: SmemLayout, shape: tuple[int, ...]) -> tuple[str, str, Places]:
    _require_shape(layout.shape, shape)

    def places(indices: np.ndarray) -> list[Cell]:
        coordinates = np.stack(np.unravel_index(indices, shape), axis=-1)
        found = layout.byte_offsets(coordinates).tolist()
        return [_stored(offset) for offset in found]

    text = "row-major" if layout.is_plain else layout.description
    name = f"SMEM, elements of {layout.itemsize_bits} bits, {text}"
    return name, "bank, byte address from the start of the array", places


def _stored(offset: int) -> Cell:
    bank = offset // _BANK_BYTES % _BANKS
    # Four banks, 16 bytes, move together in every swizzle.
    hue, light = bank // 4 * 45, 2 * (bank % 4)
    return Cell(f"b{bank}", f"{offset:#06x}", offset // _BANK_BYTES, hue, light)


def _in_tmem(layout: TmemLayout, shape: tuple[int, ...]) -> tuple[str, str, Places]:
    found = layout.places(shape)
    lanes = found.lanes.reshape(math.prod(shape), -1)
    columns, positions = found.columns.reshape(-1), found.positions.reshape(-1)
    packed, copied = layout.packing > 1, lanes.shape[1] > 1

    def place(i: int) -> Cell:
        lane, column = int(lanes[i].min()), int(columns[i])
        position = f".{positions[i]}" if packed else ""
        hue = (210, 30, 130, 300)[lane // WARP_LANES]
        upper = f"L{lane}{'+' if copied else ''}"
        return Cell(upper, f"c{column}{position}", lane, hue, lane % WARP_LANES // 4)

    legend = "lane, column" + ".position in it" * packed
    if copied:
        legend += f"; + the first of {lanes.shape[1]} lanes that hold it"
    return f"TMEM, {layout}", legend, lambda indices: [place(int(i)) for i in indices]
