# SPDX-License-Identifier: Apache-2.0
"""Attention for Hopper: operands and checks."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from pallas_gpu import errors, expect
from pallas_gpu.ops.attention_config import REGISTERS, AttentionConfig
from pallas_gpu.ops.attention_kernel import Problem, make_kernel
from pallas_gpu.ops.rules import INTERPRET, PARAMS

# The part of a consumer's registers that is not an accumulator or an operand.
_OTHER_REGISTERS = 32


@expect.arguments(
    q=expect.arrays,
    k=expect.arrays,
    v=expect.arrays,
    causal=expect.boolean,
    sm_scale=expect.optional(expect.number),
    config=expect.optional(
        expect.instance(AttentionConfig, written="AttentionConfig(...)")
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
    config: AttentionConfig | None = None,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Computes `softmax(sm_scale * q @ k.T) @ v` for each head.

    Since: sm_90a. Issued by: the host; composes with `jax.jit` and `jax.vmap`. It has
    no derivative.

    Args:
      q: (batch, q_len, heads, head_dim), float16 or bfloat16; head_dim a multiple of 16
        up to 256.
      k, v: (batch, kv_len, kv_heads, head_dim), of the same type. Each head of K and V
        serves heads / kv_heads consecutive heads of Q.
      causal: row i of Q sees rows 0 to i of K and V, also where the lengths differ.
      sm_scale: positive factor of the scores; default: 1 / sqrt(head_dim).
      config: tile sizes and schedule; default: chosen by head_dim and mask.
      compiler_params: see `kernel`; default: approximate exponentials (`approx_math`).
      interpret: see `kernel`.

    Returns:
      (batch, q_len, heads, head_dim) of the type of q. Scores, softmax and sums are
      float32; probabilities are rounded to the type of q before the product with V.

    Raises:
      ShapeError, DTypeError: operands that do not match each other.
      ArgumentError: a factor that is not positive; a config that needs more registers
        than there are.
      OutOfResources: a config that needs more SMEM than there is.

    Example:
      >>> out = ops.attention(q, k, v, causal=True)
    """
    _check_operands(q, k, v)
    batch, q_len, heads, head_dim = q.shape
    factor = 1 / math.sqrt(head_dim) if sm_scale is None else float(sm_scale)
    config = config or AttentionConfig.default(head_dim, causal=causal)
    _check_scale(factor)
    _check_registers(config, head_dim)
    problem = Problem(
        *(batch, q_len, k.shape[1], heads, k.shape[2], head_dim),
        dtype=jnp.dtype(q.dtype),
        causal=bool(causal),
        factor=factor * math.log2(math.e),
        config=config,
    )
    return make_kernel(problem, compiler_params, interpret)(q, k, v)


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
