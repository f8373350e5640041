# SPDX-License-Identifier: Apache-2.0
"""Where an element of a shared-memory array is stored: suffix tiling, then swizzle."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts.drawing.drawing import Drawable
from pallas_gpu.layouts.reshaped import groups
from pallas_gpu.layouts.smem.swizzle import (
    NO_SWIZZLE,
    atom_bytes,
    check_swizzle,
    swizzle_bytes,
)
from pallas_gpu.layouts.window import row_major_strides


@dataclasses.dataclass(frozen=True)
class SmemLayout(Drawable):
    """The physical placement of an array in shared memory.

    With tiling (8, 64) an array (..., M, N) is stored row-major as
    (..., M/8, N/64, 8, 64); the byte offsets are then swizzled.

    Args:
      shape: the logical shape.
      itemsize_bits: width of an element.
      tiling: the tile of the trailing dimensions, or None.
      swizzle: 32, 64 or 128 bytes, 16 for none.

    Raises:
      LayoutError: the tile does not divide the shape, or the minor dimension of the
        tile is not exactly `swizzle` bytes.

      >>> SmemLayout((64, 128), 16, (8, 64), 128).physical_shape
      (8, 2, 8, 64)
    """

    shape: tuple[int, ...]
    itemsize_bits: int
    tiling: tuple[int, ...] | None = None
    swizzle: int = NO_SWIZZLE

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def of(
        cls,
        shape: tuple[int, ...],
        itemsize_bits: int,
        tiling: tuple[int, ...] | None,
        swizzle: int,
    ) -> SmemLayout:
        """Returns the layout; equal ones are one object, with all that it computes."""
        return cls(shape, itemsize_bits, tiling, swizzle)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(s) for s in self.shape))
        if self.tiling is not None:
            object.__setattr__(self, "tiling", tuple(int(t) for t in self.tiling))
        tile = self.tile
        tail = self.shape[len(self.shape) - len(tile) :]
        if len(tile) > len(self.shape) or any(t < 1 for t in tile):
            raise LayoutError(
                "a tiling has at most as many dimensions as the array",
                expected=f"positive sizes for up to {len(self.shape)} dimensions",
                got=f"tiling {self.tiling}",
            )
        if any(s % t for s, t in zip(tail, tile, strict=True)):
            raise LayoutError(
                "the tiling does not divide the array in shared memory",
                expected=f"trailing dimensions that are multiples of {tile}",
                got=f"shape {self.shape}",
                hint="choose another tile or pad the array",
            )
        check_swizzle(self.swizzle)
        if self.swizzle == NO_SWIZZLE:
            return
        minor_bits = self.physical_shape[-1:] and (
            self.physical_shape[-1] * self.itemsize_bits
        )
        if minor_bits != self.swizzle * 8:
            raise LayoutError(
                "the minor dimension of a swizzled array must equal the swizzle",
                expected=f"{self.swizzle * 8 // self.itemsize_bits} elements "
                f"({self.swizzle} bytes)",
                got=f"{self.physical_shape[-1:]} elements of {self.itemsize_bits} bits",
                hint=f"tile with (8, {self.swizzle * 8 // self.itemsize_bits})",
            )

    def reinterpreted(self, shape: tuple[int, ...], itemsize_bits: int) -> SmemLayout:
        """Returns the same bytes as an array of another shape or element width.

        The order of the elements in memory has to be that of the array. So a dimension
        whose tile is not 1 can be merged with those before it, whose tile is 1, and
        split at multiples of its tile.

        Raises:
          LayoutError: the order of the elements would be another one.

          >>> SmemLayout((4, 64, 128), 16, (8, 64), 128).reinterpreted((256, 128), 16)
          SmemLayout(shape=(256, 128), itemsize_bits=16, tiling=(8, 64), swizzle=128)
        """
        if (shape, itemsize_bits) == (self.shape, self.itemsize_bits):
            return self
        shape, bits = tuple(shape), (self.itemsize_bits, itemsize_bits)
        if self.is_plain:
            return SmemLayout.of(shape, itemsize_bits, self.tiling, self.swizzle)
        tile = self.tile or self.shape[-1:]
        tile = (1,) * (len(self.shape) - len(tile)) + tile
        sizes, tile = _scaled(self.shape, *bits), _scaled(tile, *bits)
        found = _tiles_in(sizes, tile, shape) if sizes and tile else ()
        if not found:
            raise LayoutError(
                "a reshape cuts through the tiles of an SMEM array",
                expected=f"{self.description}: dimensions that are merged with those "
                "before them whose tile is 1, or split at multiples of their tile",
                got=f"{self.shape} in the shape {shape}"
                + (f", as elements of {bits[1]} bits" if bits[0] != bits[1] else ""),
                hint="merge or split dimensions before those of the tile, reshape the "
                "GMEM side of a copy, or declare the array without transforms",
            )
        leading = next((i for i, t in enumerate(found) if t != 1), len(found))
        whole = self.tiling is None and found[leading:] == shape[-1:]
        tiling = None if whole else found[min(leading, max(len(found) - 2, 0)) :]
        return SmemLayout.of(shape, itemsize_bits, tiling, self.swizzle)

    @property
    def tile(self) -> tuple[int, ...]:
        """The tile, empty if there is none."""
        return self.tiling or ()

    @functools.cached_property
    def physical_shape(self) -> tuple[int, ...]:
        """The shape in memory, row-major, before swizzling."""
        lead = len(self.shape) - len(self.tile)
        counts = tuple(
            s // t for s, t in zip(self.shape[lead:], self.tile, strict=True)
        )
        return self.shape[:lead] + counts + self.tile

    @property
    def is_plain(self) -> bool:
        """Whether the array is stored row-major."""
        return not self.tile and self.swizzle == NO_SWIZZLE

    @property
    def description(self) -> str:
        """The transforms that correspond to the layout, for messages."""
        if self.is_plain:
            return "no transforms"
        tiling = "no tiling" if self.tiling is None else f"tiling {self.tiling}"
        if self.swizzle == NO_SWIZZLE:
            return tiling
        return f"{tiling}, {self.swizzle}-byte swizzle"

    @property
    def size_bytes(self) -> int:
        """The size of the array in bytes, a partial last byte included."""
        return -(-math.prod(self.shape) * self.itemsize_bits // 8)

    @property
    def alignment_bytes(self) -> int:
        """The required alignment of the base (16: TMA, PTX ISA "Bulk copy")."""
        return atom_bytes(self.swizzle)

    @functools.cached_property
    def axis_strides(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each axis the tile's size, elements between tiles, elements within one.

        An axis without tiling counts as tiles of one element.
        """
        physical = np.array(row_major_strides(self.physical_shape), dtype=np.int64)
        rank, reach = len(self.shape), len(self.tile)
        inner = np.zeros(rank, dtype=np.int64)
        inner[rank - reach :] = physical[rank:]
        tile = np.ones(rank, dtype=np.int64)
        tile[rank - reach :] = self.tile
        return tile, physical[:rank], inner

    def linear_bit_offset(self, coordinates: np.ndarray) -> np.ndarray:
        """Bit offsets before swizzling of coordinates [..., rank]."""
        tile, outer, inner = self.axis_strides
        elements = (coordinates // tile) @ outer + (coordinates % tile) @ inner
        return elements * self.itemsize_bits

    def byte_offset(self, coordinate: Sequence[int]) -> int:
        """The swizzled byte offset of the element at `coordinate`.

        An element of fewer than 8 bits shares its byte with adjacent ones.
        """
        bits = self.linear_bit_offset(np.asarray(coordinate, dtype=np.int64))
        return swizzle_bytes(int(bits) // 8, self.swizzle)

    def byte_offsets(self, coordinates: np.ndarray) -> np.ndarray:
        """Swizzled byte offsets of coordinates [..., rank]."""
        return swizzle_bytes(self.linear_bit_offset(coordinates) // 8, self.swizzle)


def _scaled(sizes: tuple[int, ...], before: int, after: int) -> tuple[int, ...]:
    """Sizes in elements of another width, in bits; empty where parts are left."""
    last, cut = divmod(sizes[-1] * before, after)
    return () if cut else (*sizes[:-1], last)


def _tiles_in(
    sizes: tuple[int, ...], tile: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[int, ...]:
    """The tile of the same array in another shape, empty if there is none."""
    if math.prod(sizes) != math.prod(shape):
        return ()
    tiled = [(n, t) for n, t in zip(sizes, tile, strict=True) if n != 1]
    wanted = [i for i, n in enumerate(shape) if n != 1]
    result = [1] * len(shape)
    for before, after in groups([n for n, _ in tiled], [shape[i] for i in wanted]):
        *outer, inner = (tiled[i][1] for i in before)
        last = wanted[after[-1]]
        if any(t != 1 for t in outer) or shape[last] % inner:
            return ()
        result[last] = inner
    return tuple(result)
