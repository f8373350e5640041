# SPDX-License-Identifier: Apache-2.0
"""Which block of an array a grid step accesses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from pallas_gpu import _jax, errors
from pallas_gpu.types.completion import shows
from pallas_gpu.types.foreign import refuse_foreign
from pallas_gpu.types.params import OOBFillMode
from pallas_gpu.types.spaces.memory_space import MemorySpace
from pallas_gpu.types.transforms import Transform


@dataclasses.dataclass(frozen=True)
class Squeezed:
    """A block dimension of size one that the body's reference lacks (also `None`)."""


@dataclasses.dataclass(frozen=True)
class Blocked:
    """A block dimension of `block_size` elements; the index map counts blocks."""

    block_size: int


@dataclasses.dataclass(frozen=True)
class Element:
    """A block dimension of `block_size` elements; the index map counts elements."""

    block_size: int


@shows()
@dataclasses.dataclass(frozen=True)
class BlockSpec:
    """Which block of an array a grid step accesses.

    Attributes:
      block_shape: one entry a dimension: an integer, `None` (size one, squeezed),
        `Blocked`, `Element`. None for the whole array.
      index_map: from grid indices to the block's index, one integer a dimension. None:
        always the first block.
      memory_space: SMEM (default): the block is copied. GMEM: the body accesses the
        whole array in global memory and the index map is not used.
      transforms: tiling and swizzle of the block in SMEM.
      oob_fill_mode: what the block holds outside of the array; TMA fills with zeros.

    Raises:
      ArgumentError: a block size that is not positive.
    """

    block_shape: Sequence[Any] | None = None
    index_map: Callable[..., Any] | None = None
    pipeline_mode: Any = None
    transforms: Sequence[Transform] = ()
    delay_release: int = 0
    collective_axes: tuple[str, ...] | None = None
    oob_fill_mode: OOBFillMode = OOBFillMode.ZEROS
    memory_space: MemorySpace | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self):
        refuse_foreign(
            (self.block_shape, self.transforms, self.memory_space), "BlockSpec"
        )
        object.__setattr__(self, "transforms", tuple(self.transforms))
        if self.block_shape is not None:
            object.__setattr__(self, "block_shape", tuple(self.block_shape))
        if self.pipeline_mode is not None:
            raise errors.UnsupportedError(
                "BlockSpec: pipeline_mode is not supported",
                expected="None",
                got=repr(self.pipeline_mode),
                hint="leave it out",
                where=_jax.where_now(),
            )
        for dim, entry in enumerate(self.block_shape or ()):
            size = getattr(entry, "block_size", entry)
            if is_squeezed(entry):
                continue
            if not isinstance(size, int) or size < 1:
                raise errors.ArgumentError(
                    "BlockSpec: a block size is not a positive integer",
                    expected="a positive int, None, Blocked or Element",
                    got=f"{entry!r} for dimension {dim}",
                    hint="None squeezes a dimension of size one",
                    where=_jax.where_now(),
                )

    def sizes(self, shape: tuple[int, ...], what: str) -> tuple[int, ...]:
        """Returns the block's size in each dimension of the array.

        Args:
          shape: shape of the array.
          what: name of the argument for error messages.
        """
        if self.block_shape is None:
            return shape
        if len(self.block_shape) != len(shape):
            raise errors.ShapeError(
                f"BlockSpec of {what}: wrong number of block dimensions",
                expected=f"{len(shape)} for an array of shape {shape}",
                got=f"{len(self.block_shape)} (block_shape {self.block_shape})",
                hint="give one entry a dimension; None squeezes a size of one",
            )
        return tuple(
            1 if is_squeezed(entry) else int(getattr(entry, "block_size", entry))
            for entry in self.block_shape
        )

    def squeezed(self, rank: int) -> tuple[bool, ...]:
        """Returns for each dimension whether the body's reference lacks it."""
        if self.block_shape is None:
            return (False,) * rank
        return tuple(is_squeezed(entry) for entry in self.block_shape)


def is_squeezed(entry: Any) -> bool:
    """True for a block dimension that the body's reference lacks."""
    return entry is None or isinstance(entry, Squeezed) or entry is Squeezed


@dataclasses.dataclass(frozen=True)
class GridSpec:
    """Grid, block specs and scratch of a `pallas_call` in one object."""

    grid: int | Sequence[int] = ()
    in_specs: Any = None
    out_specs: Any = None
    scratch_shapes: Any = ()
