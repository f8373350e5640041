# SPDX-License-Identifier: Apache-2.0
"""Which block of an array a grid step accesses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from pallas_gpu import errors, expect
from pallas_gpu.types.completion import shows
from pallas_gpu.types.params import OOBFillMode
from pallas_gpu.types.spaces.memory_space import MemorySpace, memory_space
from pallas_gpu.types.transforms import Transform, transforms


@dataclasses.dataclass(frozen=True)
class Squeezed:
    """A block dimension of size one that the body's reference lacks (also `None`)."""


squeezed = Squeezed()


_SIZE = expect.integer(1, unit="elements")


@expect.arguments(block_size=_SIZE)
@dataclasses.dataclass(frozen=True)
class Blocked:
    """A block dimension of `block_size` elements; the index map counts blocks."""

    block_size: int


def _padding(value: Any, what: str) -> tuple[int, int]:
    padding = expect.integers(0)(value, what)
    if len(padding) == 2:
        return padding[0], padding[1]
    raise errors.ArgumentError(
        f"{what} is not a pair",
        expected="the number of elements before the array and after it",
        got=padding,
        hint="write padding=(1, 1) for a halo of one element",
    )


@expect.arguments(block_size=_SIZE, padding=_padding)
@dataclasses.dataclass(frozen=True)
class Element:
    """A block dimension of `block_size` elements; the index map counts elements.

    Attributes:
      block_size: number of elements.
      padding: number of elements before the array and after it that blocks may contain
        as well. Index 0 is the first one of them. A block of an argument holds there
        what `BlockSpec.oob_fill_mode` says. A result has padding after it alone, which
        is not stored.
    """

    block_size: int
    padding: tuple[int, int] = (0, 0)


@expect.arguments(block_size=_SIZE)
@dataclasses.dataclass(frozen=True)
class BoundedSlice:
    """A block dimension of up to `block_size` elements, of an argument.

    The index map returns `plgpu.ds(start, size)` for it, in elements, where start and
    size may be computed from the grid indices and `size` is at most `block_size`. The
    body's reference has `block_size` elements; those after the slice are the array's
    next ones, or outside of the array.
    """

    block_size: int


# An entry of `BlockSpec.block_shape`.
type BlockDim = int | Squeezed | Blocked | Element | BoundedSlice | None


def shape_of(*kinds: type) -> expect.Rule:
    """Accepts a sequence of sizes, None, and objects of these kinds."""
    *names, last = (kind.__name__ for kind in kinds)
    expected = f"a positive int, None, {', '.join(names)} or {last}"

    def check(value: Any, what: str) -> tuple[Any, ...]:
        if not expect.is_sequence(value):
            hint = "write (64, 128)"
            if callable(value):
                hint = "the shape is first: BlockSpec((64, 128), lambda i: (i, 0))"
            raise expect.wrong_type(
                what, "a sequence", "one entry a dimension", value, hint
            )
        return tuple(entry_of(entry, dim) for dim, entry in enumerate(value))

    def entry_of(entry: Any, dim: int) -> Any:
        size = expect.index(entry)
        if is_squeezed(entry) or isinstance(entry, kinds):
            return entry
        if size is not None and size >= 1:
            return size
        raise errors.ArgumentError(
            "BlockSpec: a block size is not a positive integer",
            expected=expected,
            got=f"{expect.shown(entry)} for dimension {dim}",
            hint="None squeezes a dimension of size one",
        )

    return check


def size_of(entry: Any) -> int:
    """Returns the size of a block in the dimension of an entry of its shape."""
    return 1 if is_squeezed(entry) else int(getattr(entry, "block_size", entry))


@expect.arguments(
    block_shape=expect.optional(shape_of(Blocked, Element, BoundedSlice)),
    pipeline_mode=expect.refused(
        None,
        "leave it out; max_concurrent_steps is the number of buffers of all blocks",
    ),
    transforms=transforms,
    delay_release=expect.integer(0, unit="steps"),
    oob_fill_mode=expect.optional(expect.member(OOBFillMode)),
    memory_space=expect.optional(memory_space),
)
@shows("replace")
@dataclasses.dataclass(frozen=True)
class BlockSpec:
    """Which block of an array a grid step accesses.

    Attributes:
      block_shape: one entry a dimension: an integer, `None` (size one, squeezed),
        `Blocked`, `Element`, `BoundedSlice`. None for the whole array.
      index_map: from grid indices to the block's index, one integer a dimension. None:
        always the first block. With `PrefetchScalarGridSpec`, the references of the
        first arguments follow the grid indices.
      memory_space: SMEM: the block is copied. GMEM: the body accesses the block in
        global memory, or the whole array if there is no block_shape; where a block
        exceeds the array, the body masks its accesses. Default: SMEM; but GMEM for
        `BlockSpec()` in a `pallas_call` whose grid has a parallel axis, and
        `CompilerParams.block_memory_space`.
      pipeline_mode: not supported, as upstream refuses it on GPUs: the pipeline's
        `max_concurrent_steps` is the number of buffers of all blocks.
      transforms: tiling and swizzle of the block in SMEM.
      delay_release: number of steps of a pipeline, or of the sequential axes of a
        `pallas_call`, for which a block stays after its own step.
      collective_axes: cluster axes of a multicast; `emit_pipeline_warp_specialized`
        only.
      oob_fill_mode: as `oob_mode` of `copy_gmem_to_smem`: what the block holds outside
        of the array. None: zeros; in the emulator, a block that lies entirely outside
        is an error.

    Raises:
      ArgumentError, ArgumentTypeError: an invalid value, a block size that is not
        positive.
      UnsupportedError: pipeline_mode.
    """

    block_shape: Sequence[Any] | None = None
    index_map: Callable[..., Any] | None = None
    pipeline_mode: Any = None
    transforms: Sequence[Transform] = ()
    delay_release: int = 0
    collective_axes: tuple[str, ...] | None = None
    oob_fill_mode: OOBFillMode | None = None
    memory_space: MemorySpace | None = dataclasses.field(default=None, kw_only=True)

    def replace(self, **fields: Any) -> BlockSpec:
        """Returns the spec with other fields, as `dataclasses.replace` does."""
        return dataclasses.replace(self, **fields)

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
        return tuple(map(size_of, self.block_shape))

    def squeezed(self, rank: int) -> tuple[bool, ...]:
        """Returns for each dimension whether the body's reference lacks it."""
        if self.block_shape is None:
            return (False,) * rank
        return tuple(is_squeezed(entry) for entry in self.block_shape)


def is_squeezed(entry: Any) -> bool:
    """True for a block dimension that the body's reference lacks."""
    return entry is None or isinstance(entry, Squeezed) or entry is Squeezed


# For an argument or a result of which a body gets the whole array. CTAs of a
# `pallas_call` share it in GMEM: each would copy all of it to its SMEM.
no_block_spec = BlockSpec()
