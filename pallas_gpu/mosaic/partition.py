# SPDX-License-Identifier: Apache-2.0
"""Equal blocks of an index space, and where each of them starts."""

from __future__ import annotations

from collections.abc import Sequence

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_gpu import errors
from pallas_gpu.mosaic.scalars import c


class Partition:
    """Divides some axes into chunks, each along an axis of a grid.

    Args:
      elements, partition: size of each axis, and the axis of the grid that divides it;
        None: it is whole.
      base_offset: added to each start, of type `index`.
      num_chunks, chunk_size: sizes of the axes of the grid, or of a chunk.

    Raises:
      ArgumentError: chunks do not divide an axis, an axis of the grid divides two, or
        both of the last arguments are given.
    """

    def __init__(
        self,
        elements: tuple[int, ...],
        *,
        partition: tuple[int | None, ...],
        base_offset: tuple[ir.Value, ...] | None = None,
        num_chunks: tuple[int, ...] | None = None,
        chunk_size: tuple[int, ...] | None = None,
    ) -> None:
        if (num_chunks is None) == (chunk_size is None):
            raise _wrong("num_chunks or chunk_size", (num_chunks, chunk_size))
        if num_chunks is None:
            assert chunk_size is not None
            pairs = list(zip(elements, chunk_size, strict=True))
            if any(n % size for n, size in pairs):
                raise _wrong(f"chunks that divide {elements}", chunk_size)
            num_chunks = tuple(n // size for n, size in pairs)
        used = [p for p in partition if p is not None]
        if len(set(used)) != len(used) or any(p >= len(num_chunks) for p in used):
            raise _wrong("different axes of the grid", partition)
        self.target_bounds, self.partition = elements, partition
        self.num_chunks, self.base_offset = num_chunks, base_offset
        axes = list(zip(elements, partition, strict=True))
        if any(p is not None and n % num_chunks[p] for n, p in axes):
            raise _wrong(f"chunks that divide {elements}", num_chunks)
        self.target_block_shape = tuple(
            n if p is None else n // num_chunks[p] for n, p in axes
        )

    def get_base(self, *source_coords: ir.Value | int) -> list[ir.Value]:
        """Returns where the block at some coordinates of the grid starts."""
        index, result = ir.IndexType.get(), []
        for axis, p in enumerate(self.partition):
            base = c(0, index)
            if p is not None:
                at = source_coords[p]
                at = c(at, index) if isinstance(at, int) else at
                base = arith.muli(c(self.target_block_shape[axis], index), at)
            if self.base_offset is not None:
                base = arith.addi(self.base_offset[axis], base)
            result.append(base)
        return result


class Partition1D:
    """Divides one axis into `num_chunks`, or into chunks of `chunk_size`."""

    def __init__(
        self,
        elements: int,
        *,
        base_offset: ir.Value | None = None,
        num_chunks: int | None = None,
        chunk_size: int | None = None,
    ) -> None:
        offset, count, size = (
            None if x is None else (x,) for x in (base_offset, num_chunks, chunk_size)
        )
        self.partition = Partition(
            (elements,), partition=(0,), base_offset=offset, num_chunks=count,
            chunk_size=size,
        )  # fmt: skip
        self.num_chunks, self.base_offset = self.partition.num_chunks[0], base_offset

    def get_base(self, source_coords: ir.Value) -> ir.Value:
        """Returns where a chunk starts."""
        return self.partition.get_base(source_coords)[0]

    def refine(
        self,
        *,
        chunk: ir.Value | None = None,
        num_chunks: int | None = None,
        chunk_size: int | None = None,
    ) -> Partition1D:
        """Returns a division of one chunk, from its start unless `chunk` is None."""
        offset = None if chunk is None else self.get_base(chunk)
        size = self.partition.target_block_shape[0]
        return Partition1D(
            size, base_offset=offset, num_chunks=num_chunks, chunk_size=chunk_size
        )


def _wrong(expected: str, got: Sequence[object]) -> errors.ArgumentError:
    return errors.ArgumentError(
        "A partition does not divide its axes", expected=expected, got=got
    )
