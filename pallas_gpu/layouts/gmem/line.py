# SPDX-License-Identifier: Apache-2.0
"""Copies of adjacent bytes, which need no tensor map."""

from __future__ import annotations

import math

from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts.smem.layout import SmemLayout
from pallas_gpu.layouts.window import Window, is_contiguous

# PTX ISA, cp.async.bulk: size and addresses are multiples of it.
UNIT_BYTES = 16


def line_bytes(
    gmem: Window, layout: SmemLayout, smem: Window, *, in_bounds: bool = False
) -> int | None:
    """Returns the size of a copy whose bytes are adjacent in both memories, or None.

    A dynamic start is the author's promise to be a multiple of 16 bytes, as it is for
    a tensor map.

    Args:
      gmem: the slice in GMEM; the array's start is aligned to 16 bytes.
      layout: placement of the array in SMEM.
      smem: the slice in SMEM, of the same shape.
      in_bounds: whether the author promises that the slice is in bounds; without it,
        this must be known of each axis.

      >>> row = Window.whole((64, 128)).slice((3, 0), (None, 128))
      >>> line_bytes(row, SmemLayout((128,), 32), Window.whole((128,)))
      512
    """
    size_bytes, rest = divmod(math.prod(gmem.sizes) * layout.itemsize_bits, 8)
    adjacent = (
        gmem.order == smem.order
        and not gmem.is_transposed
        and layout.is_plain
        and is_contiguous(gmem.array_shape, gmem.sizes)
        and is_contiguous(layout.shape, smem.sizes)
    )
    if not adjacent or rest or size_bytes % UNIT_BYTES:
        return None
    if not in_bounds and not all(gmem.known_inside()):
        return None
    starts = (_start_bits(w, layout.itemsize_bits) for w in (gmem, smem))
    return None if any(bits % (8 * UNIT_BYTES) for bits in starts) else size_bytes


def prefetched_bytes(gmem: Window, element_bits: int) -> int | None:
    """Returns the size of a prefetch of adjacent bytes in bounds, or None.

    Args:
      gmem: the slice, its dimensions in order; see `line_bytes`.
      element_bits: width of an element.

      >>> prefetched_bytes(Window.whole((64, 5)).slice((4, 0), (None, 4)), 32)
      16
    """
    shape = gmem.shape
    return line_bytes(gmem, SmemLayout(shape, element_bits), Window.whole(shape))


def require_line(gmem: Window, layout: SmemLayout, smem: Window, what: str) -> None:
    """Raises LayoutError unless a copy is of adjacent bytes and may be in bounds.

    Args:
      gmem, layout, smem: as of `line_bytes`; dynamic starts are the author's promise.
      what: the copy, for the message.
    """
    size = line_bytes(gmem, layout, smem, in_bounds=True)
    if size is not None and not gmem.over_the_edge():
        return
    raise LayoutError(
        f"{what} is of adjacent bytes in bounds alone",
        expected="a part of whole rows in GMEM, inside the array, in SMEM without "
        "transforms, that starts at a multiple of 16 bytes and has such a size",
        got=f"a part of sizes {gmem.sizes} of an array {gmem.array_shape} in GMEM, of "
        f"{layout.shape} in SMEM",
        hint="copy each row with a call of its own, or use plgpu.atomic_add",
    )


def is_row(window: Window) -> bool:
    """Returns whether at most one axis of a slice has more than one element."""
    return sum(size > 1 for size in window.sizes) <= 1


def _start_bits(window: Window, bits: int) -> int:
    """The known part of the distance from the array's start."""
    known = [start if isinstance(start, int) else 0 for start in window.starts]
    pairs = zip(known, window.array_strides, strict=True)
    return sum([start * stride for start, stride in pairs]) * bits
