# SPDX-License-Identifier: Apache-2.0
"""Tile sizes and schedule of `ragged_dot`."""

from __future__ import annotations

import dataclasses

from pallas_gpu import arch, errors, expect
from pallas_gpu.ops.gemm.config import CONSUMERS as CONSUMERS
from pallas_gpu.ops.gemm.config import Tiling
from pallas_gpu.ops.rules import Positive, Stages, Strip, require_tile

# Groups whose sums one warp computes, without scratch.
_FEW_GROUPS = 32
# Registers per thread of the producer and of a consumer, by whether all threads of the
# producer gather rows: (40 + 2 * 232) * 128 threads use 64512 of an SM's 65536.
REGISTERS = {False: (40, 232), True: (72, 216)}


@expect.arguments()
@dataclasses.dataclass(frozen=True)
class RaggedDotConfig(Tiling):
    """Tile sizes and schedule of `ragged_dot` on Hopper.

    Attributes:
      tile_m: rows of one consumer's tile; a block has twice as many.
      tile_n: columns of a block's tile.
      tile_k: depth of one step.
      stages: SMEM buffers of each operand's ring.
      epilogue_n: columns of a tile that are stored at once.
      strip: tiles of rows of a group that are visited one after the other, for each
        tile of columns. Their part of the group's matrix is read from memory once; of a
        product over rows, one block computes them, and keeps the columns of the right
        operand in SMEM if they have no more steps than there are stages.
      blocks: number of blocks of products over rows; one per SM. For the others, whose
        tiles differ in their work, the launch has as many as the GPU holds.

    Raises:
      ArgumentError: sizes that do not match each other or the tensor core.
    """

    tile_m: int = 64
    tile_n: int = 256
    tile_k: int = 64
    stages: Stages = 4
    epilogue_n: int = 32
    strip: Strip = 16
    blocks: Positive = arch.SM_90A.sm_count

    def __post_init__(self):
        m, n, k = self.tile_m, self.tile_n, self.tile_k
        require_tile("RaggedDotConfig", m, n, k)
        if self.epilogue_n < 16 or self.epilogue_n % 16 or n % self.epilogue_n:
            raise errors.ArgumentError(
                "RaggedDotConfig: the epilogue's parts do not divide the tile",
                expected=f"epilogue_n a multiple of 16 that divides {n}",
                got=f"epilogue_n={self.epilogue_n}",
                hint="32 fits most tiles",
            )

    @classmethod
    @expect.arguments(groups=expect.integer(1))
    def default(
        cls,
        groups: int,
        *,
        contracted: bool = False,
        gated: bool = False,
        narrow: bool = False,
    ) -> RaggedDotConfig:
        """Returns the configuration that `benchmarks/ragged_dot.py` measures.

        Args:
          groups: number of groups. The table of more than a few takes SMEM from the
            epilogue.
          contracted: for a product over the rows of each group.
          gated: for two products, whose accumulators share the registers.
          narrow: for operands of 8 bits: a step of as many bytes is twice as deep.
        """
        is_small = groups <= _FEW_GROUPS
        # Products over many rows do not stay in SMEM: single tiles balance better.
        strip = (1 if is_small else 8) if contracted else 16
        return cls(
            tile_n=128 if gated else 256,
            tile_k=128 if narrow else 64,
            epilogue_n=64 if is_small else 32,
            strip=strip,
        )
