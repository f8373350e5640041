# SPDX-License-Identifier: Apache-2.0
"""Attention for Hopper: the memory of a block, and the tiles that it visits."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.ops.flash.config import AttentionConfig
from pallas_gpu.ops.flash.masks import Blocks
from pallas_gpu.ops.flash.persistent import Visits
from pallas_gpu.ops.flash.problem import Problem, Tile
from pallas_gpu.ops.folded import divide
from pallas_gpu.ops.memory import Memory


@dataclasses.dataclass(frozen=True)
class Work:
    """The tiles of a block, in the order in which all its warpgroups visit them."""

    p: Problem[AttentionConfig]
    mem: Memory

    @property
    def visits(self) -> Visits:
        """Their numbers."""
        return Visits(
            self.p.tiles,
            lax.axis_index("worker"),
            self.p.workers,
            self.mem.get("schedule"),
        )

    def for_each(self, visit: Any, carry: Any) -> Any:
        """Calls `visit(position, number, following, carry)`; see `Visits`."""
        return self.visits.for_each(visit, carry)

    def at(self, number: Any) -> tuple[Tile, Blocks]:
        """Returns a tile and the blocks that it sees."""
        p, mem = self.p, self.mem
        tile = p.tile_of(mem, *p.place(number), p.config.block_q)
        of_segments = None
        if p.mask.segments:
            row = mem.of_segments.at[tile.batch, divide(tile.start, p.config.block_q)]
            of_segments = Blocks(*(row[i] for i in range(len(Blocks._fields))))
        return tile, p.blocks(tile, of_segments)


def rows_of(p: Any, ref: Any, tile: Tile, first: Any, size: int, head: Any) -> Any:
    """Returns rows of one head of an array; `first` counts in the array."""
    rows = plgpu.ds(first, size)
    return ref.at[rows, head] if p.packed else ref.at[tile.batch, rows, head]


def q_buffer(p: Problem[AttentionConfig], position: Any) -> Any:
    return lax.rem(position, np.int32(2)) if p.persistent else 0
