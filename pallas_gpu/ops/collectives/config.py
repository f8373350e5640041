# SPDX-License-Identifier: Apache-2.0
"""Configurations of products that are also collectives."""

from __future__ import annotations

import dataclasses

from pallas_gpu import arch
from pallas_gpu.ops.gemm import heuristic
from pallas_gpu.ops.gemm.config import CONSUMERS, MatmulConfig
from pallas_gpu.ops.gemm.problem import Problem

# Columns of a part of a tile that is stored at once: half of those of other products.
PART_COLUMNS = 32
# Barriers, and what is lost where buffers are aligned to a swizzle's pattern.
_RESERVED_BYTES = 2048


def choose(p: Problem, others_bytes: int = 0) -> MatmulConfig:
    """Returns a configuration whose buffers leave so many bytes of SMEM.

    Four stages hide the latency of copies: where a tile leaves room for three alone,
    one of 128 x 256 replaces it, in clusters that share columns. On two H200 that was
    the fastest of six for 16384 x 4096 by 4096 x 14336.
    """
    c = heuristic.choose(p)
    if c.transposed or c.parts > 1 or c.tile_n % PART_COLUMNS:
        c = MatmulConfig(tile_m=64, tile_n=128, cluster=None)
    c = dataclasses.replace(c, epilogue_m=64, epilogue_n=PART_COLUMNS)
    if (stages := _stages(p, c, others_bytes)) < 4:
        c = dataclasses.replace(c, tile_m=64, tile_n=256, cluster="m")
        stages = _stages(p, c, others_bytes)
    return dataclasses.replace(c, stages=min(c.stages, stages) if stages < 4 else 4)


def _stages(p: Problem, c: MatmulConfig, others_bytes: int) -> int:
    """Returns how many buffers of the operands there is room for."""
    stores = CONSUMERS * 2 * c.epilogue_m * c.epilogue_n * p.out_dtype.itemsize
    stage = (c.block_m + c.tile_n) * c.tile_k * p.dtype.itemsize
    room = arch.SM_90A.smem_bytes_per_block - stores - others_bytes - _RESERVED_BYTES
    return max(2, room // stage)
