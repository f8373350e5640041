# SPDX-License-Identifier: Apache-2.0
"""Where an element of an array in tensor memory (TMEM) is stored.

TMEM is 128 lanes by 512 columns of 32 bits (PTX ISA, "Tensor Memory", "Tensor Memory
Addressing"). An array in it has two axes. Warp w of a warpgroup reaches lanes 32 * w to
32 * w + 31 only ("tcgen05.ld", "Access restrictions"), so a placement has the form of
one in registers: the warp and lane dims of a `TiledLayout` are the lanes of TMEM, its
registers are columns, and its vector is within one column.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple, assert_never

import numpy as np

from pallas_gpu import expect
from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts.drawing.drawing import Drawable
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
# PTX ISA, tcgen05.alloc: the number of columns is a power of two, at least this.
LEAST_COLUMNS = 32
# The narrowest elements of accumulators and operands have 4 bits.
_MOST_PACKED = 8
# Layouts with two halves store rows in runs of 8 columns.
_HALVED_COLUMNS = 16


class TmemKind(enum.Enum):
    """The layouts of a matrix in TMEM that `tcgen05.mma` supports."""

    DEFAULT = "default"
    HALF_LANE = "half-lane"
    M64_COLLECTIVE = "M64 collective"
    SCALES = "scales"
    SCALES_M64_COLLECTIVE = "scales M64 collective"
    SPARSE_METADATA = "sparse metadata"


# Kinds whose tile has a number of columns that the user specifies.
_WITH_COLUMNS = (TmemKind.HALF_LANE, TmemKind.M64_COLLECTIVE)
# Kinds with any number of tiles along the rows; the others have one.
_WITH_ROW_TILES = (TmemKind.SCALES, TmemKind.SCALES_M64_COLLECTIVE)
# Elements per column of kinds with a fixed packing: 8-bit scales, 2-bit metadata.
_FIXED_PACKING = {
    TmemKind.SCALES: 4,
    TmemKind.SCALES_M64_COLLECTIVE: 4,
    TmemKind.SPARSE_METADATA: 16,
}


class TmemPlace(NamedTuple):
    """The place of one element: its lanes (one per copy), its column, and its position
    among the elements in that column, counted from the least significant bit."""

    lanes: tuple[int, ...]
    column: int
    position: int


class TmemDigits(NamedTuple):
    """How coordinates make up a place: each number from its most significant digit.

    The axes of the digits count from the last one; a digit that is a `Replicated` is
    that of a copy.
    """

    lane: tuple[TiledDim | Replicated, ...]
    column: tuple[TiledDim, ...]
    position: tuple[TiledDim, ...]


class TmemPlaces(NamedTuple):
    """The places of a whole array: int64 arrays, read-only.

    Attributes:
      lanes: [rows, columns, copies].
      columns, positions: [rows, columns].
    """

    lanes: np.ndarray
    columns: np.ndarray
    positions: np.ndarray


@expect.arguments(
    kind=expect.member(TmemKind, "plgpu.layouts"), tile_columns=expect.integer(0)
)
@dataclasses.dataclass(frozen=True)
class TmemLayout(Drawable):
    """The placement of an array in TMEM, created by the method named after the kind.

    Args:
      kind: the kind of hardware layout.
      packing: elements per 32-bit column.
      tile_columns: half-lane and M64 collective only: the columns of one accumulator,
        which are halved together; 0 otherwise.

    Raises:
      LayoutError: the packing is not a power of two up to 8, or not the kind's; the
        columns are not a multiple of 16, or half of them do not fill 32-bit columns.

      >>> TmemLayout.default().place((128, 64), 40, 3)
      TmemPlace(lanes=(40,), column=3, position=0)
    """

    # The spelling of JAX's kernels.
    SCALES_LAYOUT: ClassVar[TmemLayout]
    SPARSE_METADATA_LAYOUT: ClassVar[TmemLayout]
    SCALES_M64_COLLECTIVE_LAYOUT: ClassVar[TmemLayout]
    M64_COLLECTIVE_LAYOUT: ClassVar[Callable[..., TmemLayout]]

    kind: TmemKind
    packing: int = 1
    tile_columns: int = 0

    def __post_init__(self) -> None:
        fixed = _FIXED_PACKING.get(self.kind)
        packings = [1 << i for i in range(_MOST_PACKED.bit_length())]
        if self.packing not in ([fixed] if fixed else packings):
            raise LayoutError(
                f"the {self.kind.value} layout of TMEM does not support this many "
                "elements per column",
                expected=fixed or f"a power of two up to {_MOST_PACKED}",
                got=self.packing,
                hint="pack as many elements as fit 32 bits, or 1",
            )
        columns = self.tile_columns
        if self.kind not in _WITH_COLUMNS:
            if columns:
                raise LayoutError(
                    f"the {self.kind.value} layout of TMEM has a fixed tile width",
                    got=f"{columns} columns",
                    hint="omit tile_columns",
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
    @expect.arguments()
    def default(cls, packing: int = 1) -> TmemLayout:
        """Row r in lane r: accumulators and left operands of 128 rows.

        PTX ISA, tcgen05 "Data path layout organization", M = 128 and M = 256.

          >>> TmemLayout.default(packing=2).place((128, 64), 40, 3)
          TmemPlace(lanes=(40,), column=1, position=1)
        """
        return cls(TmemKind.DEFAULT, packing)

    @classmethod
    @expect.arguments()
    def half_lane(cls, columns: int, packing: int = 1) -> TmemLayout:
        """64 rows, 16 per warp: accumulators of one CTA with M = 64.

        An instruction writes only the first 16 lanes of each 32 (PTX ISA, tcgen05 "Data
        path layout organization", M = 64, cta_group::1). The right half of the columns
        is stored in the others.

          >>> TmemLayout.half_lane(32).place((64, 32), 20, 18)
          TmemPlace(lanes=(52,), column=2, position=0)
        """
        return cls(TmemKind.HALF_LANE, packing, columns)

    @classmethod
    @expect.arguments()
    def m64_collective(cls, columns: int, packing: int = 1) -> TmemLayout:
        """64 rows: one CTA's part of an accumulator of two CTAs, M = 128.

        Its right half is in lanes 64 to 127 (PTX ISA, tcgen05 "Data path layout
        organization", M = 128, cta_group::2).

          >>> TmemLayout.m64_collective(32).place((64, 32), 20, 18)
          TmemPlace(lanes=(84,), column=2, position=0)
        """
        return cls(TmemKind.M64_COLLECTIVE, packing, columns)

    @classmethod
    def scales(cls) -> TmemLayout:
        """8-bit scales of blocks along K: 32 rows per column, a copy for each warp.

        PTX ISA, tcgen05 "Scale factor A", "Scale factor B"; as written by
        `tcgen05.cp.32x128b` with `.warpx4`.

        Tiles of 128 rows by 4 scales take 4 columns; those along the rows are next to
        each other.

          >>> TmemLayout.scales().place((128, 8), 40, 5)
          TmemPlace(lanes=(8, 40, 72, 104), column=5, position=1)
          >>> TmemLayout.scales().place((256, 8), 168, 5)
          TmemPlace(lanes=(8, 40, 72, 104), column=13, position=1)
        """
        return cls(TmemKind.SCALES, _FIXED_PACKING[TmemKind.SCALES])

    @classmethod
    def scales_m64_collective(cls) -> TmemLayout:
        """Scales of the right operand for two CTAs with M = 128.

        Rows 128 to 255 are in lanes 64 to 127, like the columns of the accumulator that
        they scale (`m64_collective`): `tcgen05.cp.64x128b.warpx2::01_23` multicasts
        half of its rows to warps 0 and 1, the others to 2 and 3 (PTX ISA, tcgen05.cp).

          >>> TmemLayout.scales_m64_collective().place((256, 4), 168, 1)
          TmemPlace(lanes=(72, 104), column=1, position=1)
        """
        kind = TmemKind.SCALES_M64_COLLECTIVE
        return cls(kind, _FIXED_PACKING[kind])

    @classmethod
    def sparse_metadata(cls) -> TmemLayout:
        """2-bit indices of the nonzero elements of a 2:4 sparse left operand.

        It represents the format that `tcgen05.cp` writes and `tcgen05.mma` reads (PTX
        ISA, tcgen05 "Sparse matrices"); it cannot be loaded to registers.

          >>> TmemLayout.sparse_metadata().place((128, 64), 9, 17)
          TmemPlace(lanes=(6,), column=1, position=1)
        """
        kind = TmemKind.SPARSE_METADATA
        return cls(kind, _FIXED_PACKING[kind])

    @functools.cached_property
    def tiled(self) -> TiledLayout:
        """The placement as tiles, the notation of users and of the dialect."""
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
                warps = (-6, Replicated(2))
                return _tiled((256, 4), (128, 4), (32, 4), warp=warps, lane=(-2,))
            case TmemKind.SPARSE_METADATA:
                tiles = ((128, 16), (32, 1), (16, 1), (8, 1))
                return _tiled(*tiles, warp=(-8,), lane=(-2, -4, -6), vector=-7)
            case _:
                assert_never(self.kind)

    @classmethod
    @expect.arguments()
    def from_tiled(cls, tiled: TiledLayout) -> TmemLayout:
        """The layout that tiles describe, in any notation.

        Raises:
          LayoutError: they do not describe a layout of TMEM.
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
            "the tiles do not describe a layout of TMEM",
            expected=" or ".join(kind.value for kind in TmemKind),
            got=tiled,
            hint="use a layout created by TmemLayout",
        )

    # --- arrays -----------------------------------------------------------------------

    @property
    def base_tile_shape(self) -> tuple[int, ...]:
        """The tile: shapes of arrays, and of their parts, are multiples of it."""
        return self.tiled.base_tile_shape

    @property
    def copies(self) -> int:
        """The number of lanes that store each element."""
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
                f"the {self.kind.value} layout of TMEM does not support this shape",
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
                f"{self.packing} elements per column",
                hint="split the array, or pack its elements",
            )

    def columns(self, shape: Sequence[int]) -> int:
        """The number of 32-bit columns of an array.

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

    def digits(self, shape: Sequence[int]) -> TmemDigits:
        """The digits of the places of an array.

        Raises:
          LayoutError: see `check`.
        """
        self.check(shape)
        return _digits(self.tiled, tuple(shape))

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
            text += f" with {self.packing} elements per column"
        return text


TmemLayout.SCALES_LAYOUT = TmemLayout.scales()
TmemLayout.SPARSE_METADATA_LAYOUT = TmemLayout.sparse_metadata()
TmemLayout.SCALES_M64_COLLECTIVE_LAYOUT = TmemLayout.scales_m64_collective()
TmemLayout.M64_COLLECTIVE_LAYOUT = TmemLayout.m64_collective


def allocated_columns(columns: int) -> int:
    """The size of an allocation for this many columns: a power of two, at least 32."""
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


def _digits(tiled: TiledLayout, shape: tuple[int, ...]) -> TmemDigits:
    """Distributes the digits of each coordinate over lanes, columns and positions."""
    dims = tiled.tiling.dims
    grid = zip(tiled.tiling.grid(shape), tiled.base_tile_shape, strict=True)
    # Tiles along the rows are neighbours: one instruction reads the scales of all its
    # rows or columns. Other kinds have one tile of rows.
    outer = [TiledDim(i - 2, n, s) for i, (n, s) in enumerate(grid)][::-1]
    partition: tuple[PartitionDim, ...] = (*tiled.warp_dims, *tiled.lane_dims)
    taken = (*partition, tiled.vector_dim)
    free = [dim for i, dim in enumerate(dims) if i - len(dims) not in taken]
    lane = [dim if isinstance(dim, Replicated) else dims[dim] for dim in partition]
    return TmemDigits(tuple(lane), (*outer, *free), (dims[tiled.vector_dim],))


@functools.lru_cache(maxsize=64)
def _places(tiled: TiledLayout, shape: tuple[int, ...]) -> TmemPlaces:
    """Places of all elements."""
    digits, coordinates = _digits(tiled, shape), np.indices(shape)

    def number(chosen: Sequence[TiledDim]) -> np.ndarray:
        result = np.zeros(shape, dtype=np.int64)
        for dim in chosen:
            digit = coordinates[dim.axis] // dim.stride % dim.size
            result = result * dim.size + digit
        return result

    lanes = np.zeros((*shape, 1), dtype=np.int64)
    for dim in digits.lane:
        if isinstance(dim, Replicated):
            lanes = lanes * dim.times
            lanes = (lanes[..., None] + np.arange(dim.times)).reshape(*shape, -1)
        else:
            lanes = lanes * dim.size + number([dim])[..., None]
    result = TmemPlaces(lanes, number(digits.column), number(digits.position))
    for array in result:
        array.flags.writeable = False
    return result
