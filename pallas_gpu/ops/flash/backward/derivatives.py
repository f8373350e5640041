# SPDX-License-Identifier: Apache-2.0
"""Attention's derivatives: which operands have them, and the rule for JAX."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from pallas_gpu import arch, errors
from pallas_gpu.ops.flash.backward import gradients
from pallas_gpu.ops.flash.backward.config import (
    CONSUMERS,
    ROWS,
    AttentionBackwardConfig,
    padded_dims,
)
from pallas_gpu.ops.flash.backward.problem import BackwardProblem
from pallas_gpu.ops.flash.config import BlackwellAttentionConfig
from pallas_gpu.ops.flash.masks import Mask
from pallas_gpu.ops.flash.operands import padded
from pallas_gpu.ops.flash.problem import Operands, Problem, Sizes

# From this length on fewer heads fit in the L2 cache together, unless they share K.
_LONG, _HEADS_OF_LONG = 4096, 4
# Up to this length persistent blocks are faster. Beyond it, tiles are long and few: the
# hardware gives them to the blocks that are free, whose speeds differ.
_PERSISTENT = 8192
# From so many steps of a tile on the heads of Q that share K and V have parts, if tiles
# differ.
_STEPS_OF_PARTS = 512

# Takes a problem, operands, compiler parameters and `interpret`.
Forward = Callable[[Problem[Any], Operands, Any, Any], tuple[Any, Any]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 3, 4, 5))
def differentiable(
    forward: Forward,
    p: Problem[Any],
    x: Operands,
    config: AttentionBackwardConfig | None,
    compiler_params: Any,
    interpret: Any,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns `forward(p, x, compiler_params, interpret)`, which has derivatives.

    Raises:
      DifferentiationError: that of an operand that has none.
      UnsupportedError: derivatives of a problem that the backward pass does not have.
    """
    del config
    return forward(p, x, compiler_params, interpret)


def _forward(
    forward: Forward,
    p: Problem[Any],
    x: Operands,
    config: AttentionBackwardConfig | None,
    compiler_params: Any,
    interpret: Any,
) -> Any:
    _check_operands(x)
    values = jax.tree.map(lambda primal: primal.value, x, is_leaf=_is_primal)
    backward_problem(p, config)
    with_sums = dataclasses.replace(p, logsumexp=True)
    out, lse = forward(with_sums, values, compiler_params, interpret)
    # Without leaves: what is asked for is known when this is traced.
    of_bias = () if x.bias is not None and x.bias.perturbed else None
    return (out, lse if p.logsumexp else None), (values, of_bias, out, lse)


def _backward(
    forward: Forward,
    p: Problem[Any],
    config: AttentionBackwardConfig | None,
    compiler_params: Any,
    interpret: Any,
    residuals: Any,
    cotangents: Any,
) -> tuple[Operands]:
    del forward
    x, of_bias, *results = residuals
    b = backward_problem(p, config)
    do, dlse = (None if _is_zero(c) else c for c in cotangents)
    if do is None:
        do = jnp.zeros_like(results[0])
    wide = x._replace(
        q=padded(x.q, b.head_dim),
        k=padded(x.k, b.head_dim),
        v=padded(x.v, b.v_dim),
    )
    results[0], do = (padded(part, b.v_dim) for part in (results[0], do))
    dq, dk, dv, dbias = gradients.of_operands(
        b,
        wide,
        tuple(results),
        (do, dlse),
        compiler_params,
        interpret,
        with_bias=of_bias is not None,
    )
    columns, of_v = slice(x.q.shape[-1]), slice(x.v.shape[-1])
    none = Operands(*[None] * len(x))
    found = {"q": dq[..., columns], "k": dk[..., columns], "v": dv[..., of_v]}
    found["bias"] = dbias
    return (none._replace(**found),)


differentiable.defvjp(_forward, _backward, symbolic_zeros=True)


def backward_problem(
    p: Problem[Any], config: AttentionBackwardConfig | None
) -> BackwardProblem:
    """Returns the problem of the derivatives.

    Raises:
      ArgumentError: a configuration that does not fit the registers.
      UnsupportedError: an option without derivatives.
    """
    _check_options(p)
    if config is None:
        config = _default_config(p)
    if p.deterministic or p.bias is not None:
        # With a bias there is no other kernel.
        config = dataclasses.replace(config, deterministic=True)
    head_dim, v_dim = padded_dims(config.block_q, p.head_dim, p.v_dim)
    fields = {f.name: getattr(p, f.name) for f in dataclasses.fields(Sizes)}
    fields |= {"head_dim": head_dim, "v_dim": v_dim, "config": config}
    parts = math.gcd(config.kv_parts, p.group)
    problem = BackwardProblem(**fields).divided(parts)
    if config.block_q > ROWS and problem.head_dim + problem.v_dim > 160:
        raise errors.ArgumentError(
            "attention: the tiles of the backward pass do not fit in registers",
            expected="block_q=64 for head_dims of more than 160 together",
            got=f"block_q={config.block_q}, {p.head_dim} and {p.v_dim}",
            hint="leave out the configuration of the backward pass",
        )
    return problem


def _default_config(p: Problem[Any]) -> AttentionBackwardConfig:
    head_dim = max(p.head_dim, p.v_dim)
    ordered = p.deterministic or p.bias is not None
    config = AttentionBackwardConfig.default(head_dim, deterministic=ordered)
    plain = p.known and not p.scores.modifies
    if not plain and config.block_q > ROWS and head_dim % 32 == 0:
        # The larger tiles have been measured without these alone.
        config = dataclasses.replace(config, block_q=ROWS, stages=4)
    if plain and p.kv_len <= _PERSISTENT:
        config = dataclasses.replace(config, blocks=_persistent_blocks(p))
    elif plain and 64 < head_dim <= 128:
        # One buffer of K leaves room for a third one of Q and dO.
        config = dataclasses.replace(config, stages=3)
    steps = plgpu.cdiv(p.q_len, config.block_q) * (p.group)
    has_parts = config.blocks is not None and p.mask != Mask() and p.heads > p.kv_heads
    if 64 < head_dim <= 128 and has_parts and steps >= _STEPS_OF_PARTS:
        config = dataclasses.replace(config, kv_parts=4, heads_together=_HEADS_OF_LONG)
    if head_dim <= 128 and p.kv_len >= _LONG and p.heads == p.kv_heads:
        config = dataclasses.replace(config, heads_together=_HEADS_OF_LONG)
    return config


def _persistent_blocks(p: Problem[Any]) -> int:
    """Returns one for each SM, or fewer that take no longer: that saves power."""
    most = arch.SM_90A.sm_count
    if p.mask != Mask():
        return most
    tiles = p.batch * p.kv_heads * plgpu.cdiv(p.kv_len, CONSUMERS * ROWS)
    return plgpu.cdiv(tiles, plgpu.cdiv(tiles, most))


def _check_options(p: Problem[Any]) -> None:
    options = {
        "a kernel for Blackwell": isinstance(p.config, BlackwellAttentionConfig),
        "operands of float8": p.narrow,
    }
    found = [name for name, is_given in options.items() if is_given]
    if found:
        raise errors.UnsupportedError(
            "attention: no derivatives with this option",
            expected="none of " + ", ".join(options),
            got=", ".join(found),
            hint="jax.nn.dot_product_attention has derivatives with more options",
        )


def _check_operands(x: Operands) -> None:
    """Raises DifferentiationError where a derivative is asked for that there is not."""
    for name, primal in x._asdict().items():
        if name in ("q", "k", "v", "bias") or primal is None or not primal.perturbed:
            continue
        name = "alibi_slopes" if name == "slopes" else name
        raise errors.DifferentiationError(
            f"attention: {name} has no derivative",
            expected="derivatives of q, k, v and bias",
            got=f"a derivative of {name}",
            hint=f"jax.lax.stop_gradient({name})",
        )


def _is_primal(x: Any) -> bool:
    return hasattr(x, "perturbed")


def _is_zero(x: Any) -> bool:
    return x is None or isinstance(x, jax.custom_derivatives.SymbolicZero)
