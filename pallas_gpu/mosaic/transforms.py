# SPDX-License-Identifier: Apache-2.0
"""How a slice of GMEM is arranged in SMEM: tiles and transposes of its dimensions."""

from __future__ import annotations

import abc
import dataclasses
import enum
from collections.abc import Sequence

from pallas_gpu import errors
from pallas_gpu.layouts.gmem.tma_view import PhysicalDim


class Rounding(enum.Enum):
    """How a size is made a multiple: by less (`DOWN`) or by more (`UP`)."""

    UP = enum.auto()
    DOWN = enum.auto()


class MemRefTransform(abc.ABC):
    """A rearrangement of the dimensions of a slice of GMEM, on its way to SMEM."""

    @abc.abstractmethod
    def transform_dims(self, dims: Sequence[PhysicalDim]) -> list[PhysicalDim]:
        """Returns the dims, outermost first, after the rearrangement.

        Each is some steps along GMEM's; `smem_stride` is not used.
        """

    def transform_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape in SMEM of a slice of some shape."""
        dims = [PhysicalDim(i, n, 1, 0) for i, n in enumerate(shape)]
        return tuple(dim.size for dim in self.transform_dims(dims))

    def batch(self, leading_rank: int) -> MemRefTransform:
        """Returns the transform of a slice with more dimensions in front."""
        del leading_rank
        return self


@dataclasses.dataclass(frozen=True)
class TileTransform(MemRefTransform):
    """Divides the last dimensions into tiles, which are adjacent in SMEM.

    Each size is a multiple of its tile in `tiling`; with `rounding=Rounding.DOWN`
    elements behind the last whole tile are dropped.

      >>> TileTransform((8, 64)).transform_shape((5, 128, 128))
      (5, 16, 2, 8, 64)
    """

    tiling: tuple[int, ...]
    rounding: Rounding | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiling", tuple(self.tiling))
        if self.rounding is Rounding.UP:
            raise errors.UnsupportedError(
                "A tiling that rounds up is not supported",
                expected="rounding=None or Rounding.DOWN",
                got=self.rounding,
                hint="let the slice exceed the array: a copy reads zeros there",
            )

    def transform_dims(self, dims: Sequence[PhysicalDim]) -> list[PhysicalDim]:
        """Returns the dims of the tiles, then those of a tile."""
        rank = len(self.tiling)
        if rank > len(dims):
            raise errors.LayoutError(
                "A tiling has more dimensions than the slice",
                expected=f"at most {len(dims)} sizes",
                got=f"TileTransform({self.tiling})",
            )
        lead, tiled = dims[: len(dims) - rank], dims[len(dims) - rank :]
        outer, inner = [], []
        for dim, tile in zip(tiled, self.tiling, strict=True):
            if dim.size % tile and self.rounding is None:
                raise errors.LayoutError(
                    "The slice does not consist of whole tiles",
                    expected=f"last sizes that are multiples of {self.tiling}",
                    got=f"sizes {tuple(d.size for d in dims)}",
                    hint="let the slice exceed the array: a load reads zeros there, "
                    "and a store drops what is outside",
                )
            whole = dataclasses.replace(dim, size=dim.size // tile * tile)
            outer.append(whole.loop_over(dim.size // tile))
            inner.append(dataclasses.replace(dim, size=tile))
        return [*lead, *outer, *inner]


@dataclasses.dataclass(frozen=True)
class TransposeTransform(MemRefTransform):
    """Puts the dimensions in the order of `permutation`, which has those of the slice.

    >>> TransposeTransform((1, 0)).transform_shape((64, 128))
    (128, 64)
    """

    permutation: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "permutation", tuple(self.permutation))
        if sorted(self.permutation) != list(range(len(self.permutation))):
            raise errors.ArgumentError(
                "The dimensions of a transpose are not a permutation",
                expected=f"each of 0 to {len(self.permutation) - 1} once",
                got=self.permutation,
            )

    def transform_dims(self, dims: Sequence[PhysicalDim]) -> list[PhysicalDim]:
        """Returns the dims in the other order."""
        if len(dims) != len(self.permutation):
            raise errors.LayoutError(
                "A transpose and the slice have different ranks",
                expected=f"a permutation of {len(dims)} dimensions",
                got=f"TransposeTransform({self.permutation})",
            )
        return [dims[p] for p in self.permutation]

    def batch(self, leading_rank: int) -> TransposeTransform:
        """Returns the transpose that leaves more dimensions in front as they are."""
        moved = (p + leading_rank for p in self.permutation)
        return TransposeTransform((*range(leading_rank), *moved))
