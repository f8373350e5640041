# SPDX-License-Identifier: Apache-2.0
"""Slices of arrays in shared memory: whole tiles, contiguity, alignment."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts.smem.layout import SmemLayout
from pallas_gpu.layouts.smem.swizzle import NO_SWIZZLE, atom_bytes
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
    require_whole_tiles(layout, window)
    tile, _, _ = (x.tolist() for x in layout.axis_strides)
    # Tiles are row-major, and a slice consists of whole tiles.
    all_tiles, tiles = (
        [n // t for n, t in zip(sizes, tile, strict=True)]
        for sizes in (layout.shape, window.sizes)
    )
    if not is_contiguous(all_tiles, tiles):
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
    bits = layout.itemsize_bits
    return SmemLayout.of(shape, bits, layout.tiling, layout.swizzle)


def is_addressable(layout: SmemLayout, starts: Sequence[int]) -> bool:
    """Whether a slice with these starts is stored like an array of its own.

    It starts with a tile, and with a repetition of the swizzle: addresses in the slice
    are computed from its start.
    """
    tile = layout.axis_strides[0].tolist()
    if any(start % t for start, t in zip(starts, tile, strict=True)):
        return False
    if layout.swizzle == NO_SWIZZLE:
        return True
    return start_bytes(layout, starts) % atom_bytes(layout.swizzle) == 0


def consists_of_tiles(layout: SmemLayout, window: Window) -> bool:
    """Whether a slice is known to consist of whole tiles that can be addressed.

    Otherwise each element has an address of its own.
    """
    if layout.is_plain:
        return True
    # A dynamic start is known to be a multiple of a number, as are its addresses.
    pairs = zip(window.starts, window.multiples, strict=True)
    known = [start if isinstance(start, int) else n for start, n in pairs]
    tile = layout.axis_strides[0].tolist()
    whole = all(size % t == 0 for size, t in zip(window.sizes, tile, strict=True))
    return whole and is_addressable(layout, known)


def start_bytes(layout: SmemLayout, starts: Sequence[int]) -> float:
    """Returns the offset in bytes of the tile in which a slice starts."""
    tile, between, _ = (x.tolist() for x in layout.axis_strides)
    tiles = [start // t for start, t in zip(starts, tile, strict=True)]
    return math.sumprod(tiles, between) * layout.itemsize_bits / 8


def require_whole_tiles(layout: SmemLayout, window: Window) -> None:
    """Raises LayoutError unless a slice consists of whole tiles.

    Dynamic starts are the author's promise; the emulator checks them.
    """
    known = [start if isinstance(start, int) else 0 for start in window.starts]
    tile = layout.axis_strides[0].tolist()
    whole = all(size % t == 0 for size, t in zip(window.sizes, tile, strict=True))
    if whole and is_addressable(layout, known):
        return
    first = tuple(x if isinstance(x, int) else "dynamic" for x in window.starts)
    rules = []
    if layout.tiling is not None:
        rules.append(
            f"starts and sizes that are multiples of the tiling {layout.tiling}"
        )
    if layout.swizzle != NO_SWIZZLE:
        rules.append(f"a start at a multiple of {atom_bytes(layout.swizzle)} bytes")
    raise LayoutError(
        "a part of a tiled SMEM array cuts through its tiles",
        expected=", and ".join(rules),
        got=f"a part of sizes {window.sizes}, starts {first}, of an array of shape "
        f"{layout.shape}",
        hint="use whole tiles, or declare the array with smaller tiles or without "
        "transforms",
    )


def require_copy_start(layout: SmemLayout, window: Window, what: str) -> None:
    """Raises LayoutError for a slice that starts where TMA cannot address SMEM.

    Args:
      layout: placement of the whole array.
      window: the slice, of whole tiles; a dynamic start is the author's promise.
      what: the slice, for the message.
    """
    if window.dynamic:
        return
    offset_bytes = start_bytes(layout, window.starts)
    if offset_bytes % ALLOCATION_ALIGNMENT_BYTES == 0:
        return
    raise LayoutError(
        f"{what} does not start where TMA can address SMEM",
        expected=f"a multiple of {ALLOCATION_ALIGNMENT_BYTES} bytes from the start of "
        f"the array of shape {layout.shape}",
        got=f"{offset_bytes:g} bytes, the element {tuple(window.starts)}",
        hint="place each part in a separate row of as many bytes",
    )


def alignment_bytes(
    layout: SmemLayout, window: Window, divisor: Callable[[Any], int] | None = None
) -> int:
    """Returns a known divisor of a slice's address, at most 128.

    Args:
      layout: placement of the whole array.
      window: the slice, of whole tiles.
      divisor: a known divisor of a dynamic start; by default what the window says.
    """
    result_bits = 8 * ALLOCATION_ALIGNMENT_BYTES
    tile, between, within = (x.tolist() for x in layout.axis_strides)
    for axis, start in enumerate(window.starts):
        if isinstance(start, int):
            tiles, rest = divmod(start, tile[axis])
            elements = tiles * between[axis] + rest * within[axis]
        else:
            # It is a multiple of the tile too: the slice consists of whole tiles.
            known = divisor(start) if divisor else window.multiples[axis]
            multiple = math.lcm(known, tile[axis])
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
