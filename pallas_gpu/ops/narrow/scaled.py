# SPDX-License-Identifier: Apache-2.0
"""Products of 8-bit matrices with scales: checks, and the arguments of the kernel."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from pallas_gpu import arch, errors, expect
from pallas_gpu.ops import turns
from pallas_gpu.ops.gemm.epilogue import Epilogue
from pallas_gpu.ops.gemm.problem import Problem
from pallas_gpu.ops.narrow import scaled_hopper
from pallas_gpu.ops.narrow.scaled_hopper import BLOCK, ScaledMatmulConfig
from pallas_gpu.ops.rules import (
    Array,
    Interpret,
    aligned,
    check_bias,
    no_product,
    padded,
    result_type,
    without_derivative,
)

_FLOAT8 = tuple(map(jnp.dtype, (jnp.float8_e4m3fn, jnp.float8_e5m2)))
_INT8 = (jnp.dtype(jnp.int8),)
_RESULTS = tuple(map(jnp.dtype, (jnp.bfloat16, jnp.float16, jnp.float32))) + _FLOAT8
_INT32 = jnp.dtype(jnp.int32)
_SMS = arch.SM_90A.sm_count

# The shapes of scales, by what has one.
type _Kinds = dict[str, tuple[tuple[int, ...], ...]]


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
    config: ScaledMatmulConfig | None = None,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Interpret = None,
) -> jax.Array:
    """Multiplies two matrices of 8-bit elements that have scales.

    Since: sm_90a. Issued by: the host; composes with `jax.jit` and `jax.vmap`.

    The result is `(a * a_scale) @ (b * b_scale) + bias`, of any sizes.

    Hopper's tensor core adds products of 8-bit floats with 13 bits of mantissa. With
    `promote` these sums are as long as 128 elements of K and are added in float32;
    without, they are as long as K. Sums of int8 are exact, in int32; with scales of
    blocks they are promoted as well.

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
      UnsupportedError: the derivative is wanted: that of rounding to 8 bits is zero, so
        a model says itself what takes its place, by `jax.custom_vjp`.

    Example:
      >>> y = scaled_matmul(a, b, a_scale, b_scale, transpose_b=True)
    """
    (m, k), n = _check_operands(a, b, transpose_b)
    out = _out_dtype(out_dtype, a, (a_scale, b_scale, bias))
    a_kind = _a_kind(a_scale, m, k)
    b_kind = _b_kind(b_scale, n, k, transpose_b)
    _check_bias(bias, n)
    blocked = "blocks" in (a_kind, b_kind)
    integers = jnp.dtype(a.dtype) in _INT8
    if promote is False and blocked:
        raise errors.ArgumentError(
            "scaled_matmul: scales of blocks without promotion",
            expected="promote=True or None",
            got="promote=False",
            hint="blocks differ along K, so each has sums of its own",
        )
    given = {
        "a_blocks": blocked,
        "b_blocks": blocked,
        "a_scale": a_kind == "tensor",
        "b_scale": b_kind == "tensor",
        "row_scale": a_kind == "rows",
        "column_scale": b_kind == "columns",
    }
    problem = Problem(
        m, n, k, jnp.dtype(a.dtype), out,
        transpose_b=True,
        epilogue=Epilogue(bias=bias is not None),
        right=jnp.dtype(b.dtype),
        scales=tuple(name for name, present in given.items() if present),
        group=BLOCK if blocked else None,
        promoted=blocked or (bool(promote) and not integers),
    )  # fmt: skip
    config = _config(config, problem)
    operands = _operands(problem, config, a_scale, b_scale, bias, transpose_b)
    right = b if transpose_b else b.T
    if 0 in (m, n, k):
        filled = jnp.zeros((m, n), jnp.float32)
        return (filled if bias is None else filled + bias).astype(out)
    run = functools.partial(_run, problem, config, compiler_params, interpret)
    return without_derivative(run, "scaled_matmul", "rounding to 8 bits")(
        a, right, *operands
    )


def _run(problem: Problem, config, compiler_params, interpret, a, b, *operands):
    a, b = aligned(a), aligned(b)
    problem = dataclasses.replace(problem, k=a.shape[1])
    kernel = scaled_hopper.make_kernel(problem, config, compiler_params, interpret)
    return kernel(a, b, *operands)


def _operands(
    p: Problem, config: ScaledMatmulConfig, a_scale, b_scale, bias, transpose_b: bool
) -> list[Any]:
    """Returns the arrays of `Problem.operands`."""
    rows, columns = scaled_hopper.Schedule(p, config).tiles.extent
    k_blocks, n_blocks = plgpu.cdiv(p.k, BLOCK), plgpu.cdiv(p.n, BLOCK)
    blocks_of_a = a_scale is not None and not {"a_scale", "row_scale"} & {*p.scales}
    blocks_of_b = b_scale is not None and not {"b_scale", "column_scale"} & {*p.scales}

    def a_blocks():
        if blocks_of_a:
            return aligned(a_scale.T)
        return jnp.ones((k_blocks, plgpu.align_to(p.m, 4)), jnp.float32)

    def b_blocks():
        if blocks_of_b:
            return b_scale.T if transpose_b else b_scale
        return jnp.ones((k_blocks, n_blocks), jnp.float32)

    found = {
        "a_blocks": a_blocks,
        "b_blocks": b_blocks,
        "a_scale": lambda: a_scale.reshape(1),
        "b_scale": lambda: b_scale.reshape(1),
        "row_scale": lambda: padded(a_scale.reshape(p.m), rows),
        "column_scale": lambda: padded(b_scale.reshape(p.n), columns),
        "bias": lambda: padded(bias, columns),
    }
    return [found[name]() for name in p.operands]


def _config(config: ScaledMatmulConfig | None, p: Problem) -> ScaledMatmulConfig:
    """Returns the configuration; by default one for the sizes.

    Raises:
      ArgumentError: it does not suit the scales.
    """
    if config is None:
        return default_config(p)
    if p.group is not None and config.tile_n != BLOCK:
        raise errors.ArgumentError(
            "scaled_matmul: the tiles do not match the blocks of scales",
            expected=f"tile_n={BLOCK}",
            got=f"tile_n={config.tile_n}",
            hint="omit config",
        )
    return config


def default_config(p: Problem) -> ScaledMatmulConfig:
    """Returns the tiles that are expected to take the least time."""
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
        tiles = plgpu.cdiv(p.m, rows) * plgpu.cdiv(p.n, columns)
        # The tensor core's time, and that of loads, which small tiles share less.
        return plgpu.cdiv(tiles, _SMS) * (rows * columns + 64 * (rows + columns))

    rows, columns, consumers = min(shapes, key=cost)
    config = ScaledMatmulConfig(
        tile_m=rows,
        tile_n=columns,
        consumers=consumers,
        cluster="n" if p.n > columns and p.m > rows * consumers else None,
    )
    plane = scaled_hopper.Schedule(p, config).tiles.plane
    return dataclasses.replace(config, blocks=turns.blocks(plane, config.cluster_size))


# --- checks ---------------------------------------------------------------------------


def _check_operands(a: Any, b: Any, transpose_b: bool) -> tuple[tuple[int, int], int]:
    deep, wide = (1, 0) if transpose_b else (0, 1)
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[deep]:
        wanted = f"(M, K) and {'(N, K)' if transpose_b else '(K, N)'}"
        hint = "use jax.vmap for a batch; transpose_b=True is for b of shape (N, K)"
        raise no_product("scaled_matmul", wanted, a, b, hint)
    types = jnp.dtype(a.dtype), jnp.dtype(b.dtype)
    if not any(all(t in kind for t in types) for kind in (_FLOAT8, _INT8)):
        raise errors.DTypeError(
            "scaled_matmul: these element types are not supported",
            expected="float8_e4m3fn or float8_e5m2 for each operand, or int8 for both",
            got=f"{types[0].name} and {types[1].name}",
            hint="quantize the operands, or use ops.matmul or ops.linear",
        )
    return (a.shape[0], a.shape[1]), b.shape[wide]


def _out_dtype(dtype: Any, a: Any, others: tuple[Any, ...]) -> jnp.dtype:
    """Returns the type of the result.

    Raises:
      DTypeError: the result cannot have it.
    """
    plain = jnp.dtype(a.dtype) in _INT8 and all(x is None for x in others)
    return result_type(
        "scaled_matmul",
        dtype,
        (*_RESULTS, *[_INT32] * plain),
        expected=", ".join(x.name for x in _RESULTS)
        + "; int32 for int8 operands without scales and bias",
    )


def _a_kind(scale: Any, m: int, k: int) -> str | None:
    kinds: _Kinds = {
        "tensor": ((), (1,), (1, 1)),
        "rows": ((m,), (m, 1)),
        "blocks": ((m, plgpu.cdiv(k, BLOCK)),),
    }
    return _kind("a_scale", scale, kinds)


def _b_kind(scale: Any, n: int, k: int, transposed: bool) -> str | None:
    blocks = plgpu.cdiv(k, BLOCK), plgpu.cdiv(n, BLOCK)
    kinds: _Kinds = {
        "tensor": ((), (1,), (1, 1)),
        "columns": ((n,), (n, 1) if transposed else (1, n)),
        "blocks": (blocks[::-1] if transposed else blocks,),
    }
    return _kind("b_scale", scale, kinds)


def _kind(name: str, scale: Any, kinds: _Kinds) -> str | None:
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


def _check_bias(bias: Any, n: int) -> None:
    check_bias("scaled_matmul", bias, n)
    if bias is None:
        return
    if not jnp.issubdtype(bias.dtype, jnp.floating) or bias.dtype.itemsize < 2:
        raise errors.DTypeError(
            "scaled_matmul: the bias cannot have this type",
            expected="float32, float16 or bfloat16",
            got=expect.shown(bias),
            hint="convert it with astype",
        )
