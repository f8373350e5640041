# SPDX-License-Identifier: Apache-2.0
"""A linear layer: its checks, and the choice of the kernel for tokens and weights."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu
from pallas_gpu import arch, errors, expect
from pallas_gpu.ops import rules
from pallas_gpu.ops.gemm.config import LinearFewConfig, LinearManyConfig
from pallas_gpu.ops.gemm.epilogue import Activation, Epilogue, check_activation
from pallas_gpu.ops.gemm.matmul import matmul
from pallas_gpu.ops.gemm.problem import Problem
from pallas_gpu.ops.narrow import mixed_few, mixed_many, widen
from pallas_gpu.ops.rules import Array, Interpret
from pallas_gpu.ops.tiles import persistent_blocks

type Config = LinearFewConfig | LinearManyConfig

_FLOATS = tuple(map(jnp.dtype, (jnp.bfloat16, jnp.float16, jnp.float32)))
_WEIGHTS = jnp.dtype(jnp.int8), jnp.dtype(jnp.int4), *rules.FLOAT8
# TMA: rows are multiples of 16 bytes.
_ROW_BITS = 128
# Tokens up to which blocks read weights alone, of 8 bits; of 4 bits half as many.
_FEW = 128
# Clusters of so many blocks, one on an SM, that an H200 runs at once
# (cuOccupancyMaxActiveClusters).
_CLUSTERS = {2: 66, 4: 30, 8: 15}
_SMS = arch.SM_90A.sm_count


@expect.arguments()
def linear(
    x: Array,
    w: Array,
    *,
    w_scale: Array | None = None,
    bias: Array | None = None,
    activation: Activation | None = None,
    transpose_w: bool = False,
    out_dtype: Any = None,
    config: Config | None = None,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Interpret = None,
) -> jax.Array:
    """Computes `activation(x @ (w * w_scale) + bias)`; weights may have 8 or 4 bits.

    Since: sm_90a. Issued by: the host; composes with `jax.jit`, `jax.vmap` and
    `jax.grad`.

    Weights of the type of x are multiplied by `matmul`. Narrower ones are read as they
    are, and converted to the type of x in registers, exactly; scales of groups multiply
    them there, rounded to that type like the products, and scales of columns multiply
    the sums, in float32.

    The fast layout of narrow weights is (N, K), with `transpose_w`, and K a multiple of
    32 for int4, of 16 for other types. Weights (K, N) are transposed in memory at every
    call, and rows of other lengths padded.

    The derivative with respect to x, the scales and the bias consists of products of
    XLA with weights that are converted in memory. Narrow weights have none.

    Args:
      x: (..., K), bfloat16 or float16; with weights of its own type all that `matmul`
        takes.
      w: (K, N), or (N, K) with `transpose_w`: of the type of x, or int8, int4,
        float8_e4m3fn or float8_e5m2.
      w_scale: scales of narrow weights, of a floating-point type: one per column, (N,),
        or one per group of 32, 64 or 128 along K, (K / group, N), rounded up, in
        either layout of w. None is 1. The group is the one that matches K.
      bias: (N,), of a floating-point type; None is 0.
      activation: as of `matmul`.
      transpose_w: whether w is (N, K).
      out_dtype: a floating-point type of 16 or 32 bits; by default that of x.
      config: tile sizes and schedule for narrow weights; by default chosen by the
        sizes.
      compiler_params, interpret: see `kernel`.

    Returns:
      (..., N) of `out_dtype`, accumulated in float32.

    Raises:
      ShapeError, DTypeError: operands that do not match each other.
      ArgumentError: scales of weights of the type of x.

    Example:
      >>> values, scale = quantize(w, jnp.int8)
      >>> y = linear(x, values, w_scale=scale, activation="silu")
    """
    check_activation(activation, "linear")
    if jnp.dtype(w.dtype) not in _WEIGHTS:
        if w_scale is not None or config is not None:
            raise errors.ArgumentError(
                "linear: scales or a config of weights that are not narrow",
                expected="w_scale=None and config=None",
                got=f"weights {w.dtype}",
                hint="quantize the weights, or use ops.matmul",
            )
        return matmul(
            x, w, bias=bias, activation=activation, transpose_b=transpose_w,
            out_dtype=out_dtype, compiler_params=compiler_params, interpret=interpret,
        )  # fmt: skip
    hint = "transpose_w=True is for weights (N, K)"
    k, n = rules.check_operands("linear", x, w, transpose_w, hint, rows="...")
    group = _check(x, w_scale, bias, k, n)
    given = {
        "masks": widen.is_integer(w.dtype),
        "group_scale": group is not None,
        "scale": w_scale is not None and group is None,
    }
    problem = Problem(
        m=math.prod(x.shape[:-1]),
        n=n,
        k=k,
        dtype=jnp.dtype(x.dtype),
        out_dtype=rules.result_type(
            "linear",
            x.dtype if out_dtype is None else out_dtype,
            _FLOATS,
            "omit out_dtype, and convert the result",
            expected="bfloat16, float16 or float32",
        ),
        transpose_b=transpose_w,
        epilogue=Epilogue(activation=activation, bias=bias is not None),
        right=jnp.dtype(w.dtype),
        scales=tuple(name for name, present in given.items() if present),
        group=group,
        config=config,
        compiler_params=compiler_params,
        interpret=interpret,
    )
    if 0 in (*x.shape, n):
        return _reference(problem, x, w, w_scale, bias)
    operands = rules.vary_alike((x.reshape(-1, k), w, w_scale, bias))
    return _linear(problem, *operands).reshape(*x.shape[:-1], n)


# --- the product ----------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(p: Problem, x, w, w_scale, bias):
    right = w if p.transpose_b else w.T
    x, right = rules.aligned(x, _ROW_BITS // rules.bits(w.dtype)), rules.aligned(right)
    p = p.but(k=x.shape[1], transpose_b=True)
    config = p.config or default_config(p)
    family: Any = mixed_few if isinstance(config, LinearFewConfig) else mixed_many
    kernel = family.make_kernel(p.but(config=config))
    columns = family.columns(p, config)
    given = {
        "masks": lambda: jnp.asarray(widen.masks(w.dtype, x.dtype)),
        # TMA addresses rows of scales of groups; the others are read in whole tiles.
        "group_scale": lambda: rules.aligned(w_scale.astype(jnp.float32)),
        "scale": lambda: rules.padded(w_scale, columns),
        "bias": lambda: rules.padded(bias, columns),
    }
    operands = [given[name]() for name in p.operands]
    orders = isinstance(config, LinearManyConfig) or mixed_few.orders_tokens(p, config)
    if widen.is_integer(w.dtype) and not orders:
        x = widen.reordered(x, w.dtype)
    return kernel(x, right, *operands)


def _backward(p: Problem, saved, g):
    x, w, w_scale, bias = saved

    def plain(x, w_scale, bias):
        return _reference(p, x, w, w_scale, bias)

    _, pull = jax.vjp(plain, x, w_scale, bias)
    dx, d_scale, d_bias = pull(g)
    integer = jnp.issubdtype(w.dtype, jnp.integer)
    dw = np.zeros(w.shape, jax.dtypes.float0) if integer else jnp.zeros_like(w)
    return dx, dw, d_scale, d_bias


_linear.defvjp(lambda p, *saved: (_linear(p, *saved), saved), _backward)


def _reference(p: Problem, x, w, w_scale, bias):
    """The layer in operations of JAX."""
    wide = (w.T if p.transpose_b else w).astype(x.dtype)
    if p.group is not None:
        scale = jnp.repeat(w_scale.astype(x.dtype), p.group, axis=0)
        wide = wide * scale[: p.k]
    product = jnp.dot(x, wide, preferred_element_type=jnp.float32)
    if w_scale is not None and p.group is None:
        product = product * w_scale.astype(jnp.float32)
    bias = None if bias is None else bias.astype(jnp.float32)
    return p.epilogue.apply(product, bias=bias).astype(p.out_dtype)


def default_config(p: Problem) -> Config:
    if p.m <= (_FEW if rules.bits(p.right) == 8 else _FEW // 2):
        for config in _few(p, plgpu.align_to(p.m, 16)):
            if mixed_few.fits(p, config):
                return config

    def cost(tokens: int) -> int:
        # Beside the product of a step there is the conversion of its weights.
        return plgpu.cdiv(p.tiles(tokens, 128), _SMS) * (tokens + 64)

    tokens = min((256, 128, 64), key=cost)
    c = LinearManyConfig(tokens=tokens, paired=p.n > 128 and tokens == 256)
    if (
        tokens == 256
        and p.group == 32
        and rules.bits(p.right) == 8
        and p.out_dtype.itemsize == 4
    ):
        # Two groups of scales a step and results of 4 bytes leave no room for a fourth.
        c = dataclasses.replace(c, stages=3)
    plane = mixed_many.Schedule(p.transposed, c).tiles.plane
    blocks = persistent_blocks(plane, c.cluster_size)
    return dataclasses.replace(c, blocks=max(blocks, 2))


def _few(p: Problem, tokens: int) -> Iterator[LinearFewConfig]:
    """Yields configurations for few tokens, best first; measured on an H200."""
    c = LinearFewConfig(tokens=tokens)
    tiles = plgpu.cdiv(p.n, 64)
    resident = dataclasses.replace(
        c, rows=256, splits=2, warpgroups=4, resident=True, blocks=_SMS
    )
    if tiles >= 2 * _SMS and tokens == 16:
        # Weights of 4 bits are converted as fast as three buffers are filled.
        for stages in (4, 3, 2) if rules.bits(p.right) == 8 else (3, 2):
            yield dataclasses.replace(resident, stages=stages)
    elif tiles >= 2 * _SMS:
        yield dataclasses.replace(c, rows=128, stages=2, warpgroups=2, blocks=_SMS)
    elif tokens == 16:
        splits = _splits(tiles, 3 * _SMS / 4, on_sm=1)
        for stages in (3, 2):
            yield dataclasses.replace(c, stages=stages, splits=splits, warpgroups=4)
    splits = _splits(tiles, 2 * _SMS, on_sm=2)
    for stages in (4, 3, 2):
        yield dataclasses.replace(c, stages=stages, splits=splits)


def _splits(tiles: int, wanted: float, on_sm: int) -> int:
    """Returns the blocks of a cluster so that there are nearly so many on the device.

    All clusters have to run at once.
    """
    found = 1
    for splits, clusters in _CLUSTERS.items():
        if tiles * found < wanted - tiles / 8 and tiles <= on_sm * clusters:
            found = splits
    return found


# --- checks ---------------------------------------------------------------------------


def _check(x: Any, w_scale: Any, bias: Any, k: int, n: int) -> int | None:
    if jnp.dtype(x.dtype) not in _FLOATS[:2]:
        raise errors.DTypeError(
            "linear: narrow weights are not supported beside this type",
            expected="x of bfloat16 or float16",
            got=expect.shown(x),
            hint="convert x, or use ops.scaled_matmul for two narrow operands",
        )
    rules.check_bias("linear", bias, n)
    for name, a in (("bias", bias), ("w_scale", w_scale)):
        if a is not None:
            fits = jnp.dtype(a.dtype) in _FLOATS
            rules.require_type("linear", name, a, fits, "float32, bfloat16 or float16")
    if w_scale is None:
        return None
    groups: list[Any] = [None, 32, 64, 128]
    shapes = [(n,), *((plgpu.cdiv(k, group), n) for group in groups[1:])]
    each = "(N,), or (K / group, N) with groups of 32, 64 or 128; ops.quantize returns "
    each += "them so"
    rules.check_array("linear", "w_scale", w_scale, shapes, each)
    return groups[shapes.index(tuple(w_scale.shape))]
