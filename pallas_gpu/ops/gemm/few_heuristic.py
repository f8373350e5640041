# SPDX-License-Identifier: Apache-2.0
"""A configuration for products with few rows or few tiles, by a small cost model."""

from __future__ import annotations

import functools

from pallas_gpu import arch
from pallas_gpu.ops.gemm.few_config import SplitMatmulConfig
from pallas_gpu.ops.gemm.problem import Problem

_TARGET = arch.SM_90A
_SMS = _TARGET.sm_count
_RESERVED_BYTES = 1024


@functools.lru_cache(maxsize=4096)
def choose(p: Problem) -> SplitMatmulConfig | None:
    """Returns the configuration with the lowest estimated time, or None."""
    found = candidates(p)
    return min(found, key=lambda c: cost(p, c)) if found else None


def candidates(p: Problem) -> list[SplitMatmulConfig]:
    """Returns the configurations that suit a problem, in no order."""
    return []


def smem_bytes(p: Problem, c: SplitMatmulConfig) -> int:
    """Returns the SMEM of a block."""
    factors = 2 if p.epilogue.gated else 1
    stage = (c.tile_m + factors * c.tile_n) * c.tile_k * p.dtype.itemsize
    sums = c.warpgroups * factors * c.part * (c.own_n + 4) * 4
    return c.stages * stage + sums + 512


def cost(p: Problem, c: SplitMatmulConfig) -> float:
    """Estimates the time of a product in microseconds."""
    return 0.0
