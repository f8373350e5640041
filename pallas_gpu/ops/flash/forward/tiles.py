# SPDX-License-Identifier: Apache-2.0
"""Attention for Hopper: the memory of a block, and the tiles that it visits."""

from __future__ import annotations

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


def visits(p: Problem[AttentionConfig], mem: Memory) -> Visits:
    """Returns the tiles of a block, in the order in which its warpgroups visit them."""
    worker = lax.axis_index("worker")
    return Visits(p.tiles, worker, p.workers, mem.get("schedule"))


def tile_and_blocks(
    p: Problem[AttentionConfig], mem: Memory, number: Any
) -> tuple[Tile, Blocks]:
    """Returns a tile, and the blocks that it sees."""
    tile = p.tile_of(mem, *p.place(number), p.config.block_q)
    of_segments = None
    if p.mask.segments:
        number = divide(tile.start, p.config.block_q)
        of_segments = Blocks.loaded(mem.of_segments.at[tile.batch, number])
    return tile, p.blocks(tile, of_segments)


def rows_of(p: Any, ref: Any, tile: Tile, first: Any, size: int, head: Any) -> Any:
    rows = plgpu.ds(first, size)
    return ref.at[rows, head] if p.packed else ref.at[tile.batch, rows, head]


def q_buffer(p: Problem[AttentionConfig], position: Any) -> Any:
    return lax.rem(position, np.int32(2)) if p.persistent else 0
