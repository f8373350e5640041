# SPDX-License-Identifier: Apache-2.0
"""Attention's derivatives: sizes, the order of blocks, the tiles that each visits."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.ops.flash.backward.config import (
    CONSUMERS,
    MAX_NARROW,
    ROWS,
    AttentionBackwardConfig,
)
from pallas_gpu.ops.flash.masks import Blocks, Lengths, Mask
from pallas_gpu.ops.flash.persistent import of_workers
from pallas_gpu.ops.flash.problem import Sizes, Tile
from pallas_gpu.ops.folded import divide, maximum, minimum, minus, plus, split, times

# Copies of the statistics of packed sequences, each a number further: TMA starts at
# multiples of 16 bytes.
SHIFTS = 4
# What the beginning and the end of a tile cost, in steps: a guess.
_STEPS_OF_A_TILE = 1.0


@dataclasses.dataclass(frozen=True)
class BackwardProblem(Sizes[AttentionBackwardConfig]):
    """A backward pass.

    Attributes:
      parts: of the heads of Q that share a head of K and V. `kv_heads` counts them:
        each has blocks of its own.
    """

    parts: int = 1

    def divided(self, parts: int) -> BackwardProblem:
        """Returns it with so many parts of the heads of Q that share K and V.

        Persistent blocks alone add parts: others have no buffer for that.
        """
        heads = self.kv_heads * parts
        found = dataclasses.replace(self, kv_heads=heads, parts=parts)
        return found if found.persistent else self

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the kernels' arrays.

        lse and delta are (batch, heads, padded_q_len); see `gradients`.
        """
        names = ["q", "k", "v", "do", "lse", "delta"]
        if self.scores.alibi:
            names.append("slopes")
        if self.bias is not None:
            names.append("bias")
        if self.mask.segments:
            names += ["of_segments", "q_ids", "kv_ids"]
        if self.packed:
            names += ["of_tiles", "q_starts", "kv_starts"]
        elif self.mask.ragged:
            names += ["q_lengths", "kv_lengths"]
        if self.persistent:
            names.append("schedule")
        return tuple(names)

    @property
    def added(self) -> tuple[str, ...]:
        dq = () if self.config.deterministic else ("dq",)
        return dq if self.parts == 1 else (*dq, "dk", "dv")

    @property
    def returned(self) -> tuple[str, ...]:
        return ("dk", "dv") if self.parts == 1 else ()

    @property
    def wide(self) -> bool:
        """Whether dK and dV of the same rows exceed the registers of a consumer.

        Then one consumer has dV, and the other one dK.
        """
        return self.head_dim + self.v_dim > MAX_NARROW

    @property
    def block_kv(self) -> int:
        return ROWS if self.wide else CONSUMERS * ROWS

    @property
    def q_tiles(self) -> int:
        return plgpu.cdiv(self.q_len, self.config.block_q)

    @property
    def padded_q_len(self) -> int:
        """Rows of the statistics: those of whole tiles of any kernel.

        A tile of packed sequences may begin at any row.
        """
        rows = self.q_len + (ROWS - 1 if self.packed else 0)
        return plgpu.align_to(rows, CONSUMERS * ROWS)

    @property
    def bias_stages(self) -> int:
        return 1 if self.wide else 2

    def of_statistics(self, batch: Any, q_first: Any) -> tuple[Any, Any]:
        """Returns which copy of the statistics to use, and a sequence's first row."""
        if not self.packed:
            return batch, 0
        first = divide(plus(q_first, SHIFTS - 1), SHIFTS)
        first = times(first, SHIFTS)
        return minus(first, q_first), first

    def head_of_kv(self, head: Any) -> Any:
        return divide(head, self.parts) if self.parts > 1 else head

    @functools.cached_property
    def kv_tiles(self) -> int:
        return self.tiles_of(self.kv_len, self.block_kv)

    @property
    def outer(self) -> int:
        return 1 if self.packed else self.batch

    @property
    def tiles(self) -> int:
        return self.outer * self.kv_heads * self.kv_tiles

    @functools.cached_property
    def blocks(self) -> int:
        asked = self.config.blocks
        if asked is None or not self.known or self.wide or self.config.deterministic:
            return self.tiles
        if self.head_dim != self.v_dim:
            # They share a buffer of results.
            return self.tiles
        # Persistent ones take two steps for a tile, at least. Those that it lacks visit
        # tiles of Q before the first, which the mask hides.
        for tile in range(self.kv_tiles):
            found = self.tiles_of_q(None, self.tile_of(None, 0, 0, tile, self.block_kv))
            if found.first == 0 and found.end * self.group < 2:
                return self.tiles
        return min(asked, self.tiles)

    @property
    def persistent(self) -> bool:
        """Whether a block has more than one tile of K and V; they are in a schedule."""
        return self.blocks < self.tiles

    def k_buffer(self, number: Any) -> Any:
        return lax.rem(number, np.int32(2)) if self.persistent else 0

    @property
    def splits_columns(self) -> bool:
        """Whether a consumer computes columns of dQ, and not rows."""
        return self.config.block_q == ROWS

    @property
    def dq_pieces(self) -> int:
        """Parts of a tile of dQ that one consumer computes, one after the other."""
        return 2 if self.wide else 1

    @property
    def dq_part(self) -> tuple[int, int]:
        if self.splits_columns:
            return ROWS, self.head_dim // (CONSUMERS * self.dq_pieces)
        return ROWS, self.head_dim

    def tile(self, mem: Any, number: Any) -> Tile:
        """Returns a tile of K and V: from the schedule, or that of a block."""
        if self.persistent:
            pair, tile = split(number, self.kv_tiles)
        else:
            pair, tile = self.pair_and_tile(number)
        batch, head = split(pair, self.kv_heads)
        return self.tile_of(mem, batch, head, tile, self.block_kv)

    def pair_and_tile(self, linear: Any) -> tuple[Any, Any]:
        """Returns a head of K, of all sequences, and a tile: those of a place.

        Under a causal mask the first rows have the most work: they come first, so that
        short tiles fill the gaps at the end.
        """
        return self._place(linear, self.kv_tiles, self.outer * self.kv_heads)

    @property
    def has_tail(self) -> bool:
        """Whether a tile of K and V may have rows that do not exist."""
        return self.mask.ragged or self.kv_len % self.block_kv != 0

    def tiles_of_q(self, mem: Any, place: Tile) -> Blocks:
        """Returns the tiles of Q that see a tile of K and V.

        Rows of Q beyond the last need no mask: their sum of exponentials is infinite.
        """
        size, transposed = self.block_kv, self.mask.transposed
        found = transposed.blocks(
            Lengths(*reversed(place.lengths)),
            place.start,
            size,
            self.config.block_q,
            only_inside=self.has_tail,
        )
        if self.mask.segments:
            row = mem.of_segments.at[place.batch, lax.div(place.start, np.int32(size))]
            return found.within(Blocks.loaded(row))
        if transposed.right is not None or self.has_tail:
            return found
        return found._replace(end_whole=found.end)

    @property
    def hides(self) -> bool:
        return self.mask != Mask() or self.has_tail

    def total(self, blocks: Blocks) -> Any:
        each = minus(blocks.end, blocks.first)
        least = 2 if self.persistent else 1
        return maximum(times(each, self.group), least)

    def visited(self, place: Tile, blocks: Blocks, position: Any) -> tuple[Any, Any]:
        past, member = split(position, self.group)
        tile = minus(plus(blocks.end, -1), past)
        tile = maximum(minimum(tile, self.q_tiles - 1), 0)
        return plus(times(place.head, self.group), member), tile


@functools.lru_cache(maxsize=64)
def schedule(p: BackwardProblem) -> np.ndarray:
    def cost(tile: int) -> float:
        place = p.tile_of(None, 0, 0, tile, p.block_kv)
        return p.total(p.tiles_of_q(None, place)) + _STEPS_OF_A_TILE

    of_tiles = list(map(cost, range(p.kv_tiles)))
    pairs = list(map(p.pair_and_tile, range(p.tiles)))
    numbers = [pair * p.kv_tiles + tile for pair, tile in pairs]
    costs = [of_tiles[tile] for _, tile in pairs]
    return of_workers(numbers, costs, p.blocks)
