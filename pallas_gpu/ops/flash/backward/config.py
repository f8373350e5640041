# SPDX-License-Identifier: Apache-2.0
"""Attention's backward pass: tile sizes and schedule."""

from __future__ import annotations

import dataclasses

from pallas_gpu import expect
from pallas_gpu.ops.rules import Positive, Stages

CONSUMERS = 2
# Registers per thread of the producer and of a consumer: 64512 of an SM's 65536.
REGISTERS = 24, 240
# Rows of K and V of one consumer: M of wgmma.
ROWS = 64
# The sum of the two head_dims up to which a consumer has dK and dV of its rows.
MAX_NARROW = 256


@expect.arguments(
    # One consumer's rows of dQ, or both consumers'.
    block_q=expect.choice_of(
        *(ROWS, CONSUMERS * ROWS),
        hint="128 fits in the registers up to a head_dim of 64",
    ),
    blocks=expect.optional(
        expect.integer(1, hint="None starts a block for each tile of K and V")
    ),
)
@dataclasses.dataclass(frozen=True)
class AttentionBackwardConfig:
    """Tile sizes and schedule of the derivatives of `attention`, on Hopper.

    A block has 128 rows of K and V, or 64 where the two head_dims exceed 256 together,
    and visits the rows of Q.

    Attributes:
      block_q: rows of Q of one step: 64 or 128.
      stages: SMEM buffers of each ring.
      heads_together: heads of K and V whose tiles run at the same time, so that their
        Q stays in the L2 cache; rounded down to a divisor of batch times heads.
      deterministic: the additions have an order, so that results of equal operands are
        equal; a second kernel computes the derivative of Q, from scores of its own.
        With a bias they always have one.
      blocks: number of persistent blocks, which start the next tile's products before
        the results of one are stored; None starts a block for each tile. They have a
        second buffer of K. It has an effect where the two head_dims are equal and up to
        128, the tiles are known when the kernel is traced (no segment ids, lengths or
        packed sequences), each that sees the first rows of Q has two steps or more, and
        additions have no order. Consumers spill what a tile begins with, 4 to 132 bytes
        where the lengths are not powers of 2; at 1000 rows and head_dims of 128 they
        were 7 % faster nevertheless. Without a configuration `attention`
        takes one for each SM (132) up to 8192 rows of K and V, where at most a causal
        mask or a window hides scores and nothing else changes them.
      kv_parts: in how many parts the heads of Q that share a head of K and V are
        divided; rounded down to a divisor of their number. A part is visited by blocks
        of its own, which add its dK and dV in GMEM, in float32. Tiles are shorter: with
        8 heads, 4096 rows, a causal mask and head_dims of 128, 4 parts and
        `heads_together=4` took 5.7 % less time forward and backward. It has an effect
        with persistent `blocks` alone.

    Raises:
      ArgumentError: a number that is not supported.
    """

    block_q: int = 64
    stages: Stages = 2
    heads_together: Positive = 16
    deterministic: bool = False
    blocks: int | None = None
    kv_parts: Positive = 1

    @classmethod
    @expect.arguments(head_dim=expect.integer(1))
    def default(
        cls, head_dim: int, *, deterministic: bool = False
    ) -> AttentionBackwardConfig:
        """Returns what `benchmarks/attention_backward.py` measures."""
        if head_dim < 64 and head_dim % 32:
            # Parts of rows of dQ would be too narrow for a swizzle.
            return cls(block_q=CONSUMERS * ROWS, deterministic=deterministic)
        if head_dim > 64:
            return cls(deterministic=deterministic)
        if deterministic:
            return cls(stages=4, deterministic=True)
        return cls(block_q=CONSUMERS * ROWS)


def padded_dims(block_q: int, head_dim: int, v_dim: int) -> tuple[int, int]:
    """Returns the two head_dims in the kernels.

    A part of dQ has all columns, or a half or a quarter of them; it is a multiple of 16
    columns, which is the narrowest swizzle. Parts of wide heads leave through buffers
    of Q and dO, which are equal.
    """
    if head_dim + v_dim > MAX_NARROW:
        head_dim = -(-max(head_dim, v_dim) // 64) * 64
        return head_dim, head_dim
    multiple = 16 if block_q > ROWS else 32
    return -(-head_dim // multiple) * multiple, v_dim
