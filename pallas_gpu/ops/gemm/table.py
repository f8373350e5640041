# SPDX-License-Identifier: Apache-2.0
"""Measured configurations of products, preferred to those of the cost model."""

from __future__ import annotations

from typing import Any

from pallas_gpu.ops.gemm.config import MatmulConfig
from pallas_gpu.ops.gemm.few_config import SplitMatmulConfig
from pallas_gpu.ops.gemm.problem import Problem

# Tiles of all rows.
_WHOLE = SplitMatmulConfig(
    tile_m=256, tile_n=64, stages=5, warpgroups=1, split=2, blocks=132
)

# (M, N, K) of one product of 16-bit types, measured on an H200 with random normal
# bfloat16 by benchmarks/matmul_shapes.py.
_MEASURED: dict[tuple[int, int, int], Any] = {
    (4096, 57344, 8192): MatmulConfig(),
    (8192, 8192, 8192): MatmulConfig(minor="n"),
    (4096, 8192, 28672): MatmulConfig(),
    (1024, 1024, 1024): SplitMatmulConfig(
        tile_m=128, tile_n=64, warpgroups=1, blocks=132
    ),
    (1000, 8192, 28672): MatmulConfig(tile_m=64, tile_n=256, cluster=None),
    (256, 256, 65536): MatmulConfig(
        tile_m=64, tile_n=64, stages=8, epilogue_n=32, cluster=None, parts=16
    ),
    (256, 4096, 4096): _WHOLE,
    (256, 4096, 14336): _WHOLE,
    (256, 6144, 4096): MatmulConfig(
        tile_m=64, tile_n=96, stages=7, epilogue_n=32, cluster="m"
    ),
    (256, 8192, 8192): SplitMatmulConfig(
        tile_m=128, stages=7, warpgroups=1, blocks=132
    ),
    (256, 8192, 28672): MatmulConfig(
        tile_m=64, tile_n=256, epilogue_n=32, cluster="m", parts=2
    ),
    (256, 57344, 8192): MatmulConfig(tile_m=64, tile_n=224, epilogue_n=32, cluster="m"),
    (64, 10240, 8192): SplitMatmulConfig(warpgroups=1, split=2),
    (64, 8192, 28672): SplitMatmulConfig(tile_n=64, stages=7, warpgroups=1),
    (16, 28672, 4096): SplitMatmulConfig(tile_m=16, stages=5, warpgroups=1),
    (16, 8192, 8192): SplitMatmulConfig(
        tile_m=16, tile_n=64, stages=20, warpgroups=1, blocks=132
    ),
    (16, 6144, 4096): SplitMatmulConfig(tile_m=16, stages=5, warpgroups=1, split=2),
    (1, 28672, 4096): SplitMatmulConfig(
        tile_m=8, tile_n=448, stages=3, warpgroups=1, split=2, blocks=132
    ),
    (1, 8192, 8192): SplitMatmulConfig(
        tile_m=8, tile_n=64, stages=20, warpgroups=1, blocks=132
    ),
    (1, 6144, 4096): SplitMatmulConfig(tile_m=8, stages=5, warpgroups=1, split=2),
}


def lookup(p: Problem) -> Any:
    """Returns the configuration of a problem; None if it was not measured.

    Epilogues with another operand of the result's size need SMEM of their own.
    """
    e = p.epilogue
    is_like_measured = (
        p.batch == 1
        and p.dtype.itemsize == p.out_dtype.itemsize == 2
        and not (e.gated or e.residual)
    )
    is_plain = not (p.transpose_a or p.transpose_b)
    return _MEASURED.get((p.m, p.n, p.k)) if is_like_measured and is_plain else None
