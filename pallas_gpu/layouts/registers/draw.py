# SPDX-License-Identifier: Apache-2.0
"""Draws a layout as text: the owner of each element of a small array."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pallas_gpu import expect
from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts.registers.catalogue import Layout, to_layout
from pallas_gpu.layouts.registers.descriptions import (
    RegisterLayout,
    TiledLayout,
    WGSplatLayout,
    WGStridedLayout,
)
from pallas_gpu.layouts.registers.linear import WARP_LANES, LinearLayout

# Wider drawings wrap in a terminal.
_MAX_COLUMNS = 64
_MAX_ROWS = 256


_LAYOUTS = (Layout, TiledLayout, WGStridedLayout, WGSplatLayout, LinearLayout)


@expect.arguments(
    layout=expect.instance(*_LAYOUTS, written="plgpu.Layout.WGMMA"),
    shape=expect.integers(1),
)
def draw(layout: Layout | RegisterLayout | LinearLayout, shape: Sequence[int]) -> str:
    """Formats the owner of each element: warp, lane, register and position in it.

    A cell reads `warp:lane rR.V`. A `+` marks elements that more than one thread holds;
    the first is shown.

    Args:
      layout: a name of the catalogue, a description or a linear form.
      shape: one or two dimensions, at most 256 by 64 elements.

    Returns:
      A table with a line for each row, below a line of column numbers.

    Raises:
      LayoutError: the shape is too large, or does not match the layout.

      >>> print(draw(Layout.WGMMA, (64, 8)).splitlines()[1])
       0 | 0:0 r0.0   0:0 r0.1   0:1 r0.0   0:1 r0.1   0:2 r0.0 ...
    """
    shape = tuple(shape)
    rows, columns = (1, *shape)[-2:] if 1 <= len(shape) <= 2 else (0, 0)
    if not (0 < rows <= _MAX_ROWS and 0 < columns <= _MAX_COLUMNS):
        raise LayoutError(
            "this array is too large to draw",
            expected=f"1 or 2 dimensions, at most {_MAX_ROWS} x {_MAX_COLUMNS}",
            got=f"shape {shape}",
            hint="draw one tile of it",
        )
    resolved = layout if isinstance(layout, LinearLayout) else to_layout(layout)
    if isinstance(resolved, WGSplatLayout):
        return "every element: register 0 of every thread"
    return _table(_owners(resolved, shape), rows, columns)


def _owners(
    layout: LinearLayout | RegisterLayout, shape: tuple[int, ...]
) -> list[tuple[int, int, int, int]]:
    """For each element, row-major: first thread, register, position, thread count."""
    if not isinstance(layout, LinearLayout | WGStridedLayout):
        layout = layout.linear(shape)
    if layout.shape != shape:
        raise LayoutError(
            "the layout is for a different shape", expected=layout.shape, got=shape
        )
    coordinates = layout.all_coordinates()
    flat = np.ravel_multi_index(tuple(np.moveaxis(coordinates, -1, 0)), shape)
    order = np.argsort(flat.reshape(-1), kind="stable")
    starts = np.unique(flat.reshape(-1)[order], return_index=True)[1]
    copies = flat.size // len(starts)
    places = np.stack(np.unravel_index(order[starts], flat.shape), axis=-1)
    return [(int(t), int(r), int(v), copies) for t, r, v in places]


def _table(owners: list[tuple[int, int, int, int]], rows: int, columns: int) -> str:
    cells = [
        f"{t // WARP_LANES}:{t % WARP_LANES} r{r}.{v}{'+' if copies > 1 else ''}"
        for t, r, v, copies in owners
    ]
    width = max(len(cell) for cell in cells)
    margin = len(str(rows - 1))
    head = " " * margin + " | " + "  ".join(str(c).ljust(width) for c in range(columns))
    lines = [head.rstrip()]
    for row in range(rows):
        line = "  ".join(c.ljust(width) for c in cells[row * columns :][:columns])
        lines.append(f"{row:>{margin}} | {line}".rstrip())
    return "\n".join(lines)
