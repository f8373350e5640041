# SPDX-License-Identifier: Apache-2.0
"""Tile sizes and schedule of the matrix product on Hopper."""

from __future__ import annotations

import dataclasses
from typing import Literal

from pallas_gpu import arch, errors, expect
from pallas_gpu.ops.rules import Positive, Stages, Strip, require_tile
from pallas_gpu.ops.tiles import CLUSTERS

CONSUMERS = 2


class Tiling:
    """Sizes that follow from those of a consumer's tile, and from the cluster."""

    tile_m: int
    tile_n: int
    consumers: int = CONSUMERS
    cluster: Literal["n", "m"] | None = None
    transposed: bool = False
    parts: int = 1

    @property
    def block_m(self) -> int:
        """Rows of a block's tile."""
        return self.consumers * self.tile_m

    @property
    def cluster_size(self) -> int:
        """Blocks of a cluster."""
        return 1 if self.cluster is None else 2

    @property
    def cluster_tile(self) -> tuple[int, int]:
        """Rows and columns of a cluster's tile."""
        along_m, along_n = CLUSTERS[self.cluster]
        return self.block_m * along_m, self.tile_n * along_n


@expect.arguments(
    cluster=expect.optional(
        expect.choice("n", "m", hint="'n' shares rows of A, 'm' columns of B")
    )
)
@dataclasses.dataclass(frozen=True)
class MatmulConfig(Tiling):
    """Tile sizes and schedule of `matmul` on Hopper.

    Attributes:
      tile_m: rows of one consumer's tile; a block has twice as many.
      tile_n: columns of a block's tile.
      tile_k: depth of one step.
      stages: SMEM buffers of the ring.
      epilogue_m, epilogue_n: part of a consumer's tile that is stored at once.
      cluster: the dimension along which two blocks form a cluster: `"n"` shares rows of
        A, `"m"` the columns of B, None has no clusters.
      minor: dimension of the output that the order of tiles cuts into strips.
      strip: width of a strip in tiles.
      blocks: number of blocks; one per SM.
      transposed: the tensor core computes the transposed product: rows above are then
        columns of the result, and columns are its rows; A and B change places, too.
      parts: parts of K that are multiplied by different blocks, for few tiles of a long
        K. XLA adds the products and applies the epilogue.

    Raises:
      ArgumentError: sizes that do not match each other or the tensor core.
    """

    tile_m: int = 128
    tile_n: int = 128
    tile_k: int = 64
    stages: Stages = 4
    epilogue_m: int = 64
    epilogue_n: int = 64
    cluster: Literal["n", "m"] | None = "n"
    minor: Literal["m", "n"] = "m"
    strip: Strip = 8
    blocks: int = arch.SM_90A.sm_count
    transposed: bool = False
    parts: Positive = 1

    def __post_init__(self):
        m, n, k = self.tile_m, self.tile_n, self.tile_k
        require_tile("MatmulConfig", m, n, k)
        parts = self.epilogue_m, self.epilogue_n
        if min(parts) < 1 or m % parts[0] or n % parts[1] or parts[0] % 64:
            raise errors.ArgumentError(
                "MatmulConfig: the epilogue's parts do not divide the tile",
                expected=f"epilogue_m a multiple of 64 that divides {m}, epilogue_n a "
                f"divisor of {n}",
                got=f"epilogue_m={parts[0]}, epilogue_n={parts[1]}",
                hint="64 and 64 fit most tiles",
            )
        if self.blocks < self.cluster_size:
            raise errors.ArgumentError(
                "MatmulConfig: there are fewer blocks than in a cluster",
                expected=f"blocks of {self.cluster_size} or more",
                got=self.blocks,
                hint="use one per SM",
            )
