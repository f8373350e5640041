# SPDX-License-Identifier: Apache-2.0
"""The matrix product: its checks, and the choice of the kernel for a target."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from pallas_gpu import arch, errors, expect
from pallas_gpu.ops import targets
from pallas_gpu.ops.gemm import blackwell, hopper
from pallas_gpu.ops.gemm.blackwell import BlackwellMatmulConfig
from pallas_gpu.ops.gemm.hopper import MatmulConfig
from pallas_gpu.ops.rules import INTERPRET, PARAMS

Config = MatmulConfig | BlackwellMatmulConfig


@expect.arguments(
    a=expect.arrays,
    b=expect.arrays,
    config=expect.optional(
        expect.instance(
            MatmulConfig,
            BlackwellMatmulConfig,
            written="MatmulConfig(...) or BlackwellMatmulConfig(...)",
        )
    ),
    out_dtype=expect.anything,
    compiler_params=PARAMS,
    interpret=INTERPRET,
)
def matmul(
    a: Any,
    b: Any,
    *,
    config: Config | None = None,
    out_dtype: Any = None,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Multiplies two matrices on Hopper's or Blackwell's tensor cores.

    Since: sm_90a. Issued by: the host; composes with `jax.jit` and `jax.vmap`.

    The kernel is that of the configuration; without one, that of the target in
    `compiler_params`, or else of the attached GPU.

    Args:
      a: (M, K), float16 or bfloat16.
      b: (K, N), of the same type.
      config: tile sizes and schedule; default: `MatmulConfig()` for sm_90a,
        `BlackwellMatmulConfig()` for sm_100a.
      out_dtype: type of the result; default: that of the operands.
      compiler_params, interpret: see `kernel`.

    Returns:
      (M, N), accumulated in float32.

    Raises:
      ShapeError, DTypeError: operands that do not match each other or the tiles.
      ArgumentError: the configuration is for another target.
    """
    config = _config(config, compiler_params)
    problem = _check(a, b, config)
    out_dtype = _out_dtype(a.dtype if out_dtype is None else out_dtype)
    dtypes = jnp.dtype(a.dtype), out_dtype
    family = hopper if isinstance(config, MatmulConfig) else blackwell
    kernel = family.make_kernel(*problem, *dtypes, config, compiler_params, interpret)
    return kernel(a, b)


def clear_cache() -> None:
    """Forgets traced kernels; for measurements of tracing."""
    hopper.make_kernel.cache_clear()
    blackwell.make_kernel.cache_clear()


def _config(
    config: Config | None, compiler_params: plgpu.CompilerParams | None
) -> Config:
    """Returns the configuration, the default one of the target if None.

    Raises:
      ArgumentError: the parameters have a target that it is not for.
    """
    if config is None:
        target = targets.chosen(compiler_params)
        is_blackwell = target.has(arch.Feature.TCGEN05)
        return BlackwellMatmulConfig() if is_blackwell else MatmulConfig()
    given = None if compiler_params is None else compiler_params.target
    needed = (
        arch.Feature.WGMMA if isinstance(config, MatmulConfig) else arch.Feature.TCGEN05
    )
    if given is None or arch.target(given).has(needed):
        return config
    raise errors.ArgumentError(
        "matmul: the configuration is for another target",
        expected="MatmulConfig(...) for sm_90a, BlackwellMatmulConfig(...) for sm_100a",
        got=f"{type(config).__name__} and target={given!r}",
        hint="omit config or target",
    )


def _out_dtype(dtype: Any) -> jnp.dtype:
    is_array = hasattr(dtype, "shape") and not isinstance(dtype, jnp.dtype)
    with contextlib.suppress(TypeError, ValueError):
        if not is_array and jnp.issubdtype(found := jnp.dtype(dtype), jnp.floating):
            return found
    raise errors.DTypeError(
        "matmul: the result cannot have this type",
        expected="a floating-point type",
        got=expect.shown(dtype),
        hint="omit out_dtype, and convert the result",
    )


def _check(a: Any, b: Any, config: Config) -> tuple[int, int, int]:
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[0]:
        raise errors.ShapeError(
            "matmul: the shapes do not form a product",
            expected="(M, K) and (K, N)",
            got=f"{tuple(a.shape)} and {tuple(b.shape)}",
            hint="use jax.vmap for a batch of matrices",
        )
    if a.dtype != b.dtype or a.dtype not in (jnp.float16, jnp.bfloat16):
        raise errors.DTypeError(
            "matmul: these element types are not supported",
            expected="float16 or bfloat16 for both operands",
            got=f"{a.dtype} and {b.dtype}",
            hint="convert the operands with astype",
        )
    (m, k), n = a.shape, b.shape[1]
    step_m, step_n, step_k = config.step
    if m % step_m or n % step_n or k % step_k:
        raise errors.ShapeError(
            "matmul: the tiles do not divide the problem",
            expected=f"M a multiple of {step_m}, N of {step_n}, K of {step_k}",
            got=f"M={m}, N={n}, K={k}",
            hint="choose another config, or pad the operands",
        )
    return m, n, k
