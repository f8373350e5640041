# SPDX-License-Identifier: Apache-2.0
"""Which kernel computes a product, and with which configuration."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_gpu import arch
from pallas_gpu.ops import targets
from pallas_gpu.ops.gemm import (
    blackwell,
    few,
    few_heuristic,
    heuristic,
    hopper,
)
from pallas_gpu.ops.gemm.config import (
    BlackwellMatmulConfig,
    MatmulConfig,
    SplitMatmulConfig,
)
from pallas_gpu.ops.gemm.problem import Problem

# The type of a configuration says which kernel it is for.
KERNELS: dict[type, Any] = {
    MatmulConfig: hopper.make_kernel,
    SplitMatmulConfig: few.make_kernel,
    BlackwellMatmulConfig: blackwell.make_kernel,
}
# Rows and columns from which the costs of parts of K and of the kernel for few rows
# have been compared with measurements: those of a tile of the tensor core.
_LEAST_DIVIDED = 64


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


def choose(problem: Problem) -> Any:
    """Returns the configuration for a problem on the target of its parameters."""
    if targets.chosen(problem.compiler_params).has(arch.Feature.TCGEN05):
        return BlackwellMatmulConfig()
    if (known := measured(problem)) is not None:
        return known
    if problem.turns_a or problem.transposed.turns_a:
        return heuristic.choose(problem)
    divided, plain = few_heuristic.choose(problem), heuristic.choose(problem)
    if divided is None:
        return plain
    if plain.parts > 1 and min(problem.m, problem.n) < _LEAST_DIVIDED:
        return divided
    estimate = heuristic.cost(problem, plain)
    if plain.parts == 1:
        estimate += few_heuristic.FIXED_US
    return divided if few_heuristic.cost(problem, divided) <= estimate else plain


def measured(p: Problem) -> Any:
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


def turned(p: Problem) -> str:
    """Returns which operands, of "a" and "b", XLA transposes before the kernel.

    The tensor core reads types other than 16-bit ones along K alone. Hopper's kernel
    transposes one float32 operand on its way to the tensor core, its left one.
    """
    if p.dtype.itemsize == 2:
        return ""
    all_of = ("a" if p.transpose_a else "") + ("" if p.transpose_b else "b")
    if p.dtype != jnp.float32 or p.epilogue.gated or not all_of:
        return all_of
    # With both stored so, A is the one that is copied.
    kept = all_of[-1]
    if (config := p.config) is not None:
        is_left = isinstance(config, MatmulConfig) and (
            config.transposed == (kept == "b")
        )
        return all_of.replace(kept, "") if is_left else all_of
    if targets.chosen(p.compiler_params).has(arch.Feature.TCGEN05):
        return all_of
    copied = dataclasses.replace(p, transpose_a=False, transpose_b=True)
    p = dataclasses.replace(copied, transpose_a=kept == "a", transpose_b=kept != "b")
    is_faster = _cost(p) < heuristic.copy_us(p, kept) + _cost(copied)
    return all_of.replace(kept, "") if is_faster else all_of


def _cost(p: Problem) -> float:
    config = choose(p)
    family = few_heuristic if isinstance(config, SplitMatmulConfig) else heuristic
    return family.cost(p, config)
