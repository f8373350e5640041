# SPDX-License-Identifier: Apache-2.0
"""Attention for Hopper: the memory of a block, and the tiles that it visits."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.ops import integers
from pallas_gpu.ops.flash.config import AttentionConfig
from pallas_gpu.ops.flash.masks import Blocks, Lengths
from pallas_gpu.ops.flash.persistent import Visits
from pallas_gpu.ops.flash.problem import Problem, Tile
from pallas_gpu.ops.integers import plus, times


@dataclasses.dataclass(frozen=True)
class Memory:
    """The references of a block: inputs, results, scratch."""

    q: Any
    k: Any
    v: Any
    out: Any
    q_smem: Any
    k_smem: Any
    v_smem: Any
    q_full: Any
    k_full: Any
    v_full: Any
    k_empty: Any
    v_empty: Any
    turn: Any
    out_smem: Any = None
    q_empty: Any = None
    lse: Any = None
    bias: Any = None
    bias_smem: Any = None
    bias_full: Any = None
    bias_empty: Any = None
    slopes: Any = None
    scales: Any = None
    q_ids: Any = None
    kv_ids: Any = None
    of_segments: Any = None
    q_lengths: Any = None
    kv_lengths: Any = None
    q_starts: Any = None
    kv_starts: Any = None
    of_tiles: Any = None
    schedule: Any = None


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
            self.mem.schedule,
        )

    def for_each(self, visit: Any, carry: Any) -> Any:
        """Calls `visit(position, number, following, carry)`; see `Visits`."""
        return self.visits.for_each(visit, carry)

    def at(self, number: Any) -> tuple[Tile, Blocks]:
        """Returns a tile and the blocks that it sees."""
        p, mem = self.p, self.mem
        tile = _tile(p, mem, number)
        of_segments = None
        if p.mask.segments:
            row = mem.of_segments.at[
                tile.batch, integers.divide(tile.q_start, p.config.block_q)
            ]
            of_segments = Blocks(*(row[i] for i in range(len(Blocks._fields))))
        return tile, p.blocks(tile, of_segments)


def _tile(p: Problem[AttentionConfig], mem: Memory, linear: Any) -> Tile:
    batch, head, number = p.place(linear)
    if not p.packed:
        lengths = p.lengths
        if p.mask.ragged:
            lengths = Lengths(mem.q_lengths[batch], mem.kv_lengths[batch])
        return Tile(batch, head, times(number, p.config.block_q), lengths)
    batch, q_start = mem.of_tiles[number, 0], mem.of_tiles[number, 1]
    ends = plus(batch, 1)
    q_first, kv_first = mem.q_starts[batch], mem.kv_starts[batch]
    lengths = Lengths(mem.q_starts[ends] - q_first, mem.kv_starts[ends] - kv_first)
    return Tile(batch, head, q_start, lengths, q_first, kv_first)


def rows_of(p: Any, ref: Any, tile: Tile, first: Any, size: int, head: Any) -> Any:
    """Returns rows of one head of an array; `first` counts in the array."""
    rows = plgpu.ds(first, size)
    return ref.at[rows, head] if p.packed else ref.at[tile.batch, rows, head]


def q_buffer(p: Problem[AttentionConfig], position: Any) -> Any:
    return integers.remainder(position, 2) if p.persistent else 0
