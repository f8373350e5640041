# SPDX-License-Identifier: Apache-2.0
"""Attention: tile sizes, schedule and registers of its kernels, and of decode's."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from pallas_gpu import arch, errors, expect
from pallas_gpu.ops.rules import Positive, TileM, TileN

# Registers per thread of the producer and of a consumer, by the number of consumers; of
# an SM's 65536 they use 64512 and 65536.
REGISTERS = {2: (40, 232), 3: (32, 160)}
# Rows of K up to which consumers alternate where there is no mask.
_SHORT = 1024
# On Blackwell: query tiles of a block, and their rows, the lanes of tensor memory.
BLACKWELL_TILES, BLACKWELL_ROWS = 2, 128


@expect.arguments(
    stages=expect.integer(1, hint="two stages hide the latency of copies on an H200"),
    consumers=expect.choice_of(
        *REGISTERS, hint="2 have 232 registers a thread, 3 have 160"
    ),
    blocks=expect.optional(
        expect.integer(1, hint="use one per SM, or None for one per tile")
    ),
)
@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Tile sizes and schedule of `attention` on Hopper.

    Attributes:
      rows: rows of Q of one consumer.
      block_kv: rows of K and V of one step.
      stages: SMEM buffers of each ring.
      consumers: compute warpgroups: 2 or 3.
      ping_pong: consumers alternate in issuing products.
      heads_together: heads whose tiles run at the same time, so that their K and V stay
        in the L2 cache; rounded down to a divisor of batch times heads.
      blocks: number of persistent blocks; they load the next tile's operands while the
        last one is being stored. None starts a block for each tile.
      keep_maxima: the maximum of a row is kept until scores exceed it by a factor of
        2**8, so that most steps do not scale the result. Probabilities are above 1
        then, and the largest one is rounded, too: the error is 1 to 30% larger, in
        single elements up to twice as large where few scores dominate, and the kernel
        about 3% faster at head_dim 128, not at 64. Not for float8.

    Raises:
      ArgumentError: sizes that the tensor core does not support.
    """

    rows: TileM = 64
    # wgmma: a block of K is the N of one product, and one of V is the K of the other.
    block_kv: TileN = 128
    stages: int = 2
    consumers: int = 2
    ping_pong: bool = True
    heads_together: Positive = 8
    blocks: int | None = None
    keep_maxima: bool = False

    feature: ClassVar[arch.Feature] = arch.Feature.WGMMA

    @classmethod
    @expect.arguments(
        head_dim=expect.integer(1),
        kv_len=expect.optional(expect.integer(0)),
    )
    def default(
        cls, head_dim: int, *, causal: bool = False, kv_len: int | None = None
    ) -> AttentionConfig:
        """Returns the fastest configuration of `benchmarks/attention.py`.

        Args:
          head_dim: of Q, K and V.
          causal: whether the last row of K that a row of Q sees depends on the row.
          kv_len: rows of K; None: not known, or not the same for all sequences.
        """
        # A block for each SM: it begins a tile while it ends the one before, and each
        # has the same share of the work.
        sms = arch.SM_90A.sm_count
        if head_dim <= 64:
            return cls(consumers=3, stages=3, blocks=sms)
        if head_dim > 128:
            # SMEM does not hold rows of Q for two tiles.
            return cls(block_kv=80, heads_together=8 if causal else 2)
        if causal:
            return cls(blocks=sms)
        # On an H200 alternation gains 3% with 512 rows of K, nothing with 1000, and
        # loses 2% with 2048 and more.
        short = kv_len is None or kv_len <= _SHORT
        return cls(blocks=sms, heads_together=1, ping_pong=short)

    @property
    def block_q(self) -> int:
        """Rows of Q of a block."""
        return self.consumers * self.rows

    def accumulator_registers(self, head_dim: int, itemsize: int = 2) -> int:
        """Registers per thread for result, scores and probabilities.

        The last ones have the size of the operands.
        """
        words = head_dim + self.block_kv + self.block_kv * itemsize // 4
        return self.rows * words // 128


@expect.arguments()
@dataclasses.dataclass(frozen=True)
class BlackwellAttentionConfig:
    """Tile sizes and schedule of `attention` on Blackwell; a block has 256 rows of Q.

    Attributes:
      block_kv: rows of K and V of one step.
      stages: SMEM buffers of each ring.
      heads_together: as for Hopper.

    Raises:
      ArgumentError: sizes that the tensor core does not support.
    """

    # A block of K is the N of one product, one of V the K of the other, whose left
    # operand is read from TMEM 16 elements at a time.
    block_kv: TileN = 128
    stages: Positive = 2
    heads_together: Positive = 8

    feature: ClassVar[arch.Feature] = arch.Feature.TCGEN05

    @classmethod
    @expect.arguments(head_dim=expect.integer(1))
    def default(cls, head_dim: int) -> BlackwellAttentionConfig:
        """Returns the largest blocks that fit in TMEM; it has not been measured."""
        if head_dim <= 64:
            return cls(block_kv=128, stages=3)
        return cls(block_kv=64, stages=4)

    @property
    def block_q(self) -> int:
        """Rows of Q of a block."""
        return BLACKWELL_TILES * BLACKWELL_ROWS

    @property
    def blocks(self) -> None:
        """No limit: a block computes its 256 rows, and ends."""


@expect.arguments(
    block_kv=expect.multiple(64, 256),
    consumers=expect.integer(1),
    cluster=expect.integer(
        1, 16, hint="1 divides the work evenly, whatever the lengths are"
    ),
)
@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Blocks and division of work of `decode_attention` on Hopper.

    Attributes:
      block_kv: rows of K and V of one step, a multiple of 64.
      stages: SMEM buffers of each ring; the copies in flight hide the memory's latency.
      consumers: warpgroups that multiply, each 64 rows of a block or a multiple of it.
      cluster: CTAs that share the keys of one sequence and head, and combine their
        results in shared memory: 2 to 16, more than 8 where the card has room for such
        clusters. With 1 the blocks of all sequences are divided evenly among persistent
        CTAs, which combine results in GMEM.
      workers: persistent CTAs, at most as many as are resident at once.

    Raises:
      ArgumentError: sizes that the tensor core or a cluster does not support.
    """

    block_kv: int = 64
    stages: Positive = 6
    consumers: int = 1
    cluster: int = 1
    workers: Positive = 132

    def __post_init__(self):
        if self.block_kv % (64 * self.consumers):
            raise errors.ArgumentError(
                "DecodeConfig: the warpgroups cannot divide a block",
                expected="block_kv a multiple of 64 * consumers",
                got=f"block_kv={self.block_kv}, consumers={self.consumers}",
                hint="use two warpgroups for blocks of 128",
            )
