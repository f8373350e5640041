# SPDX-License-Identifier: Apache-2.0
"""Products of narrow floats with scales of blocks: checks and arguments."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from pallas_gpu import arch, errors, expect
from pallas_gpu.ops import rules
from pallas_gpu.ops.gemm.blackwell import SCALE_TILE, SCALES, Schedule, tiled_kernel
from pallas_gpu.ops.gemm.config import BLOCK_M, BlockScaledMatmulConfig
from pallas_gpu.ops.gemm.problem import Problem
from pallas_gpu.ops.rules import Array, Interpret

_WHO = "block_scaled_matmul"
E8M0, E4M3 = jnp.dtype(jnp.float8_e8m0fnu), jnp.dtype(jnp.float8_e4m3fn)
E2M1 = jnp.dtype(jnp.float4_e2m1fn)
# By bits of an element: the types of scales, and the elements of a block.
ADMITTED = {8: ((E8M0, 32),), 4: ((E8M0, 32), (E8M0, 16), (E4M3, 16))}
_RESULTS = tuple(map(jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))


@expect.arguments()
def block_scaled_matmul(
    lhs: Array,
    rhs: Array,
    lhs_scales: Array,
    rhs_scales: Array,
    preferred_element_type: Any = jnp.float32,
    *,
    scale: Array | None = None,
    config: BlockScaledMatmulConfig | None = None,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Interpret = None,
) -> jax.Array:
    """Computes `jax.nn.scaled_matmul`: a product whose blocks along K have scales.

    Since: sm_100a. Issued by: the host; composes with `jax.jit` and `jax.vmap`.

    The result is `scale * (lhs * lhs_scales) @ (rhs * rhs_scales).T`, where each scale
    is that of a block of elements along K, of any sizes. The tensor core multiplies by
    the scales, and accumulates in float32. `quantize_blocks` makes such operands.

    XLA brings the scales into the order in which the tensor core reads them, and pads
    rows of a number of bytes that is not a multiple of 16.

    Args:
      lhs: (M, K) or (batch, M, K): float8_e4m3fn, float8_e5m2 or float4_e2m1fn.
      rhs: (N, K) or (batch, N, K): float4_e2m1fn if lhs is, or any of the two float8
        types.
      lhs_scales, rhs_scales: (..., M, K / block) and (..., N, K / block), of one type:
        float8_e8m0fnu for blocks of 32 (mxf8, mxf4), for float4_e2m1fn also of 16; or
        float8_e4m3fn for its blocks of 16 (nvf4).
      preferred_element_type: float32, bfloat16 or float16: the type of the result.
      scale: factor of the result, a float32 array of one element; None: 1.
      config: tile sizes and schedule.
      compiler_params, interpret: see `kernel`.

    Returns:
      (M, N) or (batch, M, N).

    Raises:
      ShapeError, DTypeError: operands that do not match each other.
      ArgumentError: a configuration that does not suit the blocks.
      TargetError: another target is given in `compiler_params`.
      UnsupportedError: the derivative is wanted: that of rounding is zero, so a model
        says itself what takes its place, by `jax.custom_vjp`.

    Example:
      >>> a, a_scales = quantize_blocks(x, jnp.float8_e4m3fn)
      >>> y = block_scaled_matmul(a, b, a_scales, b_scales, jnp.bfloat16)
    """
    (m, n, k), batch = _sizes(lhs, rhs)
    out = rules.result_type(_WHO, preferred_element_type, _RESULTS)
    block = _block(lhs, rhs, lhs_scales, rhs_scales)
    _check_target(compiler_params)
    _check_factor(scale)
    problem = Problem(
        m,
        n,
        k,
        jnp.dtype(lhs.dtype),
        out,
        transpose_b=True,
        right=jnp.dtype(rhs.dtype),
        scales=("lhs", "rhs") if scale is None else ("lhs", "rhs", "factor"),
        scale_dtype=jnp.dtype(lhs_scales.dtype),
        group=block,
        config=config or BlockScaledMatmulConfig(),
        compiler_params=compiler_params,
        interpret=interpret,
    )
    _check_depth(problem)
    factor = () if scale is None else (jnp.reshape(scale, 1),)
    if 0 in (*batch, m, n, k):
        return jnp.zeros((*batch, m, n), out)
    run = functools.partial(_run, problem)
    operands = lhs, rhs, lhs_scales, rhs_scales
    refusal = rules.no_derivative(_WHO, "rounding")
    return rules.without_derivative(run, refusal)(*operands, *factor)


def _run(p: Problem, *operands) -> jax.Array:
    kernel, schedule = tiled_kernel(p), Schedule(p, p.config)
    rows, columns = schedule.tiles.extent, schedule.steps * schedule.groups * SCALES

    def product(a, b, a_scales, b_scales, *factor):
        held = (
            _tiled_scales(x, size, columns)
            for x, size in zip((a_scales, b_scales), rows, strict=True)
        )
        return kernel(rules.aligned(a), rules.aligned(b), *held, *factor)

    if operands[0].ndim == 2:
        return product(*operands)
    axes = (0, 0, 0, 0, *[None] * (len(operands) - 4))
    return jax.vmap(product, axes)(*operands)


def _tiled_scales(scales: jax.Array, rows: int, columns: int) -> jax.Array:
    """Returns scales as the kernel reads them, padded by ones.

    Args:
      scales: (any, any): of rows by blocks.
      rows, columns: what they are padded to: multiples of 128 and 4.
    """
    widths = [
        (0, size - x) for size, x in zip((rows, columns), scales.shape, strict=True)
    ]
    one = jnp.ones((), scales.dtype)
    if any(high for _, high in widths):
        scales = jnp.pad(scales, widths, constant_values=one)
    split = scales.reshape(rows // BLOCK_M, 4, 32, columns // SCALES, SCALES)
    shape = rows // BLOCK_M, columns // SCALES, *SCALE_TILE
    return split.transpose(0, 3, 2, 1, 4).reshape(shape)


# --- checks ---------------------------------------------------------------------------


def _sizes(lhs: Any, rhs: Any) -> tuple[tuple[int, int, int], tuple[int, ...]]:
    shapes = tuple(lhs.shape), tuple(rhs.shape)
    ranks = len(shapes[0]) == len(shapes[1]) and len(shapes[0]) in (2, 3)
    if (
        not ranks
        or shapes[0][-1] != shapes[1][-1]
        or (shapes[0][:-2] != shapes[1][:-2])
    ):
        wanted = "(M, K) and (N, K), or (batch, M, K) and (batch, N, K)"
        raise rules.no_product(
            _WHO, wanted, lhs, rhs, "K is the last dimension of both"
        )
    return (shapes[0][-2], shapes[1][-2], shapes[0][-1]), shapes[0][:-2]


def _block(lhs: Any, rhs: Any, lhs_scales: Any, rhs_scales: Any) -> int:
    hint = "quantize the operands with ops.quantize_blocks"
    rules.check_narrow(_WHO, lhs, rhs, E2M1, hint)
    dtype = jnp.dtype(lhs.dtype)
    admitted = ADMITTED[4 if dtype == E2M1 else 8]
    held = [jnp.dtype(x.dtype) for x in (lhs_scales, rhs_scales)]
    if held[0] != held[1] or held[0] not in {t for t, _ in admitted}:
        raise errors.DTypeError(
            f"{_WHO}: the tensor core does not support these types of scales",
            expected=_written(admitted) + f" for {dtype.name}, for both operands",
            got=f"{held[0].name} and {held[1].name}",
            hint="scales of float32 are those of ops.scaled_matmul",
        )
    k = lhs.shape[-1]
    for block in (b for t, b in admitted if t == held[0]):
        wanted = [(*x.shape[:-1], k // block) for x in (lhs, rhs)]
        given = [tuple(x.shape) for x in (lhs_scales, rhs_scales)]
        if k % block == 0 and given == wanted:
            return block
    raise errors.ShapeError(
        f"{_WHO}: the shapes of the scales do not match the operands",
        expected=f"(..., M, K / block) and (..., N, K / block) with a K that is a "
        f"multiple of the block: {_written(admitted)}",
        got=f"{tuple(lhs_scales.shape)} and {tuple(rhs_scales.shape)} for "
        f"{tuple(lhs.shape)} and {tuple(rhs.shape)}",
        hint="pad K with zeros, and the scales with ones",
    )


def _written(admitted: Any) -> str:
    return " or ".join(f"{t.name} for each {block} elements" for t, block in admitted)


def _check_depth(p: Problem) -> None:
    assert p.group is not None
    multiple, tile_k = p.group * SCALES, Schedule(p, p.config).tile_k
    if tile_k % multiple:
        raise errors.ArgumentError(
            f"{_WHO}: tile_k is not a multiple of four blocks",
            expected=f"a multiple of {multiple}",
            got=f"tile_k={tile_k}",
            hint="omit tile_k",
        )


def _check_target(compiler_params: plgpu.CompilerParams | None) -> None:
    given = None if compiler_params is None else compiler_params.target
    target = given or plgpu.offline.current_target()
    if target is None or arch.target(target).has(arch.Feature.TCGEN05):
        return
    raise errors.TargetError(
        f"{_WHO}: the tensor core of this target does not scale blocks",
        expected=arch.SM_100A.name,
        got=target,
        hint="ops.scaled_matmul has scales of blocks of 128 for sm_90a",
    )


def _check_factor(scale: Any) -> None:
    if scale is None:
        return
    is_float = jnp.dtype(scale.dtype) == jnp.float32
    if scale.size != 1 or not is_float:
        raise (errors.ShapeError if is_float else errors.DTypeError)(
            f"{_WHO}: scale is not one factor",
            expected="a float32 array of one element",
            got=expect.shown(scale),
            hint="jnp.float32(x)",
        )
