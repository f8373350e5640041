# SPDX-License-Identifier: Apache-2.0
"""Products of 8-bit matrices with scales: checks, and the arguments of the kernel."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from pallas_gpu import arch, errors, expect
from pallas_gpu.ops import rules, targets
from pallas_gpu.ops.gemm import blackwell, hopper
from pallas_gpu.ops.gemm.config import (
    BLOCK,
    BlackwellMatmulConfig,
    ScaledMatmulConfig,
)
from pallas_gpu.ops.gemm.epilogue import Epilogue
from pallas_gpu.ops.gemm.problem import Problem
from pallas_gpu.ops.rules import Array, Interpret
from pallas_gpu.ops.tiles import persistent_blocks

_INT8 = jnp.dtype(jnp.int8)
_RESULTS = (
    tuple(map(jnp.dtype, (jnp.bfloat16, jnp.float16, jnp.float32))) + rules.FLOAT8
)
_INT32 = jnp.dtype(jnp.int32)
_SMS = arch.SM_90A.sm_count

type Config = ScaledMatmulConfig | BlackwellMatmulConfig
# The schedule of each kernel, and the function that makes it.
_FAMILIES: dict[type, tuple[Any, Any]] = {
    ScaledMatmulConfig: (hopper.Schedule, hopper.scaled_kernel),
    BlackwellMatmulConfig: (blackwell.Schedule, blackwell.tiled_kernel),
}


@expect.arguments()
def scaled_matmul(
    a: Array,
    b: Array,
    a_scale: Array | None = None,
    b_scale: Array | None = None,
    *,
    transpose_b: bool = False,
    bias: Array | None = None,
    out_dtype: Any = jnp.bfloat16,
    promote: bool | None = None,
    config: Config | None = None,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Interpret = None,
) -> jax.Array:
    """Multiplies two matrices of 8-bit elements that have scales.

    Since: sm_90a; sm_100a without scales of blocks, whose kernel was never run on a
    card. Issued by: the host; composes with `jax.jit` and `jax.vmap`.

    The result is `(a * a_scale) @ (b * b_scale) + bias`, of any sizes.

    Hopper's tensor core adds products of 8-bit floats with 13 bits of mantissa. With
    `promote` these sums are as long as 128 elements of K and are added in float32;
    without, they are as long as K. Sums of int8 are exact, in int32; with scales of
    blocks they are promoted as well. Blackwell's adds in float32.

    The tensor core reads 8-bit operands with K in the minor dimension: b of shape
    (K, N) is transposed in memory first, and rows of a number of bytes that is not a
    multiple of 16 are padded. Scales of blocks of a are transposed too, which takes
    little time.

    Args:
      a: (M, K), float8_e4m3fn, float8_e5m2 or int8.
      b: (K, N), or (N, K) with `transpose_b`; int8 if a is, any of the two float8
        types if a has one of them.
      a_scale: float32. One scale, of shape () or (1,); one per row, (M,) or (M, 1);
        or one per block of 1x128, (M, K / 128), rounded up. None is 1.
      b_scale: float32. One scale, of shape () or (1,); one per column, (N,), (1, N) or
        with `transpose_b` (N, 1); or one per block of 128x128, (K / 128, N / 128) or
        with `transpose_b` (N / 128, K / 128), rounded up. None is 1.
      transpose_b: whether b is (N, K).
      bias: (N,), of a floating-point type; None is 0.
      out_dtype: bfloat16, float16, float32, float8_e4m3fn or float8_e5m2; int32 for
        int8 operands without scales and bias.
      promote: whether sums of float8 products are promoted every 128 of K. Scales of
        blocks require it, and by default only they do.
      config: tile sizes and schedule; by default chosen by the sizes.
      compiler_params, interpret: see `kernel`.

    Returns:
      (M, N) of `out_dtype`.

    Raises:
      ShapeError, DTypeError: operands that do not match each other.
      ArgumentError: a configuration that does not suit the scales.
      UnsupportedError: scales of blocks on Blackwell; or the derivative is wanted: that
        of rounding to 8 bits is zero, so a model says itself what takes its place, by
        `jax.custom_vjp`.

    Example:
      >>> y = scaled_matmul(a, b, a_scale, b_scale, transpose_b=True)
    """
    hint = "use jax.vmap for a batch; transpose_b=True is for b of shape (N, K)"
    k, n = rules.check_operands("scaled_matmul", a, b, transpose_b, hint)
    m, dtype = a.shape[0], jnp.dtype(a.dtype)
    hint = "quantize the operands, or use ops.matmul or ops.linear"
    rules.check_narrow("scaled_matmul", a, b, _INT8, hint)
    integers = dtype == _INT8
    plain = integers and all(x is None for x in (a_scale, b_scale, bias))
    out = rules.result_type(
        "scaled_matmul",
        out_dtype,
        (*_RESULTS, *[_INT32] * plain),
        expected=", ".join(x.name for x in _RESULTS)
        + "; int32 for int8 operands without scales and bias",
    )
    kinds = _kinds(a_scale, b_scale, (m, n, k), transpose_b)
    rules.check_bias("scaled_matmul", bias, n)
    if bias is not None:
        floating = jnp.issubdtype(bias.dtype, jnp.floating)
        fits = floating and bias.dtype.itemsize >= 2
        wanted = "float32, float16 or bfloat16"
        rules.require_type("scaled_matmul", "the bias", bias, fits, wanted)
    blocked = "blocks" in kinds
    if promote is False and blocked:
        raise errors.ArgumentError(
            "scaled_matmul: scales of blocks without promotion",
            expected="promote=True or None",
            got="promote=False",
            hint="blocks differ along K, so each has sums of its own",
        )
    problem = Problem(
        m, n, k, dtype, out,
        transpose_b=True,
        epilogue=Epilogue(bias=bias is not None),
        right=jnp.dtype(b.dtype),
        group=BLOCK if blocked else None,
        promoted=blocked or (bool(promote) and not integers),
        config=config,
        compiler_params=compiler_params,
        interpret=interpret,
    )  # fmt: skip
    config = _chosen(problem, kinds)
    if 0 in (m, n, k):
        filled = jnp.zeros((m, n), jnp.float32)
        return (filled if bias is None else filled + bias).astype(out)
    extent = _FAMILIES[type(config)][0](problem, config).tiles.extent
    scales = _scales(problem, extent, kinds, a_scale, b_scale, transpose_b)
    added = [] if bias is None else [rules.padded(bias, extent[1])]
    problem = problem.but(scales=tuple(scales), config=config)
    run = functools.partial(_run, problem)
    right = b if transpose_b else b.T
    refusal = rules.no_derivative("scaled_matmul", "rounding to 8 bits")
    operands = a, right, *scales.values(), *added
    return rules.without_derivative(run, refusal)(*operands)


def _chosen(p: Problem, kinds: Sequence[str | None]) -> Config:
    """Returns the configuration, and checks that it suits the target and the scales."""
    config, params = p.config, p.compiler_params
    on_blackwell = targets.chosen(params).has(arch.Feature.TCGEN05)
    if config is None and on_blackwell:
        config = BlackwellMatmulConfig(tile_k=BLOCK)
    config = config or default_config(p)
    targets.require("scaled_matmul", config, params, _FAMILIES)
    if p.group is not None and isinstance(config, BlackwellMatmulConfig):
        raise errors.UnsupportedError(
            f"scaled_matmul: scales of blocks of {BLOCK} on Blackwell",
            expected="scales of tensors, rows and columns",
            got=" and ".join(x or "none" for x in kinds),
            hint="ops.block_scaled_matmul has blocks of 16 or 32, of which the tensor "
            "core reads the scales; ops.quantize_blocks makes them",
        )
    if p.group is not None and config.tile_n != BLOCK:
        raise errors.ArgumentError(
            "scaled_matmul: the tiles do not match the blocks of scales",
            expected=f"tile_n={BLOCK}",
            got=f"tile_n={config.tile_n}",
            hint="omit config",
        )
    return config


def _kinds(a_scale, b_scale, sizes, transpose_b) -> tuple[str | None, str | None]:
    """Returns what has a scale of its own, of A and of B."""
    m, n, k = sizes
    one, deep = ((), (1,), (1, 1)), plgpu.cdiv(k, BLOCK)
    step = -1 if transpose_b else 1
    of_a = {"tensor": one, "rows": ((m,), (m, 1)), "blocks": ((m, deep),)}
    of_b = {
        "tensor": one,
        "columns": ((n,), (1, n)[::step]),
        "blocks": ((deep, plgpu.cdiv(n, BLOCK))[::step],),
    }
    return _kind("a_scale", a_scale, of_a), _kind("b_scale", b_scale, of_b)


def _scales(p: Problem, extent, kinds, a, b, transpose_b: bool) -> dict[str, Any]:
    """Returns the kernel's scales, for each row or column of all tiles, in order."""
    scales: dict[str, Any] = {}
    if p.group is not None:
        a_shape = plgpu.cdiv(p.k, BLOCK), plgpu.align_to(p.m, 4)
        b_shape = plgpu.cdiv(p.k, BLOCK), plgpu.cdiv(p.n, BLOCK)
        scales |= {
            "a_blocks": jnp.ones(a_shape, jnp.float32),
            "b_blocks": jnp.ones(b_shape, jnp.float32),
        }
    match kinds[0]:
        case "blocks":
            scales["a_blocks"] = rules.aligned(a.T)
        case "tensor":
            scales["a_scale"] = a.reshape(1)
    match kinds[1]:
        case "blocks":
            scales["b_blocks"] = b.T if transpose_b else b
        case "tensor":
            scales["b_scale"] = b.reshape(1)
    if kinds[0] == "rows":
        scales["row_scale"] = rules.padded(a.reshape(p.m), extent[0])
    if kinds[1] == "columns":
        scales["column_scale"] = rules.padded(b.reshape(p.n), extent[1])
    return scales


def _run(p: Problem, a, b, *operands):
    a, b = rules.aligned(a), rules.aligned(b)
    _, make_kernel = _FAMILIES[type(p.config)]
    return make_kernel(p.but(k=a.shape[1]))(a, b, *operands)


def default_config(p: Problem) -> ScaledMatmulConfig:
    # Rows of a consumer, columns, consumers. Promoted sums and the accumulator take
    # registers for 64 rows of 128 columns each.
    shapes = [(64, 128, 3), (64, 128, 2), (64, 64, 2)]
    if not p.promoted:
        shapes = [(128, 128, 2), (64, 128, 2), (64, 64, 2)]
    if p.group is not None:
        shapes.pop()

    def cost(shape: tuple[int, int, int]) -> int:
        rows, columns, consumers = shape
        rows *= consumers
        waves = plgpu.cdiv(p.tiles(rows, columns), _SMS)
        # The tensor core's time, and that of loads, which small tiles share less.
        return waves * (rows * columns + 64 * (rows + columns))

    rows, columns, consumers = min(shapes, key=cost)
    config = ScaledMatmulConfig(
        tile_m=rows,
        tile_n=columns,
        consumers=consumers,
        cluster="n" if p.n > columns and p.m > rows * consumers else None,
    )
    plane = hopper.Schedule(p, config).tiles.plane
    return dataclasses.replace(
        config, blocks=persistent_blocks(plane, config.cluster_size)
    )


def _kind(name: str, scale: Any, kinds: dict[str, Any]) -> str | None:
    if scale is None:
        return None
    if jnp.dtype(scale.dtype) != jnp.float32:
        raise errors.DTypeError(
            f"scaled_matmul: {name} is not float32",
            expected="float32",
            got=expect.shown(scale),
            hint=f"{name}.astype(jnp.float32)",
        )
    for kind, shapes in kinds.items():
        if tuple(scale.shape) in shapes:
            return kind
    wanted = (f"{shape} ({kind})" for kind, shapes in kinds.items() for shape in shapes)
    raise errors.ShapeError(
        f"scaled_matmul: {name} does not match its operand",
        expected=", ".join(wanted),
        got=tuple(scale.shape),
        hint=f"blocks are {BLOCK} long; their number is rounded up",
    )
