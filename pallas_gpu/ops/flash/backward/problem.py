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
        slopes = ("slopes",) if self.scores.alibi else ()
        return "q", "k", "v", "do", "lse", "delta", *slopes

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

    def tiles_of_q(self, kv_start: Any) -> Blocks:
        """Returns the tiles of Q that see a tile of K and V.

        Rows of Q beyond the last need no mask: their sum of exponentials is infinite.
        """
        lengths = Lengths(self.kv_len, self.q_len)
        transposed = self.mask.transposed
        tail = self.kv_len % self.block_kv != 0
        found = transposed.blocks(
            lengths, kv_start, self.block_kv, self.config.block_q, only_inside=tail
        )
        if transposed.right is not None or tail:
            return found
        return found._replace(end_whole=found.end)

    def visited(self, blocks: Blocks, position: Any) -> tuple[Any, Any]:
        """Returns the head of Q in its group, and the tile, that a step visits."""
        past, member = divide(position, self.group)
        return member, masks.minus(masks.plus(blocks.end, -1), past)


def divide(a: Any, b: int) -> tuple[Any, Any]:
    return lax.div(a, np.int32(b)), lax.rem(a, np.int32(b))
