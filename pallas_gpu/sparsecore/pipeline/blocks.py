# SPDX-License-Identifier: Apache-2.0
"""Which block of an array a step of a pipeline accesses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from pallas_gpu import errors, expect
from pallas_gpu.pipeline.index_maps import block_index
from pallas_gpu.sparsecore.types import Space
from pallas_gpu.types.block_spec import Blocked, is_squeezed, shape_of, size_of
from pallas_gpu.types.indexing import ds


@expect.arguments(block_size=expect.integer(1, unit="elements"))
@dataclasses.dataclass(frozen=True)
class Indirect:
    """A block dimension of `block_size` rows that indices name.

    The index map returns for it a reference to int32 indices in VMEM, of shape
    `(block_size,)`, a vector, or `plsc.Indices`. It is the first dimension: the block
    of an argument is gathered, that of a result scattered.
    """

    block_size: int


@expect.arguments(
    block_shape=expect.optional(shape_of(Blocked, Indirect)),
    pipeline_mode=expect.refused(None, "leave it out: a block has two buffers"),
    memory_space=expect.optional(expect.instance(Space, written="plsc.VMEM")),
)
@dataclasses.dataclass(frozen=True)
class BlockSpec:
    """Which block of an array a step of a pipeline accesses.

    Attributes:
      block_shape: one entry a dimension: an integer, `None` (size one, squeezed),
        `Blocked` or `Indirect`. The array consists of whole blocks. None: the body gets
        the array itself.
      index_map: from grid indices to the block's index, one integer a dimension. None:
        always the first block.
      pipeline_mode: None: a block has two buffers.
      memory_space: where the block is copied to; None: VMEM, on scalar subcores SMEM.
        HBM: the body gets the array itself.

    Raises:
      ArgumentError, ArgumentTypeError: an invalid value, a block size that is not
        positive.
      UnsupportedError: pipeline_mode.
    """

    block_shape: Sequence[Any] | None = None
    index_map: Callable[..., Any] | None = None
    pipeline_mode: None = None
    memory_space: Space | None = dataclasses.field(default=None, kw_only=True)

    @property
    def is_whole(self) -> bool:
        """Whether the body gets the array itself."""
        space = self.memory_space
        return self.block_shape is None or (space is not None and space.name == "HBM")

    @property
    def entries(self) -> tuple[Any, ...]:
        """The entries of `block_shape`."""
        return tuple(self.block_shape or ())

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a block, without squeezed dimensions."""
        kept = (entry for entry in self.entries if not is_squeezed(entry))
        return tuple(map(size_of, kept))

    def check(self, shape: Sequence[int], what: str) -> None:
        """Raises ShapeError unless an array consists of whole blocks."""
        if self.is_whole:
            return
        sizes = [size_of(entry) for entry in self.entries]
        rows = zip(self.entries, sizes, shape, strict=False)
        if len(sizes) == len(shape) and not any(
            n % size for entry, size, n in rows if not isinstance(entry, Indirect)
        ):
            return
        raise errors.ShapeError(
            f"emit_pipeline: {what} does not consist of whole blocks",
            expected=f"multiples of {tuple(sizes)}",
            got=f"shape {tuple(shape)}",
            hint="pad the array before the call, or choose other blocks",
        )

    def index(self, indices: Sequence[Any], what: str) -> tuple[Any, ...]:
        """Returns what the index map returns for a position of the grid.

        Raises:
          ArgumentError, ArgumentTypeError: the map has the wrong results.
        """
        rank, is_indirect = len(self.entries), lambda entry: isinstance(entry, Indirect)
        return tuple(block_index(self, indices, rank, what, is_indirect))

    def part(self, ref: Any, index: Sequence[Any]) -> Any:
        """Returns the block with an index as a part of the array."""
        return ref.at[tuple(map(_selected, self.entries, index))]


def _selected(entry: Any, index: Any) -> Any:
    if is_squeezed(entry) or isinstance(entry, Indirect):
        return index
    size = size_of(entry)
    return ds(index * size, size)


def differ(one: Sequence[Any], other: Sequence[Any]) -> Any:
    """Returns whether two blocks are different ones: a bool, or a scalar."""
    either: Any = False
    for a, b in zip(one, other, strict=True):
        if a is b or (isinstance(a, int) and isinstance(b, int) and a == b):
            continue
        either = either | (jnp.asarray(a) != jnp.asarray(b))
    return either
