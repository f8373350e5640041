# SPDX-License-Identifier: Apache-2.0
"""Tile sizes and schedule of the matrix product with few rows or few tiles."""

from __future__ import annotations

import dataclasses
import math

import pallas_gpu as plgpu
from pallas_gpu import arch, errors, expect
from pallas_gpu.ops.rules import Positive, Stages

# Rows of a tile whose sums the blocks of a cluster send each other: for more there is
# no SMEM beside the ring.
_MOST_SENT = 32


def sends(c: SplitMatmulConfig, *, is_once: bool) -> bool:
    """Whether the blocks of a cluster send their sums to the block that adds them.

    Args:
      is_once: no block has a second tile.
    """
    return c.split > 1 and is_once and c.tile_m <= _MOST_SENT


def rows_sent(c: SplitMatmulConfig) -> int:
    """Rows whose sums a block is sent, at most; the last ones may have none."""
    # An instruction has 8 columns in the registers of a warp.
    return plgpu.align_to(plgpu.cdiv(c.tile_m, c.split), 8)


@expect.arguments()
@dataclasses.dataclass(frozen=True)
class SplitMatmulConfig:
    """Tile sizes and schedule of `matmul` on Hopper for few rows or few tiles.

    Attributes:
      tile_m: rows of a tile, a multiple of 8 up to 256.
      tile_n: columns of a tile, a multiple of 64 for each of the warpgroups.
      tile_k: depth of one step.
      stages: SMEM buffers of the ring.
      warpgroups: warpgroups of a block that multiply.
      split: blocks of a cluster that divide K.
      clusters: clusters that divide K among each other.
      part_m: rows that are stored at once; None: up to 64.
      blocks: maximum number of blocks of the launch, which then loop over tiles.

    Raises:
      ArgumentError: sizes that do not match each other or the tensor core.
    """

    tile_m: int = 64
    tile_n: int = 128
    tile_k: int = 64
    stages: Stages = 4
    warpgroups: int = 2
    split: int = 1
    clusters: Positive = 1
    part_m: int | None = None
    blocks: int = 2 * arch.SM_90A.sm_count

    def __post_init__(self):
        m, n, k = self.tile_m, self.tile_n, self.tile_k
        # wgmma: N is a multiple of 8 up to 256, K of 16 for 16-bit types.
        if not 8 <= m <= 256 or m % 8 or k < 16 or k % 16:
            raise errors.ArgumentError(
                "SplitMatmulConfig: the tensor core does not support this tile",
                expected="tile_m a multiple of 8 up to 256, tile_k of 16",
                got=f"tile_m={m}, tile_k={k}",
                hint="start from SplitMatmulConfig()",
            )
        if self.warpgroups < 1 or n < 1 or n % (64 * self.warpgroups):
            raise errors.ArgumentError(
                "SplitMatmulConfig: the warpgroups do not divide the columns",
                expected="tile_n a multiple of 64 for each warpgroup",
                got=f"tile_n={n}, warpgroups={self.warpgroups}",
                hint="start from SplitMatmulConfig()",
            )
        if self.split not in (1, 2, 4, 8):
            raise errors.ArgumentError(
                "SplitMatmulConfig: invalid division of K",
                expected="split 1, 2, 4 or 8",
                got=f"split={self.split}",
                hint="every GPU can run clusters of up to 8 blocks",
            )
        part = self.part
        if part < 8 or part % 8 or m % part:
            raise errors.ArgumentError(
                "SplitMatmulConfig: the parts do not divide the rows of a tile",
                expected=f"a multiple of 8 that divides {m}",
                got=f"part_m={part}",
                hint="None suits most tiles",
            )
        blocks = self.split * self.clusters
        if blocks > self.blocks:
            raise errors.ArgumentError(
                "SplitMatmulConfig: there are too few blocks",
                expected=f"{blocks} or more blocks",
                got=f"blocks={self.blocks}",
                hint="start from SplitMatmulConfig()",
            )

    @property
    def cluster_tile(self) -> tuple[int, int]:
        """Rows and columns of a cluster's tile."""
        return self.tile_m, self.tile_n

    @property
    def part(self) -> int:
        """Rows that are stored at once."""
        return math.gcd(self.tile_m, 64) if self.part_m is None else self.part_m

    @property
    def own_n(self) -> int:
        """Columns of one warpgroup."""
        return self.tile_n // self.warpgroups
