# SPDX-License-Identifier: Apache-2.0
"""Plans TMA copies of four rows each, anywhere in an array (gather4, scatter4).

A copy moves equal ranges of columns of four rows of a matrix, which are adjacent in
SMEM. An array is taken as the matrix whose rows are those that are indexed, with all
that lies in them as columns. PTX ISA, "cp.async.bulk.tensor", "tile::gather4".
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts.gmem.tma_view import (
    INNER_BOX_BYTES,
    MAX_BOX,
    MAX_SIZE,
    STRIDE_BYTES,
)
from pallas_gpu.layouts.smem.layout import SmemLayout
from pallas_gpu.layouts.smem.swizzle import NO_SWIZZLE
from pallas_gpu.layouts.smem.window import (
    ALLOCATION_ALIGNMENT_BYTES,
    alignment_bytes,
    consists_of_tiles,
    contiguous_layout,
    match_axes,
)
from pallas_gpu.layouts.window import Window

ROWS = 4
# The widest elements that a tensor map has (CUDA driver API, CUtensorMapDataType).
_MAX_UNIT_BITS = 64


@dataclasses.dataclass(frozen=True)
class FourRows:
    """A tensor map and the copies of a group of four rows.

    Attributes:
      unit_bits: width of an element of the map.
      per_unit: number of the array's elements in one of the map.
      sizes: rows and columns of the map.
      columns: of a copy.
      swizzle: 16 is none.
      pieces: of each copy of a group the offset in SMEM, and the column after the first
        one of the slice.
      row_tile: rows of a tile of SMEM, bytes between tiles, bytes between their rows.
      row_axis: of the array in GMEM.
    """

    unit_bits: int
    per_unit: int
    sizes: tuple[int, int]
    columns: int
    swizzle: int
    pieces: tuple[tuple[int, int], ...]
    row_tile: tuple[int, int, int]
    row_axis: int


def plan_four_rows(
    gmem: Window, layout: SmemLayout, smem: Window, bits: int
) -> FourRows | None:
    """Returns the copies of a slice's rows; None if there are none of four rows.

    Args:
      gmem: the slice, whose first axis the indices refer to; all indices are in bounds.
      layout: placement of the array in SMEM.
      smem: the slice in SMEM, a row for each index.
      bits: width of an element.
    """
    count = smem.shape[0]
    if gmem.is_transposed or smem.is_transposed or len(gmem.axes) < 2:
        return None
    if count % ROWS or bits < 8 or not consists_of_tiles(layout, smem):
        return None
    if alignment_bytes(layout, smem) % ALLOCATION_ALIGNMENT_BYTES:
        return None
    try:
        target = contiguous_layout(layout, smem)
    except LayoutError:
        return None
    axes = match_axes(smem.shape, target.shape)
    if axes is None:
        return None
    found = _pieces_of_rows(target, tuple(axes), smem.shape)
    if found is None:
        return None
    columns, places = found
    unit = _unit_bits(columns, bits, target.swizzle)
    offsets = _columns_of_pieces(gmem, columns)
    if unit is None or offsets is None or not _is_addressable(gmem, bits, offsets):
        return None
    tile, between, within = (int(x[axes[0]]) for x in target.axis_strides)
    strides, row_axis = gmem.array_strides, gmem.axes[0]
    per_unit, item = unit // bits, bits // 8
    rows = math.prod(gmem.array_shape[: row_axis + 1])
    return FourRows(
        unit,
        per_unit,
        (rows, strides[row_axis] // per_unit),
        columns // per_unit,
        target.swizzle,
        tuple(
            (place * item, offset // per_unit)
            for place, offset in zip(places, offsets, strict=True)
        ),
        (tile, between * item, within * item),
        row_axis,
    )


@functools.lru_cache(maxsize=256)
def _pieces_of_rows(
    target: SmemLayout, axes: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[int, tuple[int, ...]] | None:
    """The columns of a copy, and where each copy of the first group starts.

    In elements of SMEM. None if four rows are not adjacent there.
    """
    grid = np.indices(shape).reshape(len(shape), -1).T
    coordinates = np.zeros((len(grid), len(target.shape)), np.int64)
    coordinates[:, list(axes)] = grid
    bits = target.itemsize_bits
    places = (target.linear_bit_offset(coordinates) // bits).reshape(shape[0], -1)
    columns = int(places[1, 0] - places[0, 0])
    if columns < 1 or places.shape[1] % columns:
        return None
    fours = places.reshape(shape[0] // ROWS, ROWS, -1, columns)
    first = fours[:, :1, :, :1]
    box = np.arange(ROWS * columns).reshape(1, ROWS, 1, columns)
    whole = (fours == first + box).all()
    # Where a group starts does not depend on the piece.
    apart = (first == first[:1] + first[:, :, :1] - first[:1, :, :1]).all()
    unit = 8 * ALLOCATION_ALIGNMENT_BYTES
    if not whole or not apart or (first * bits % unit).any():
        return None
    return columns, tuple(int(x) for x in first[0, 0, :, 0])


def _unit_bits(columns: int, bits: int, swizzle: int) -> int | None:
    """The narrowest elements of a map of which that many columns are not too many."""
    row_bits = columns * bits
    if row_bits % (8 * INNER_BOX_BYTES):
        return None
    if swizzle != NO_SWIZZLE and row_bits != 8 * swizzle:
        return None
    unit = bits
    while row_bits // unit > MAX_BOX and unit < _MAX_UNIT_BITS:
        unit *= 2
    return unit if row_bits // unit <= MAX_BOX else None


def _columns_of_pieces(gmem: Window, columns: int) -> list[int] | None:
    """The first column of each copy, after that of the slice, in elements."""
    strides = gmem.array_strides
    rest = gmem.axes[1:]
    offsets = np.zeros((1,), np.int64)
    for axis in rest:
        steps = np.arange(gmem.sizes[axis]) * strides[axis]
        offsets = (offsets[:, None] + steps).reshape(-1)
    pieces = offsets.reshape(-1, columns)
    if (pieces != pieces[:, :1] + np.arange(columns)).any():
        return None
    return [int(x) for x in pieces[:, 0]]


def _is_addressable(gmem: Window, bits: int, offsets: list[int]) -> bool:
    """Whether rows and columns are where a tensor map can have them."""
    strides, shape, row_axis = gmem.array_strides, gmem.array_shape, gmem.axes[0]
    starts = [
        gmem.multiples[axis] * strides[axis] for axis in range(row_axis + 1, len(shape))
    ]
    unit = 8 * INNER_BOX_BYTES
    in_units = all(x * bits % unit == 0 for x in [*starts, *offsets])
    stride = strides[row_axis]
    rows = math.prod(shape[: row_axis + 1])
    whole = stride * bits % (8 * STRIDE_BYTES) == 0
    return in_units and whole and rows <= MAX_SIZE and stride <= MAX_SIZE
