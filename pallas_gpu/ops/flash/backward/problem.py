# SPDX-License-Identifier: Apache-2.0
"""Attention's derivatives: sizes, the order of blocks, the tiles that each visits."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.ops.flash import masks
from pallas_gpu.ops.flash.backward.config import (
    CONSUMERS,
    MAX_NARROW,
    ROWS,
    AttentionBackwardConfig,
)
from pallas_gpu.ops.flash.masks import Blocks, Lengths, Mask, Scores

COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True)


@dataclasses.dataclass(frozen=True)
class BackwardProblem:
    """Sizes, mask, scores and configuration of the derivatives.

    Attributes:
      mask: rows are those of Q, as in the forward pass.
    """

    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: Any
    mask: Mask
    scores: Scores
    config: AttentionBackwardConfig

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the kernels' arrays.

        lse and delta are (batch, heads, padded_q_len); see `gradients`.
        """
        names = ["q", "k", "v", "do", "lse", "delta"]
        if self.scores.alibi:
            names.append("slopes")
        if self.mask.segments:
            names += ["of_segments", "q_ids", "kv_ids"]
        if self.mask.ragged:
            names += ["q_lengths", "kv_lengths"]
        return tuple(names)

    @property
    def wide(self) -> bool:
        """Whether dK and dV of the same rows exceed the registers of a consumer.

        Then one consumer has dV, and the other one dK.
        """
        return self.head_dim + self.v_head_dim > MAX_NARROW

    @property
    def block_kv(self) -> int:
        """Rows of K and V of a block."""
        return ROWS if self.wide else CONSUMERS * ROWS

    @property
    def group(self) -> int:
        """Heads of Q of a head of K and V."""
        return self.heads // self.kv_heads

    @property
    def q_tiles(self) -> int:
        return plgpu.cdiv(self.q_len, self.config.block_q)

    @property
    def padded_q_len(self) -> int:
        """Rows of the statistics: those of whole tiles of any kernel."""
        return plgpu.align_to(self.q_len, CONSUMERS * ROWS)

    @property
    def kv_tiles(self) -> int:
        return plgpu.cdiv(self.kv_len, self.block_kv)

    @property
    def blocks(self) -> int:
        """Blocks of the launch."""
        return self.batch * self.kv_heads * self.kv_tiles

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
        """Rows and columns of a part of a tile of dQ."""
        if self.splits_columns:
            return ROWS, self.head_dim // (CONSUMERS * self.dq_pieces)
        return ROWS, self.head_dim

    def tile(self, linear: Any) -> tuple[Any, Any, Any]:
        """Returns (batch, head, first row) of a block's tile of K and V.

        Under a causal mask the first rows have the most work: they come first, so that
        short tiles fill the gaps at the end.
        """
        pairs = self.batch * self.kv_heads
        together = math.gcd(pairs, self.config.heads_together)
        strip, within = divide(linear, together * self.kv_tiles)
        tile, pair = divide(within, together)
        pair = masks.plus(masks.times(strip, together), pair)
        batch, head = divide(pair, self.kv_heads)
        return batch, head, masks.times(tile, self.block_kv)

    @property
    def has_tail(self) -> bool:
        """Whether a tile of K and V may have rows that do not exist."""
        return self.mask.ragged or self.kv_len % self.block_kv != 0

    def lengths(self, mem: Any, batch: Any) -> Lengths:
        """Returns those of a sequence; rows are those of Q."""
        if self.mask.ragged:
            return Lengths(mem.q_lengths[batch], mem.kv_lengths[batch])
        return Lengths(self.q_len, self.kv_len)

    def tiles_of_q(self, mem: Any, batch: Any, kv_start: Any) -> Blocks:
        """Returns the tiles of Q that see a tile of K and V.

        Rows of Q beyond the last need no mask: their sum of exponentials is infinite.
        """
        size, transposed = self.block_kv, self.mask.transposed
        found = transposed.blocks(
            Lengths(*reversed(self.lengths(mem, batch))),
            kv_start,
            size,
            self.config.block_q,
            only_inside=self.has_tail,
        )
        if self.mask.segments:
            row = mem.of_segments.at[batch, lax.div(kv_start, np.int32(size))]
            return found.within(blocks_of(row))
        if transposed.right is not None or self.has_tail:
            return found
        return found._replace(end_whole=found.end)

    @property
    def hides(self) -> bool:
        """Whether there may be anything to mask."""
        return self.mask != Mask() or self.has_tail

    def total(self, blocks: Blocks) -> Any:
        """The number of steps of a block: one at least, which may mask everything."""
        each = masks.minus(blocks.end, blocks.first)
        return masks.maximum(masks.times(each, self.group), 1)

    def visited(self, blocks: Blocks, position: Any) -> tuple[Any, Any]:
        """Returns the head of Q in its group, and the tile, that a step visits."""
        past, member = divide(position, self.group)
        tile = masks.minus(masks.plus(blocks.end, -1), past)
        return member, masks.maximum(masks.minimum(tile, self.q_tiles - 1), 0)


def divide(a: Any, b: int) -> tuple[Any, Any]:
    return lax.div(a, np.int32(b)), lax.rem(a, np.int32(b))


def blocks_of(row: Any) -> Blocks:
    """Returns those that `masks.segment_blocks` has found for a tile."""
    return Blocks(*(row[i] for i in range(len(Blocks._fields))))
