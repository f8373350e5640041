# SPDX-License-Identifier: Apache-2.0
"""Decode: block size, depth of the rings, and how keys are divided among CTAs."""

from __future__ import annotations

import dataclasses

from pallas_gpu import errors, expect
from pallas_gpu.ops.rules import Positive


@expect.arguments(
    cluster=expect.integer(
        1, 16, hint="1 divides the work evenly, whatever the lengths are"
    )
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
        # wgmma: M is a multiple of 64.
        if self.block_kv not in range(64, 257, 64):
            raise errors.ArgumentError(
                "DecodeConfig: the tensor core does not support this block",
                expected="block_kv a multiple of 64 up to 256",
                got=f"block_kv={self.block_kv}",
                hint="start from DecodeConfig()",
            )
        if self.consumers < 1 or self.block_kv % (64 * self.consumers):
            raise errors.ArgumentError(
                "DecodeConfig: the warpgroups cannot divide a block",
                expected="block_kv a multiple of 64 * consumers",
                got=f"block_kv={self.block_kv}, consumers={self.consumers}",
                hint="use two warpgroups for blocks of 128",
            )
