# SPDX-License-Identifier: Apache-2.0
"""A linear layer: its checks, and the choice of the kernel for tokens and weights."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu
from pallas_gpu import arch, errors, expect
from pallas_gpu.ops import turns
from pallas_gpu.ops.gemm import epilogue
from pallas_gpu.ops.gemm.epilogue import Activation, Epilogue
from pallas_gpu.ops.gemm.matmul import matmul
from pallas_gpu.ops.gemm.problem import Problem
from pallas_gpu.ops.narrow import mixed, mixed_few, mixed_many, widen
from pallas_gpu.ops.narrow.mixed import LinearFewConfig, LinearManyConfig
from pallas_gpu.ops.rules import (
    Array,
    Interpret,
    aligned,
    check_bias,
    no_product,
    padded,
    result_type,
    vary_alike,
)

type Config = LinearFewConfig | LinearManyConfig

_TOKENS = tuple(map(jnp.dtype, (jnp.bfloat16, jnp.float16)))
_WEIGHTS = tuple(
    map(jnp.dtype, (jnp.int8, jnp.int4, jnp.float8_e4m3fn, jnp.float8_e5m2))
)
_GROUPS = (32, 64, 128)
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
    epilogue.check_activation(activation, "linear")
    if jnp.dtype(w.dtype) not in _WEIGHTS:
        return _wide(
            x, w, w_scale, config, bias=bias, activation=activation,
            transpose_b=transpose_w, out_dtype=out_dtype,
            compiler_params=compiler_params, interpret=interpret,
        )  # fmt: skip
    k, n = _check(x, w, bias, transpose_w)
    group = _group(w_scale, k, n)
    call = _Call(
        n=n,
        k=k,
        group=group,
        epilogue=Epilogue(activation=activation, bias=bias is not None),
        transpose_w=transpose_w,
        out=result_type(
            "linear",
            x.dtype if out_dtype is None else out_dtype,
            (*_TOKENS, jnp.dtype(jnp.float32)),
            "omit out_dtype, and convert the result",
            expected="bfloat16, float16 or float32",
        ),
        config=config,
        compiler_params=compiler_params,
        interpret=interpret,
    )
    if 0 in (*x.shape, n):
        return _reference(call, x, w, w_scale, bias)
    operands = vary_alike((x.reshape(-1, k), w, w_scale, bias))
    return _linear(call, *operands).reshape(*x.shape[:-1], n)


def _wide(x: Any, w: Any, w_scale: Any, config: Any, **others: Any) -> jax.Array:
    """The layer with weights of the type of x."""
    if w_scale is not None or config is not None:
        raise errors.ArgumentError(
            "linear: scales or a config of weights that are not narrow",
            expected="w_scale=None and config=None",
            got=f"weights {w.dtype}",
            hint="quantize the weights, or use ops.matmul",
        )
    return matmul(x, w, **others)


# --- the product ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Call:
    """What is static in a call with narrow weights."""

    n: int
    k: int
    group: int | None
    epilogue: Epilogue
    transpose_w: bool
    out: jnp.dtype
    config: Config | None
    compiler_params: Any
    interpret: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(call: _Call, x, w, w_scale, bias):
    right = w if call.transpose_w else w.T
    step = _ROW_BITS // widen.bits(w.dtype)
    k = plgpu.align_to(call.k, step)
    x, right = (padded(a, k) for a in (x, right))
    problem = mixed.problem(
        x.shape[0],
        call.n,
        k,
        jnp.dtype(x.dtype),
        jnp.dtype(w.dtype),
        call.out,
        group=call.group,
        scaled=w_scale is not None and call.group is None,
        epilogue=call.epilogue,
    )
    config = call.config or default_config(problem)
    family: Any = mixed_few if isinstance(config, LinearFewConfig) else mixed_many
    kernel = family.make_kernel(problem, config, call.compiler_params, call.interpret)
    given: dict[str, Any] = {"scale": w_scale, "bias": bias}
    if widen.is_integer(w.dtype):
        given["masks"] = jnp.asarray(widen.masks(w.dtype, x.dtype))
    columns = family.columns(problem, config)
    if w_scale is not None and call.group is not None:
        # TMA addresses rows of scales of groups; the others are read in whole tiles.
        scale = aligned(w_scale.astype(jnp.float32))
        given["group_scale"] = scale
    for name in ("scale", "bias"):
        if name in problem.operands:
            given[name] = padded(given[name], columns)
    operands = [given[name] for name in problem.operands]
    if (
        isinstance(config, LinearFewConfig)
        and widen.is_integer(w.dtype)
        and not mixed_few.orders_tokens(problem, config)
    ):
        x = widen.reordered(x, w.dtype)
    return kernel(x, right, *operands)


def _backward(call: _Call, saved, g):
    x, w, w_scale, bias = saved

    def plain(x, w_scale, bias):
        return _reference(call, x, w, w_scale, bias)

    _, pull = jax.vjp(plain, x, w_scale, bias)
    dx, d_scale, d_bias = pull(g)
    integer = jnp.issubdtype(w.dtype, jnp.integer)
    dw = np.zeros(w.shape, jax.dtypes.float0) if integer else jnp.zeros_like(w)
    return dx, dw, d_scale, d_bias


_linear.defvjp(lambda call, *saved: (_linear(call, *saved), saved), _backward)


def _reference(call: _Call, x, w, w_scale, bias):
    """The layer in operations of JAX."""
    wide = (w.T if call.transpose_w else w).astype(x.dtype)
    if call.group is not None:
        scale = jnp.repeat(w_scale.astype(x.dtype), call.group, axis=0)
        wide = wide * scale[: call.k]
    product = jnp.dot(x, wide, preferred_element_type=jnp.float32)
    if w_scale is not None and call.group is None:
        product = product * w_scale.astype(jnp.float32)
    bias = None if bias is None else bias.astype(jnp.float32)
    return call.epilogue.apply(product, bias=bias).astype(call.out)


def default_config(p: Problem) -> Config:
    """Returns the configuration that is expected to take the least time."""
    if p.m <= (_FEW if widen.bits(p.right) == 8 else _FEW // 2):
        for config in _few(p, plgpu.align_to(p.m, 16)):
            if mixed_few.fits(p, config):
                return config

    def cost(tokens: int) -> int:
        tiles = plgpu.cdiv(p.n, 128) * plgpu.cdiv(p.m, tokens)
        # Beside the product of a step there is the conversion of its weights.
        return plgpu.cdiv(tiles, _SMS) * (tokens + 64)

    tokens = min((256, 128, 64), key=cost)
    c = LinearManyConfig(tokens=tokens, paired=p.n > 128 and tokens == 256)
    if (
        tokens == 256
        and p.group == 32
        and widen.bits(p.right) == 8
        and p.out_dtype.itemsize == 4
    ):
        # Two groups of scales a step and results of 4 bytes leave no room for a fourth.
        c = dataclasses.replace(c, stages=3)
    plane = mixed_many.Schedule(p.transposed, c).tiles.plane
    blocks = turns.blocks(plane, c.cluster_size)
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
        for stages in (4, 3, 2) if widen.bits(p.right) == 8 else (3, 2):
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


def _check(x: Any, w: Any, bias: Any, transpose_w: bool) -> tuple[int, int]:
    """Returns K and N."""
    deep, wide = (1, 0) if transpose_w else (0, 1)
    fits = len(x.shape) >= 1 and len(w.shape) == 2 and x.shape[-1] == w.shape[deep]
    if not fits:
        wanted = f"(..., K) and {'(N, K)' if transpose_w else '(K, N)'}"
        hint = "transpose_w=True is for weights (N, K)"
        raise no_product("linear", wanted, x, w, hint)
    if jnp.dtype(x.dtype) not in _TOKENS:
        raise errors.DTypeError(
            "linear: narrow weights are not supported beside this type",
            expected="x of bfloat16 or float16",
            got=expect.shown(x),
            hint="convert x, or use ops.scaled_matmul for two narrow operands",
        )
    n = w.shape[wide]
    check_bias("linear", bias, n)
    if bias is not None:
        _check_floats("bias", bias)
    return w.shape[deep], n


def _check_floats(name: str, a: Any) -> None:
    if jnp.dtype(a.dtype) in (*_TOKENS, jnp.dtype(jnp.float32)):
        return
    raise errors.DTypeError(
        f"linear: {name} cannot have this type",
        expected="float32, bfloat16 or float16",
        got=expect.shown(a),
        hint="convert it with astype",
    )


def _group(w_scale: Any, k: int, n: int) -> int | None:
    """Returns the elements that share a scale; None for scales of columns."""
    if w_scale is None:
        return None
    _check_floats("w_scale", w_scale)
    shape = tuple(w_scale.shape)
    if shape == (n,):
        return None
    for group in _GROUPS:
        if shape == (plgpu.cdiv(k, group), n):
            return group
    raise errors.ShapeError(
        "linear: w_scale does not match the weights",
        expected=", ".join(
            f"{s}" for s in [(n,), *((plgpu.cdiv(k, g), n) for g in _GROUPS)]
        ),
        got=shape,
        hint="(N,), or (K / group, N) with groups of 32, 64 or 128; ops.quantize "
        "returns them so",
    )
