# SPDX-License-Identifier: Apache-2.0
"""Which kernel computes a product, and with which configuration."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import jax.numpy as jnp

import pallas_gpu as plgpu
from pallas_gpu import arch, errors
from pallas_gpu.ops import targets
from pallas_gpu.ops.gemm import (
    blackwell_any,
    few,
    few_heuristic,
    heuristic,
    hopper,
    table,
)
from pallas_gpu.ops.gemm.blackwell import BlackwellMatmulConfig
from pallas_gpu.ops.gemm.config import MatmulConfig
from pallas_gpu.ops.gemm.few_config import SplitMatmulConfig
from pallas_gpu.ops.gemm.problem import Problem

# The type of a configuration says which kernel it is for. Each module has
# `make_kernel(problem, config, compiler_params, interpret)`.
FAMILIES: dict[type, ModuleType] = {
    MatmulConfig: hopper,
    SplitMatmulConfig: few,
    BlackwellMatmulConfig: blackwell_any,
}
_NEEDED = {
    MatmulConfig: arch.Feature.WGMMA,
    SplitMatmulConfig: arch.Feature.WGMMA,
    BlackwellMatmulConfig: arch.Feature.TCGEN05,
}
# Rows and columns from which the costs of parts of K and of the kernel for few rows
# have been compared with measurements: those of a tile of the tensor core.
_LEAST_DIVIDED = 64


def choose(problem: Problem, compiler_params: plgpu.CompilerParams | None) -> Any:
    """Returns the configuration for a problem on the target of the parameters."""
    if targets.chosen(compiler_params).has(arch.Feature.TCGEN05):
        return BlackwellMatmulConfig()
    if (known := table.lookup(problem)) is not None:
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


def turned(
    p: Problem, config: Any, compiler_params: plgpu.CompilerParams | None
) -> str:
    """Returns which operands, of "a" and "b", XLA transposes before the kernel.

    The tensor core reads types other than 16-bit ones along K alone. Hopper's kernel
    transposes one float32 operand on its way to the tensor core, its left one.

    Args:
      p: the problem as the caller states it.
      config: a configuration, or None.
      compiler_params: see `choose`.
    """
    if p.dtype.itemsize == 2:
        return ""
    all_of = ("a" if p.transpose_a else "") + ("" if p.transpose_b else "b")
    if p.dtype != jnp.float32 or p.epilogue.gated or not all_of:
        return all_of
    # With both stored so, A is the one that is copied.
    kept = all_of[-1]
    if config is not None:
        is_left = isinstance(config, MatmulConfig) and (
            config.transposed == (kept == "b")
        )
        return all_of.replace(kept, "") if is_left else all_of
    if targets.chosen(compiler_params).has(arch.Feature.TCGEN05):
        return all_of
    copied = dataclasses.replace(p, transpose_a=False, transpose_b=True)
    p = dataclasses.replace(copied, transpose_a=kept == "a", transpose_b=kept != "b")
    is_faster = _cost(p, choose(p, compiler_params)) < heuristic.copy_us(p, kept) + (
        _cost(copied, choose(copied, compiler_params))
    )
    return all_of.replace(kept, "") if is_faster else all_of


def _cost(p: Problem, config: Any) -> float:
    family = few_heuristic if isinstance(config, SplitMatmulConfig) else heuristic
    return family.cost(p, config)


def check_target(config: Any, compiler_params: plgpu.CompilerParams | None) -> None:
    """Checks that a configuration is for the target of the parameters.

    Raises:
      ArgumentError: the parameters have another target.
    """
    given = None if compiler_params is None else compiler_params.target
    if given is None or arch.target(given).has(_NEEDED[type(config)]):
        return
    raise errors.ArgumentError(
        "matmul: the configuration is for another target",
        expected="MatmulConfig(...) or SplitMatmulConfig(...) for sm_90a, "
        "BlackwellMatmulConfig(...) for sm_100a",
        got=f"{type(config).__name__} and target={given!r}",
        hint="omit config or target",
    )


def columns(config: Any) -> int:
    """Returns of what N has to be a multiple, if no tile is to exceed a bias."""
    if isinstance(config, BlackwellMatmulConfig):
        return 1
    is_transposed = isinstance(config, MatmulConfig) and config.transposed
    return config.cluster_tile[0 if is_transposed else 1]


def make_kernel(
    problem: Problem,
    config: Any,
    compiler_params: plgpu.CompilerParams | None,
    interpret: Any,
) -> Any:
    """Returns the kernel of a configuration."""
    family: Any = FAMILIES[type(config)]
    return family.make_kernel(problem, config, compiler_params, interpret)
