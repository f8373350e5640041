# SPDX-License-Identifier: Apache-2.0
"""Stores of a tile in parts, by TMA, that overlap with what follows."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from pallas_gpu import errors, expect, types
from pallas_gpu.primitives import tma


@expect.arguments(parts=expect.integer(1))
@dataclasses.dataclass(frozen=True)
class TileStore:
    """Buffers through which one warpgroup stores tiles, part by part.

    A part is written to a buffer in SMEM, from which TMA copies it while the next part,
    or the next tile, is computed. Part i of each tile has buffer i % len(buffers), so
    that a tile may begin with the buffer with which the one before has ended: how many
    copies may still be under way is computed from the number of parts.

    PTX: cp.async.bulk.wait_group.read. Since: sm_90.

    Attributes:
      buffers: reference to (number of buffers, *part) in SMEM.
      parts: number of parts of a tile.

    Example:
      >>> store = plgpu.TileStore(out_smem.at[wg], parts=2)
      >>> for part in range(2):
      ...     columns = slice(part * 64, part * 64 + 64)
      ...     store.store(part, tile[:, columns], out.at[rows, plgpu.ds(part * 64, 64)])
      >>> plgpu.wait_smem_to_gmem(0)  # after the last tile
    """

    buffers: Any
    parts: int

    @expect.arguments(part=expect.integer(0))
    def fill(self, part: int) -> Any:
        """Waits until the buffer of a part may be overwritten, and returns it.

        PTX: cp.async.bulk.wait_group.read. Since: sm_90.

        Issued by the warpgroup that stores, for each part of a tile in order. It writes
        the part, then calls `commit_smem`, and starts the copies of the part, which are
        one group: `copy_smem_to_gmem`, also under a predicate.

        Args:
          part: index of the part in its tile.
        """
        count = self.buffers.shape[0]
        # The last part with this buffer: of this tile, or of the one before.
        earlier = part - count
        if earlier < 0:
            earlier = (self.parts - 1 - part) // count * count + part - self.parts
        pending = min(part - 1 - earlier, count - 1)
        tma.wait_smem_to_gmem(pending, wait_read_only=True)
        return self.buffers.at[part % count]

    @expect.arguments(part=expect.integer(0))
    def store(
        self,
        part: int,
        value: Any,
        target: types.Ref,
        *,
        predicate: Any = None,
        transposed: bool = False,
        cache_hint: Any = None,
    ) -> None:
        """Stores a part: registers, SMEM, GMEM.

        PTX: as of `copy_smem_to_gmem`. Since: sm_90.

        Issued by the warpgroup that stores, for each part of a tile in order.
        `wait_smem_to_gmem(0)` waits for all copies.

        Args:
          part: index of the part in its tile.
          value: array of the part's shape, which is converted to the type of the
            buffer; or a function that returns it, called when the buffer is free.
          target: the part in GMEM.
          predicate: scalar bool, whether it is copied there.
          transposed: whether the value is the transposed part.
          cache_hint: as of `copy_smem_to_gmem`.
        """
        buffer = self.fill(part)
        value = value() if callable(value) else value
        written = types.transpose_ref(buffer, (1, 0)) if transposed else buffer
        written[...] = value.astype(self.buffers.dtype)
        tma.commit_smem()
        tma.copy_smem_to_gmem(buffer, target, predicate, cache_hint=cache_hint)

    @expect.arguments()
    def store_all(self, tile: Any, target: types.Ref) -> None:
        """Stores a tile, part by part: row by row of parts of the buffers' shape.

        PTX: as of `copy_smem_to_gmem`. Since: sm_90. Issued as `store`.

        Args:
          tile: array of two dimensions, of `parts` parts.
          target: the tile in GMEM.

        Raises:
          ShapeError: the tile is not divided into `parts` parts.
        """
        rows, columns = part = tuple(self.buffers.shape[1:])
        count = tuple(n // p for n, p in zip(tile.shape, part, strict=False))
        whole = tuple(n * p for n, p in zip(count, part, strict=True))
        if whole != tuple(tile.shape) or math.prod(count) != self.parts:
            raise errors.ShapeError(
                "TileStore.store_all: the tile is not divided into the parts",
                expected=f"{self.parts} part(s) of {part}",
                got=f"a tile of {tuple(tile.shape)}",
                hint="pass the number of parts to TileStore",
            )
        for i in range(self.parts):
            top, left = i // count[1] * rows, i % count[1] * columns
            at = slice(top, top + rows), slice(left, left + columns)
            self.store(i, tile[at], target.at[at])
