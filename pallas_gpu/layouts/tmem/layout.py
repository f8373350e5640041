# SPDX-License-Identifier: Apache-2.0
"""Where an element of an array in tensor memory (TMEM) lies.

TMEM is 128 lanes by 512 columns of 32 bits (PTX ISA, "Tensor Memory", "Tensor Memory
Addressing"). An array in it has two axes. Warp w of a warpgroup reaches lanes 32 * w to
32 * w + 31 only ("tcgen05.ld", "Access restrictions"), so a placement is written like
one in registers: what a `TiledLayout` deals to warps and lanes are the lanes of TMEM,
what it counts as registers are columns, and its vector lies inside of one column.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple, assert_never

import numpy as np

from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts.registers.descriptions import (
    PartitionDim,
    Replicated,
    TiledDim,
    TiledLayout,
    Tiling,
)
from pallas_gpu.layouts.registers.linear import WARP_LANES, WARPS

LANES = WARP_LANES * WARPS
COLUMNS = 512
COLUMN_BITS = 32
# PTX ISA, tcgen05.alloc: the number of columns is a power of two from here on.
LEAST_COLUMNS = 32
# Elements of 4 bits are the narrowest that accumulators and operands have.
_MOST_PACKED = 8
# A quarter of TMEM's lanes takes rows in runs of 8 columns, in two halves.
_HALVED_COLUMNS = 16


class TmemKind(enum.Enum):
    """The ways in which `tcgen05.mma` finds a matrix in TMEM."""

    DEFAULT = "default"
    HALF_LANE = "half-lane"
    M64_COLLECTIVE = "M64 collective"
    SCALES = "scales"
    SCALES_M64_COLLECTIVE = "scales M64 collective"
    SPARSE_METADATA = "sparse metadata"


# Kinds whose tile has as many columns as the author says.
_WITH_COLUMNS = (TmemKind.HALF_LANE, TmemKind.M64_COLLECTIVE)
# Kinds of which rows may follow rows; the others are one tile high.
_WITH_ROW_TILES = (TmemKind.SCALES, TmemKind.SCALES_M64_COLLECTIVE)
# Elements to a column where the kind leaves no choice: 8-bit scales, 2-bit metadata.
_FIXED_PACKING = {
    TmemKind.SCALES: 4,
    TmemKind.SCALES_M64_COLLECTIVE: 4,
    TmemKind.SPARSE_METADATA: 16,
}


class TmemPlace(NamedTuple):
    """Where one element lies: its lanes (one for each copy), its column, and which of
    the elements in that column it is, counted from the least significant bit."""

    lanes: tuple[int, ...]
    column: int
    position: int


class TmemPlaces(NamedTuple):
    """The places of a whole array: int64 arrays, read-only.

    Attributes:
      lanes: [rows, columns, copies].
      columns, positions: [rows, columns].
    """

    lanes: np.ndarray
    columns: np.ndarray
    positions: np.ndarray


@dataclasses.dataclass(frozen=True)
class TmemLayout:
    """Places an array in TMEM. Made by the method that has the kind's name.

    Args:
      kind: which of the hardware's placements.
      packing: elements to a 32-bit column.
      tile_columns: half-lane and M64 collective only: columns of the array that are
        halved together, those of one accumulator; 0 otherwise.

    Raises:
      LayoutError: the packing is not a power of two up to 8, or not the kind's; the
        columns are not a multiple of 16, or half of them do not fill 32-bit columns.

      >>> TmemLayout.default().place((128, 64), 40, 3)
      TmemPlace(lanes=(40,), column=3, position=0)
    """

    kind: TmemKind
    packing: int = 1
    tile_columns: int = 0

    def __post_init__(self) -> None:
        fixed = _FIXED_PACKING.get(self.kind)
        packings = [1 << i for i in range(_MOST_PACKED.bit_length())]
        if self.packing not in ([fixed] if fixed else packings):
            raise LayoutError(
                f"the {self.kind.value} layout of TMEM does not pack so many elements "
                "into a column",
                expected=fixed or f"a power of two up to {_MOST_PACKED}",
                got=self.packing,
                hint="pack as many elements as 32 bits hold, or 1",
            )
        columns = self.tile_columns
        if self.kind not in _WITH_COLUMNS:
            if columns:
                raise LayoutError(
                    f"the {self.kind.value} layout of TMEM has no width of its own",
                    got=f"{columns} columns",
                    hint="leave tile_columns out",
                )
            return
        if columns < _HALVED_COLUMNS or columns % _HALVED_COLUMNS:
            raise LayoutError(
                f"the {self.kind.value} layout of TMEM halves whole 8-column tiles",
                expected=f"a multiple of {_HALVED_COLUMNS} columns",
                got=columns,
                hint="pad the columns",
            )
        if columns // 2 % self.packing:
            raise LayoutError(
                f"half of the columns of the {self.kind.value} layout must fill TMEM "
                "columns",
                expected=f"a multiple of {2 * self.packing} columns",
                got=columns,
                hint="pad the columns, or pack fewer elements",
            )

    # --- the kinds --------------------------------------------------------------------

    @classmethod
    def default(cls, packing: int = 1) -> TmemLayout:
        """Row r in lane r: accumulators and left operands of 128 rows.

        PTX ISA, tcgen05 "Data path layout organization", M = 128 and M = 256.

          >>> TmemLayout.default(packing=2).place((128, 64), 40, 3)
          TmemPlace(lanes=(40,), column=1, position=1)
        """
        return cls(TmemKind.DEFAULT, packing)

    @classmethod
    def half_lane(cls, columns: int, packing: int = 1) -> TmemLayout:
        """64 rows, 16 to a warp's lanes: accumulators of one CTA with M = 64.

        An instruction fills only the first 16 lanes of each 32 (PTX ISA, tcgen05 "Data
        path layout organization", M = 64, cta_group::1). The right half of the columns
        goes to the others.

          >>> TmemLayout.half_lane(32).place((64, 32), 20, 18)
          TmemPlace(lanes=(52,), column=2, position=0)
        """
        return cls(TmemKind.HALF_LANE, packing, columns)

    @classmethod
    def m64_collective(cls, columns: int, packing: int = 1) -> TmemLayout:
        """64 rows: one CTA's part of an accumulator that two CTAs have, M = 128.

        Its right half lies in lanes 64 to 127 (PTX ISA, tcgen05 "Data path layout
        organization", M = 128, cta_group::2).

          >>> TmemLayout.m64_collective(32).place((64, 32), 20, 18)
          TmemPlace(lanes=(84,), column=2, position=0)
        """
        return cls(TmemKind.M64_COLLECTIVE, packing, columns)

    @classmethod
    def scales(cls) -> TmemLayout:
        """8-bit scales of blocks along K: 32 rows to a column, a copy for each warp.

        PTX ISA, tcgen05 "Scale factor A", "Scale factor B"; as `tcgen05.cp.32x128b`
        with `.warpx4` writes it.

          >>> TmemLayout.scales().place((128, 8), 40, 5)
          TmemPlace(lanes=(8, 40, 72, 104), column=5, position=1)
        """
        return cls(TmemKind.SCALES, _FIXED_PACKING[TmemKind.SCALES])

    @classmethod
    def scales_m64_collective(cls) -> TmemLayout:
        """Scales of the right operand where two CTAs have M = 128 together.

        Rows 128 to 255 lie in the lanes of warps 1 and 3, as the columns of the
        accumulator that they scale do.

          >>> TmemLayout.scales_m64_collective().place((256, 4), 168, 1)
          TmemPlace(lanes=(40, 104), column=1, position=1)
        """
        kind = TmemKind.SCALES_M64_COLLECTIVE
        return cls(kind, _FIXED_PACKING[kind])

    @classmethod
    def sparse_metadata(cls) -> TmemLayout:
        """2-bit indices of the elements that a 2:4 sparse left operand keeps.

        It names what `tcgen05.cp` writes and `tcgen05.mma` reads (PTX ISA, tcgen05
        "Sparse matrices"); registers never meet it, see `transfers`.

          >>> TmemLayout.sparse_metadata().place((128, 64), 9, 17)
          TmemPlace(lanes=(6,), column=1, position=1)
        """
        kind = TmemKind.SPARSE_METADATA
        return cls(kind, _FIXED_PACKING[kind])

    @functools.cached_property
    def tiled(self) -> TiledLayout:
        """The placement as tiles, in which users and the dialect write it."""
        p, c = self.packing, self.tile_columns
        half = c // 2
        match self.kind:
            case TmemKind.DEFAULT:
                return _tiled((128, p), (32, p), warp=(-4,), lane=(-2,))
            case TmemKind.HALF_LANE:
                return _tiled((64, c), (16, half), (p,), warp=(-5,), lane=(-4, -3))
            case TmemKind.M64_COLLECTIVE:
                return _tiled((64, c), (32, half), (p,), warp=(-4, -5), lane=(-3,))
            case TmemKind.SCALES:
                copies = (Replicated(4),)
                return _tiled((128, 4), (32, 1), warp=copies, lane=(-2,), vector=-3)
            case TmemKind.SCALES_M64_COLLECTIVE:
                warps = (Replicated(2), -6)
                return _tiled((256, 4), (128, 4), (32, 4), warp=warps, lane=(-2,))
            case TmemKind.SPARSE_METADATA:
                tiles = ((128, 16), (32, 1), (16, 1), (8, 1))
                return _tiled(*tiles, warp=(-8,), lane=(-2, -4, -6), vector=-7)
            case _:
                assert_never(self.kind)

    @classmethod
    def from_tiled(cls, tiled: TiledLayout) -> TmemLayout:
        """The kind that tiles describe, however they are written.

        Raises:
          LayoutError: they describe none.
        """
        base = tiled.base_tile_shape
        if len(base) == 2:
            for layout in _kinds_of_tile(base, tiled.vector_length):
                same = zip(
                    _places(tiled, base), _places(layout.tiled, base), strict=True
                )
                if all(np.array_equal(a, b) for a, b in same):
                    return layout
        raise LayoutError(
            "the tiles describe no layout that the tensor core finds in TMEM",
            expected=" or ".join(kind.value for kind in TmemKind),
            got=tiled,
            hint="use a layout made by TmemLayout",
        )

    # --- arrays -----------------------------------------------------------------------

    @property
    def base_tile_shape(self) -> tuple[int, ...]:
        """Rows and columns that arrays, and parts of arrays, are multiples of."""
        return self.tiled.base_tile_shape

    @property
    def copies(self) -> int:
        """In how many lanes each element lies."""
        dims = self.tiled.warp_dims
        return math.prod(d.times for d in dims if isinstance(d, Replicated))

    def check(self, shape: Sequence[int]) -> None:
        """Raises LayoutError unless an array of this shape can have the layout."""
        rows, columns = self.base_tile_shape
        several = self.kind in _WITH_ROW_TILES
        high = len(shape) == 2 and (
            shape[0] > 0 and shape[0] % rows == 0 if several else shape[0] == rows
        )
        if not high or shape[1] < 1 or shape[1] % columns:
            raise LayoutError(
                f"an array in TMEM has no {self.kind.value} layout with this shape",
                expected=f"{'a multiple of ' * several}{rows} rows and a multiple of "
                f"{columns} columns",
                got=f"shape {tuple(shape)}",
                hint="pad the array",
            )
        needed = math.prod(shape) * self.copies // (LANES * self.packing)
        if needed > COLUMNS:
            raise LayoutError(
                "an array has more columns than TMEM",
                expected=f"up to {COLUMNS} columns of {COLUMN_BITS} bits",
                got=f"{needed} columns for shape {tuple(shape)} with "
                f"{self.packing} elements to a column",
                hint="split the array, or pack its elements",
            )

    def columns(self, shape: Sequence[int]) -> int:
        """Columns of 32 bits that an array takes.

        Raises:
          LayoutError: see `check`.
        """
        self.check(shape)
        return math.prod(shape) * self.copies // (LANES * self.packing)

    def places(self, shape: Sequence[int]) -> TmemPlaces:
        """The places of all elements.

        Raises:
          LayoutError: see `check`.
        """
        self.check(shape)
        return _places(self.tiled, tuple(shape))

    def place(self, shape: Sequence[int], row: int, column: int) -> TmemPlace:
        """The place of one element of an array.

        Raises:
          LayoutError: see `check`.
        """
        lanes, columns, positions = self.places(shape)
        return TmemPlace(
            tuple(lanes[row, column].tolist()),
            int(columns[row, column]),
            int(positions[row, column]),
        )

    def __str__(self) -> str:
        text = f"the {self.kind.value} layout"
        if self.tile_columns:
            text += f" of {self.tile_columns} columns"
        if self.kind not in _FIXED_PACKING and self.packing > 1:
            text += f" with {self.packing} elements to a column"
        return text


def allocated_columns(columns: int) -> int:
    """The columns of the allocation that holds so many: a power of two from 32 on."""
    return max(LEAST_COLUMNS, 1 << (columns - 1).bit_length())


def _tiled(*tiles: tuple[int, ...], warp, lane, vector: int = -1) -> TiledLayout:
    return TiledLayout(Tiling(tiles), warp, lane, vector)


def _kinds_of_tile(base: tuple[int, ...], packing: int) -> list[TmemLayout]:
    """The layouts whose tile has this shape."""
    rows, columns = base
    made = (
        lambda: TmemLayout.default(packing),
        TmemLayout.scales,
        TmemLayout.scales_m64_collective,
        TmemLayout.sparse_metadata,
        lambda: TmemLayout.half_lane(columns, packing),
        lambda: TmemLayout.m64_collective(columns, packing),
    )
    result = []
    for make in made:
        try:
            layout = make()
        except LayoutError:
            continue
        if layout.base_tile_shape == (rows, columns):
            result.append(layout)
    return result


@functools.lru_cache(maxsize=64)
def _places(tiled: TiledLayout, shape: tuple[int, ...]) -> TmemPlaces:
    """Deals the digits of each coordinate to lanes, columns and positions."""
    dims = tiled.tiling.dims
    grid = zip(tiled.tiling.grid(shape), tiled.base_tile_shape, strict=True)
    outer = [TiledDim(i - 2, n, s) for i, (n, s) in enumerate(grid)]
    coordinates = np.indices(shape)

    def number(chosen: Sequence[TiledDim]) -> np.ndarray:
        result = np.zeros(shape, dtype=np.int64)
        for dim in chosen:
            digit = coordinates[dim.axis] // dim.stride % dim.size
            result = result * dim.size + digit
        return result

    partition: tuple[PartitionDim, ...] = (*tiled.warp_dims, *tiled.lane_dims)
    lanes = np.zeros((*shape, 1), dtype=np.int64)
    for dim in partition:
        if isinstance(dim, Replicated):
            lanes = lanes * dim.times
            lanes = (lanes[..., None] + np.arange(dim.times)).reshape(*shape, -1)
        else:
            lanes = lanes * dims[dim].size + number([dims[dim]])[..., None]
    taken = (*partition, tiled.vector_dim)
    free = [dim for i, dim in enumerate(dims) if i - len(dims) not in taken]
    result = TmemPlaces(
        lanes, number([*outer, *free]), number([dims[tiled.vector_dim]])
    )
    for array in result:
        array.flags.writeable = False
    return result
