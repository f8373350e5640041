# SPDX-License-Identifier: Apache-2.0
"""Metadata of sparse operands: its copies to TMEM, and as an operand of tcgen05.mma."""

from __future__ import annotations

import dataclasses

from pallas_gpu.emitters.smem import SmemView
from pallas_gpu.emitters.tensor_cores import copy
from pallas_gpu.emitters.tensor_cores.scales import Scaling
from pallas_gpu.emitters.tensor_cores.tmem import TmemView
from pallas_gpu.layouts.tmem import sparsity as layouts

# 128 rows of 16 bytes.
_TILE_BYTES = layouts.ROWS * 16


def copy_to_tmem(smem: SmemView, tmem: TmemView, *, collective: bool) -> None:
    """Starts a copy of metadata.

    PTX: `tcgen05.cp.cta_group::{1,2}.128x128b`, one for each tile. Since: sm_100a.
    The elected thread issues it, of a pair that of the leader. Its later tcgen05.mma
    read the copied metadata; for others a later `commit_arrive` completes it.

    Args:
      smem: (1, indices / 64, 128, 64) indices of 2 bits, contiguous.
      tmem: (128, indices).
      collective: whether both CTAs of a pair copy.
    """
    tiles = range(smem.shape[1])
    copies = [(i * _TILE_BYTES, i * layouts.COLUMNS_PER_TILE) for i in tiles]
    copy.start("128x128b", smem, tmem, copies, collective=collective)


@dataclasses.dataclass(frozen=True)
class Sparsity:
    """The metadata of a product, as an operand of its instructions.

    Attributes:
      bits: width of an element of the product's operands.
    """

    bits: int

    registers = "i, m"
    operands = "[m], i"

    def setup(self, step: int, lane: int) -> str:
        """Assembly that sets i and m for a step of K from $3 and $5.

        Args:
          lane: that of the accumulator, of which the metadata has to be, as an address.
        """
        column, selector = layouts.metadata_of(step, self.bits)
        return f"add.u32 i, $3, {selector}; add.u32 m, $5, {lane | column};"


@dataclasses.dataclass(frozen=True)
class ScaledSparsity:
    """Scales and metadata of a product, as operands of its instructions.

    Attributes:
      scaling: the scales; of its operands, of 4 or 8 bits, no selector is in i.
    """

    scaling: Scaling

    registers = "i, sa, sb, m"
    operands = "[m], i, [sa], [sb]"

    def setup(self, step: int, lane: int) -> str:
        """Assembly that sets i, sa, sb and m for a step of K, m from $7."""
        column, _ = layouts.metadata_of(step, 8)
        return f"{self.scaling.setup(step, lane)} add.u32 m, $7, {column};"
