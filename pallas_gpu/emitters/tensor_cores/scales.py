# SPDX-License-Identifier: Apache-2.0
"""Scales of blocks: their copies from SMEM to TMEM, and operands of tcgen05.mma.

In SMEM and in TMEM scales lie in tiles of 128 rows by 4 scales: 512 contiguous bytes,
and 4 columns. Tiles along K are neighbours in SMEM; tiles along the rows are in TMEM,
where one instruction reads the scales of all its columns.

Those of b of a pair of CTAs with 64 rows each are in tiles of 64 lanes: the scales of
half of the columns, and behind them those of the other half.
"""

from __future__ import annotations

import dataclasses

from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.smem import SmemView
from pallas_gpu.emitters.tensor_cores import copy
from pallas_gpu.emitters.tensor_cores.tmem import TmemView
from pallas_gpu.layouts.tmem.layout import TmemKind
from pallas_gpu.layouts.tmem.scaled_instruction import (
    COLUMNS_PER_TILE,
    SCALES_PER_COLUMN,
    ScaledInstruction,
)

# Of four rows in a lane.
_LANE_BYTES = 4 * SCALES_PER_COLUMN
TYPES = {dtypes.F8_E8M0: "ue8m0", dtypes.F8_E4M3: "ue4m3"}


def copy_to_tmem(smem: SmemView, tmem: TmemView, *, collective: bool) -> None:
    """Starts a copy of scales.

    PTX: `tcgen05.cp.cta_group::{1,2}.32x128b.warpx4`, one for each tile, and of scales
    in halves `64x128b.warpx2::01_23`. Since: sm_100a. The elected thread issues it, of
    a pair that of the leader. Its later tcgen05.mma read the copied scales; for others
    a later `commit_arrive` completes it.

    Args:
      smem: (rows / 128, scales / 4, 32, 16), contiguous; in halves
        (1, scales / 4, 64, 16).
      tmem: (rows, scales).
      collective: whether both CTAs of a pair copy.
    """
    tiles, groups, lanes, _ = smem.shape
    halved = in_halves(tmem)
    tile_bytes = lanes * _LANE_BYTES
    copies = []
    for tile in range(tiles):
        for group in range(groups):
            offset_bytes = (tile * groups + group) * tile_bytes
            copies.append((offset_bytes, (group * tiles + tile) * COLUMNS_PER_TILE))
    shape = "64x128b.warpx2::01_23" if halved else "32x128b.warpx4"
    copy.start(shape, smem, tmem, copies, collective=collective)


def in_halves(scales: TmemView) -> bool:
    """Whether they are those of b of a pair of CTAs with 64 rows each."""
    return scales.layout.kind is TmemKind.SCALES_M64_COLLECTIVE


# --- operands -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Scaling:
    """The scales of a product, as operands of its instructions.

    Attributes:
      instruction: all of them, but for their scale ids.
      b_tiles: tiles along the rows of b's scales.
    """

    instruction: ScaledInstruction
    b_tiles: int

    registers = "i, sa, sb"
    operands = "i, [sa], [sb]"

    def setup(self, step: int, lane: int) -> str:
        """Assembly that sets i, sa and sb for a step of K from $3, $5 and $6."""
        assert lane == 0, "a block-scaled accumulator starts in the first lane"
        group, ids = self.instruction.scales_of(step)
        columns = group * COLUMNS_PER_TILE
        return (
            f"add.u32 i, $3, {ids}; add.u32 sa, $5, {columns}; "
            f"add.u32 sb, $6, {columns * self.b_tiles};"
        )
