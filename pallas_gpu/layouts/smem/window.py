# SPDX-License-Identifier: Apache-2.0
"""Slices of arrays in shared memory: whole tiles, contiguity, alignment."""

from __future__ import annotations

import dataclasses
import math

from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts.smem.layout import SmemLayout
from pallas_gpu.layouts.window import Window, is_contiguous

# The minimum alignment of allocations in SMEM, required by TMA (PTX ISA, bulk copy).
ALLOCATION_ALIGNMENT_BYTES = 128


def contiguous_layout(layout: SmemLayout, window: Window) -> SmemLayout:
    """Returns the placement of a slice as an array; the slice must be contiguous.

    Args:
      layout: placement of the whole array.
      window: the slice, its axes in the array's order.

    Raises:
      LayoutError: the slice cuts through tiles, or is not contiguous.
    """
    tile, _, _ = (x.tolist() for x in layout.axis_strides)
    tiles = [divmod(size, t) for size, t in zip(window.sizes, tile, strict=True)]
    if any(rest for _, rest in tiles):
        raise LayoutError(
            "a part of a tiled SMEM array cuts through its tiles",
            expected=f"sizes that are multiples of the tiling {layout.tiling}",
            got=f"a part of sizes {window.sizes}",
            hint="use whole tiles",
        )
    # Tiles are row-major, and a slice consists of whole tiles.
    all_tiles = [n // t for n, t in zip(layout.shape, tile, strict=True)]
    if not is_contiguous(all_tiles, [count for count, _ in tiles]):
        raise LayoutError(
            "a part of an SMEM array is not contiguous",
            expected="a range of the leading dimension, and all of the others",
            got=f"sizes {window.sizes} of an array of shape {layout.shape}, tiling "
            f"{layout.tiling}",
            hint="copy it in several pieces, or make that dimension the leading one",
        )
    # The tiling applies to trailing dimensions: those are kept, even if squeezed.
    first_tiled = len(layout.shape) - len(layout.tile)
    shape = tuple(
        size
        for axis, size in enumerate(window.sizes)
        if axis in window.axes or axis >= first_tiled
    )
    return dataclasses.replace(layout, shape=shape)


def alignment_bytes(layout: SmemLayout, window: Window) -> int:
    """Returns a known divisor of a slice's address, at most 128.

    Args:
      layout: placement of the whole array.
      window: the slice, of whole tiles.
    """
    result_bits = 8 * ALLOCATION_ALIGNMENT_BYTES
    tile, between, within = (x.tolist() for x in layout.axis_strides)
    for axis, start in enumerate(window.starts):
        if isinstance(start, int):
            tiles, rest = divmod(start, tile[axis])
            elements = tiles * between[axis] + rest * within[axis]
        else:
            # It is a multiple of the tile too: the slice consists of whole tiles.
            multiple = math.lcm(window.multiples[axis], tile[axis])
            elements = between[axis] * (multiple // tile[axis])
        result_bits = math.gcd(result_bits, elements * layout.itemsize_bits)
    return result_bits // 8


def check_window(smem: SmemLayout, window: tuple[int, ...]) -> None:
    """Raises LayoutError unless a slice of that shape consists of whole tiles."""
    lead = len(window) - len(smem.tile)
    fits = len(window) == len(smem.shape) and all(
        1 <= w <= s for w, s in zip(window, smem.shape, strict=True)
    )
    if not fits or any(w % t for w, t in zip(window[lead:], smem.tile, strict=True)):
        raise LayoutError(
            "a slice of a tiled reference must consist of whole tiles",
            expected=f"a part of {smem.shape}, multiples of the tile {smem.tile}",
            got=f"window {window}",
            hint="slice whole tiles, or omit the transforms",
        )


def match_axes(shape: tuple[int, ...], window: tuple[int, ...]) -> list[int] | None:
    """For each axis of `shape` its axis in the window; the others have size 1.

    None if the two do not match.
    """
    axes: list[int] = []
    position = len(window)
    for size in reversed(shape):
        position -= 1
        while position >= 0 and window[position] != size and window[position] == 1:
            position -= 1
        if position < 0 or window[position] != size:
            return None
        axes.insert(0, position)
    return axes if math.prod(shape) == math.prod(window) else None
