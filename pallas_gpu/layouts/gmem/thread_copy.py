# SPDX-License-Identifier: Apache-2.0
"""Plans copies between a slice of GMEM and a slice of SMEM by threads.

The copy consists of equal chunks, each adjacent and aligned in both memories; a thread
transfers one chunk at a time. Any slice of any array has such chunks: if nothing else,
single elements.
"""

from __future__ import annotations

import dataclasses
import math

from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts.smem.layout import SmemLayout
from pallas_gpu.layouts.window import Window, is_contiguous

# The widest access of a thread (PTX ISA, ld, st, cp.async), and the narrowest.
_WIDTHS_BYTES = (16, 8, 4, 2, 1)
# The sizes that cp.async supports (PTX ISA, "cp.async": cp-size of .ca and .cg).
ASYNCHRONOUS_BYTES = (4, 8, 16)


@dataclasses.dataclass(frozen=True)
class Bound:
    """A bound of the array that chunks may exceed.

    Attributes:
      axis: of `ThreadCopy.counts`.
      array_axis: of the array in GMEM; its start is added to the position.
      scale: elements of the axis per index of the array's.
      limit: number of elements along the axis.
    """

    axis: int
    array_axis: int
    scale: int
    limit: int


@dataclasses.dataclass(frozen=True)
class ThreadCopy:
    """The chunks of a copy.

    Attributes:
      chunk_bytes: size of a chunk: 1, 2, 4, 8 or 16.
      chunk_elems: the same in elements, along the last axis.
      counts: number of chunks along each axis of the copy.
      is_line: whether both slices are adjacent as a whole; then there is one axis.
      bounds: of the array, where the slice is not known to be inside.
    """

    chunk_bytes: int
    chunk_elems: int
    counts: tuple[int, ...]
    is_line: bool
    bounds: tuple[Bound, ...]

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return math.prod(self.counts)

    @property
    def is_cut(self) -> bool:
        """Whether a bound may lie within a chunk."""
        last, elems = len(self.counts) - 1, self.chunk_elems
        return any(b.axis == last and b.limit % elems for b in self.bounds)

    @property
    def is_asynchronous(self) -> bool:
        """Whether cp.async can load the chunks."""
        return self.chunk_bytes in ASYNCHRONOUS_BYTES


def plan_threads(
    gmem: Window, layout: SmemLayout, smem: Window, *, store: bool
) -> ThreadCopy:
    """Returns the widest chunks of a copy between two slices of equal shape.

    Args:
      gmem: the slice in GMEM; the array's start is aligned to 16 bytes.
      layout: placement of the array in SMEM.
      smem: the slice in SMEM.
      store: whether the copy writes to GMEM: then a chunk of elements that share bytes
        is inside of the array or outside. In the other direction what is outside is
        filled with zeros.

    Raises:
      LayoutError: elements share bytes that are not a part of the copy.

      >>> rows = Window.whole((64, 3))
      >>> plan_threads(rows, SmemLayout((64, 3), 32), rows, store=False)
      ThreadCopy(chunk_bytes=16, chunk_elems=4, counts=(48,), is_line=True, bounds=())
    """
    bits = layout.itemsize_bits
    bound = _bound_of_line(gmem)
    line = bound is not None and _is_line(gmem, layout, smem)
    for width in _WIDTHS_BYTES:
        elems, rest = divmod(8 * width, bits)
        if rest or not elems:
            continue
        # Elements of whole bytes are stored one by one where a bound cuts their chunk.
        # Only cp.async fills a part of a chunk with zeros.
        whole = bits < 8 if store else width not in ASYNCHRONOUS_BYTES
        if line and bound is not None and _fits_line(gmem, smem, elems, bound, whole):
            count = math.prod(gmem.sizes) // elems
            return ThreadCopy(width, elems, (count,), True, bound)
        if _fits(gmem, layout, smem, elems, whole):
            return ThreadCopy(width, elems, _counts(gmem, elems), False, _bounds(gmem))
    raise LayoutError(
        "threads cannot copy elements that share bytes with others",
        expected=f"starts and sizes that are multiples of {max(8 // bits, 1)} elements "
        "along the minor dimension",
        got=f"{bits}-bit elements, sizes {gmem.sizes} of {gmem.array_shape}",
        hint="copy whole bytes, or load and store the elements",
    )


def _counts(gmem: Window, elems: int) -> tuple[int, ...]:
    shape = gmem.shape or (1,)
    return (*shape[:-1], shape[-1] // elems)


# --- slices that are adjacent as a whole ----------------------------------------------


def _is_line(gmem: Window, layout: SmemLayout, smem: Window) -> bool:
    in_order = not gmem.is_transposed and not smem.is_transposed
    return (
        in_order
        and layout.is_plain
        and is_contiguous(gmem.array_shape, gmem.sizes)
        and is_contiguous(layout.shape, smem.sizes)
    )


def _bound_of_line(gmem: Window) -> tuple[Bound, ...] | None:
    """The bounds of a slice whose elements are adjacent; None if it has several."""
    inside = gmem.known_inside()
    unknown = [axis for axis, known in enumerate(inside) if not known]
    if not unknown:
        return ()
    first = unknown[0]
    inner = math.prod(gmem.array_shape[first + 1 :])
    alone = len(unknown) == 1 and math.prod(gmem.sizes[:first]) == 1
    # Positions are computed in 32 bits.
    if not alone or gmem.array_shape[first] * inner >= 2**31:
        return None
    if math.prod(gmem.sizes[first + 1 :]) != inner:
        return None
    return (Bound(0, first, inner, gmem.array_shape[first] * inner),)


def _fits_line(
    gmem: Window, smem: Window, elems: int, bounds: tuple[Bound, ...], whole: bool
) -> bool:
    if math.prod(gmem.sizes) % elems:
        return False
    if gmem.start_multiple % elems or smem.start_multiple % elems:
        return False
    return not whole or all(bound.limit % elems == 0 for bound in bounds)


# --- all others: chunks are parts of rows ---------------------------------------------


def _bounds(gmem: Window) -> tuple[Bound, ...]:
    inside = gmem.known_inside()
    return tuple(
        Bound(axis, array_axis, 1, gmem.array_shape[array_axis])
        for axis, array_axis in enumerate(gmem.axes)
        if not inside[array_axis]
    )


def _fits(
    gmem: Window, layout: SmemLayout, smem: Window, elems: int, whole: bool
) -> bool:
    if elems == 1:
        return True
    if not gmem.axes or gmem.shape[-1] % elems:
        return False
    return _fits_gmem(gmem, elems, whole) and _fits_smem(layout, smem, elems)


def _fits_gmem(gmem: Window, elems: int, whole: bool) -> bool:
    minor, strides = gmem.axes[-1], gmem.array_strides
    if strides[minor] != 1 or gmem.start_multiple % elems:
        return False
    others = (a for a in gmem.axes[:-1] if gmem.sizes[a] > 1)
    if any(strides[axis] % elems for axis in others):
        return False
    if not whole or gmem.known_inside()[minor]:
        return True
    return gmem.array_shape[minor] % elems == 0


def _fits_smem(layout: SmemLayout, smem: Window, elems: int) -> bool:
    minor = smem.axes[-1]
    tile, between, within = (x.tolist() for x in layout.axis_strides)
    for axis, n in enumerate(layout.shape):
        # A stride matters where there are several tiles, or elements in one.
        steps = [between[axis]] if n > tile[axis] else []
        steps += [within[axis]] if tile[axis] > 1 else []
        if axis == minor:
            adjacent = within[axis] if tile[axis] > 1 else between[axis]
            if adjacent != 1 or smem.multiples[axis] % elems:
                return False
            if tile[axis] > 1 and tile[axis] % elems:
                return False
            steps = [between[axis]] if tile[axis] > 1 and n > tile[axis] else []
        if any(step % elems for step in steps):
            return False
    return True
