# SPDX-License-Identifier: Apache-2.0
"""Attention: operands, checks, and the choice of Hopper's or Blackwell's kernel."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from pallas_gpu import arch, errors, expect
from pallas_gpu.ops import targets
from pallas_gpu.ops.flash import blackwell, hopper
from pallas_gpu.ops.flash.config import (
    REGISTERS,
    AttentionConfig,
    BlackwellAttentionConfig,
)
from pallas_gpu.ops.flash.hopper import Problem
from pallas_gpu.ops.rules import INTERPRET, PARAMS

# The part of a consumer's registers that is not an accumulator or an operand.
_OTHER_REGISTERS = 32
_BLACKWELL_HEAD_DIMS = 64, 128


@expect.arguments(
    q=expect.arrays,
    k=expect.arrays,
    v=expect.arrays,
    causal=expect.boolean,
    sm_scale=expect.optional(expect.number),
    config=expect.optional(
        expect.instance(
            AttentionConfig,
            BlackwellAttentionConfig,
            written="AttentionConfig(...) or BlackwellAttentionConfig(...)",
        )
    ),
    compiler_params=PARAMS,
    interpret=INTERPRET,
)
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    sm_scale: float | None = None,
    config: AttentionConfig | BlackwellAttentionConfig | None = None,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Computes `softmax(sm_scale * q @ k.T) @ v` for each head.

    Since: sm_90a. Issued by: the host; composes with `jax.jit` and `jax.vmap`. It has
    no derivative.

    The kernel is that of the configuration; without one, that of the target in
    `compiler_params`, or else of the attached GPU.

    Args:
      q: (batch, q_len, heads, head_dim), float16 or bfloat16; head_dim a multiple of 16
        up to 256, on Blackwell 64 or 128.
      k, v: (batch, kv_len, kv_heads, head_dim), of the same type. Each head of K and V
        serves heads / kv_heads consecutive heads of Q.
      causal: row i of Q sees rows 0 to i of K and V, also where the lengths differ.
      sm_scale: positive factor of the scores; default: 1 / sqrt(head_dim).
      config: tile sizes and schedule; default: chosen by target, head_dim and mask.
      compiler_params: see `kernel`; default: approximate exponentials (`approx_math`).
      interpret: see `kernel`.

    Returns:
      (batch, q_len, heads, head_dim) of the type of q. Scores, softmax and sums are
      float32; probabilities are rounded to the type of q before the product with V.

    Raises:
      ShapeError, DTypeError: operands that do not match each other.
      ArgumentError: a factor that is not positive; a config that needs more registers
        than there are, or is for another target.
      OutOfResources: a config that needs more SMEM, or TMEM, than there is.

    Example:
      >>> out = ops.attention(q, k, v, causal=True)
    """
    _check_operands(q, k, v)
    batch, q_len, heads, head_dim = q.shape
    factor = 1 / math.sqrt(head_dim) if sm_scale is None else float(sm_scale)
    _check_scale(factor)
    config = _chosen(config, compiler_params, head_dim, causal)
    problem = functools.partial(
        Problem,
        *(batch, q_len, k.shape[1], heads, k.shape[2], head_dim),
        dtype=jnp.dtype(q.dtype),
        causal=bool(causal),
        factor=factor * math.log2(math.e),
    )
    if isinstance(config, AttentionConfig):
        _check_registers(config, head_dim)
        f = hopper.make_kernel(problem(config=config), compiler_params, interpret)
    else:
        _check_head_dim_on_blackwell(head_dim)
        f = blackwell.make_kernel(problem(config=config), compiler_params, interpret)
    return f(q, k, v)


def _chosen(
    config: AttentionConfig | BlackwellAttentionConfig | None,
    compiler_params: plgpu.CompilerParams | None,
    head_dim: int,
    causal: bool,
) -> AttentionConfig | BlackwellAttentionConfig:
    """Returns the configuration; its type says which kernel is meant.

    Raises:
      ArgumentError: the one given is for another target than the parameters.
    """
    if config is None:
        if targets.chosen(compiler_params).has(arch.Feature.TCGEN05):
            return BlackwellAttentionConfig.default(head_dim)
        return AttentionConfig.default(head_dim, causal=causal)
    given = None if compiler_params is None else compiler_params.target
    is_for_hopper = isinstance(config, AttentionConfig)
    needed = arch.Feature.WGMMA if is_for_hopper else arch.Feature.TCGEN05
    if given is None or arch.target(given).has(needed):
        return config
    raise errors.ArgumentError(
        "attention: the configuration is for another target",
        expected="AttentionConfig(...) for sm_90a, BlackwellAttentionConfig(...) for "
        "sm_100a",
        got=f"{type(config).__name__} and target={given!r}",
        hint="omit config or target",
    )


def _check_head_dim_on_blackwell(head_dim: int) -> None:
    if head_dim not in _BLACKWELL_HEAD_DIMS:
        raise errors.ShapeError(
            "attention: this head_dim is not supported on Blackwell",
            expected="64 or 128",
            got=head_dim,
            hint="pad q, k and v with zeros, and pass sm_scale",
        )


def _check_operands(q: Any, k: Any, v: Any) -> None:
    shapes = tuple(tuple(x.shape) for x in (q, k, v))
    fit = all(len(s) == 4 and min(s) > 0 for s in shapes) and (
        shapes[1] == shapes[2]
        and shapes[0][0] == shapes[1][0]
        and shapes[0][3] == shapes[1][3]
        and shapes[0][2] % shapes[1][2] == 0
    )
    if not fit:
        raise errors.ShapeError(
            "attention: the shapes do not match",
            expected="q (batch, q_len, heads, head_dim), k and v (batch, kv_len, "
            "kv_heads, head_dim), heads a multiple of kv_heads",
            got="{}, {} and {}".format(*shapes),
            hint="heads come before head_dim, the sequence before heads",
        )
    if shapes[0][3] not in range(16, 257, 16):
        raise errors.ShapeError(
            "attention: this head_dim is not supported",
            expected="a multiple of 16 up to 256",
            got=shapes[0][3],
            hint="pad q, k and v with zeros",
        )
    dtypes = {jnp.dtype(x.dtype) for x in (q, k, v)}
    if len(dtypes) > 1 or q.dtype not in (jnp.float16, jnp.bfloat16):
        raise errors.DTypeError(
            "attention: these element types are not supported",
            expected="float16 or bfloat16 for q, k and v",
            got=", ".join(jnp.dtype(x.dtype).name for x in (q, k, v)),
            hint="convert the operands with astype",
        )


def _check_scale(factor: float) -> None:
    if not 0 < factor < math.inf:
        # The maximum of a row is taken before the factor is applied.
        raise errors.ArgumentError(
            "attention: sm_scale is not a positive number",
            expected="a positive number, or None for 1 / sqrt(head_dim)",
            got=factor,
            hint="negate q instead",
        )


def _check_registers(config: AttentionConfig, head_dim: int) -> None:
    needed = config.accumulator_registers(head_dim) + _OTHER_REGISTERS
    _, available = REGISTERS[config.consumers]
    if needed > available:
        raise errors.ArgumentError(
            "attention: the tiles do not fit in a consumer's registers",
            expected=f"at most {available} registers a thread with "
            f"{config.consumers} consumers",
            got=f"about {needed} for rows={config.rows}, block_kv={config.block_kv}, "
            f"head_dim={head_dim}",
            hint="choose a smaller block_kv, or two consumers",
        )
