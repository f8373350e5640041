# SPDX-License-Identifier: Apache-2.0
"""Attention's derivatives: which operands have them, the kernels, the rule for JAX."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from pallas_gpu import arch, errors
from pallas_gpu.ops.flash import blackwell, masks
from pallas_gpu.ops.flash.backward import bias, hopper, queries, rows
from pallas_gpu.ops.flash.backward.config import (
    CONSUMERS,
    ROWS,
    AttentionBackwardConfig,
    padded_dims,
)
from pallas_gpu.ops.flash.backward.problem import SHIFTS, BackwardProblem, schedule
from pallas_gpu.ops.flash.config import BlackwellAttentionConfig
from pallas_gpu.ops.flash.forward import hopper as forward
from pallas_gpu.ops.flash.masks import Mask
from pallas_gpu.ops.flash.problem import Operands, Problem, Sizes, packed_tiles
from pallas_gpu.ops.rules import aligned

# From this length on fewer heads fit in the L2 cache together, unless they share K.
_LONG, _HEADS_OF_LONG = 4096, 4
# Up to this length persistent blocks are faster. Beyond it, tiles are long and few: the
# hardware gives them to the blocks that are free, whose speeds differ.
_PERSISTENT = 8192
# From so many steps of a tile on the heads of Q that share K and V have parts, if tiles
# differ.
_STEPS_OF_PARTS = 512


def _run(p: Problem[Any], x: Operands) -> tuple[jax.Array, jax.Array | None]:
    if isinstance(p.config, BlackwellAttentionConfig):
        found = blackwell.make_kernel(p)(x._asdict())
    else:
        found = forward.forward(p, x)
    return found["out"], found.get("lse")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def differentiable(p: Problem[Any], x: Operands) -> tuple[jax.Array, jax.Array | None]:
    """Returns the result and logsumexp; they have derivatives."""
    return _run(p, x)


def _forward(p: Problem[Any], x: Operands) -> Any:
    _check_operands(x)
    values = jax.tree.map(lambda primal: primal.value, x, is_leaf=_is_primal)
    backward_problem(p)
    out, lse = _run(dataclasses.replace(p, logsumexp=True), values)
    # Without leaves: what is asked for is known when this is traced.
    of_bias = () if x.bias is not None and x.bias.perturbed else None
    return (out, lse if p.logsumexp else None), (values, of_bias, out, lse)


def _backward(p: Problem[Any], residuals: Any, cotangents: Any) -> tuple[Operands]:
    x, of_bias, out, lse = residuals
    b = backward_problem(p)
    do, dlse = (None if _is_zero(c) else c for c in cotangents)
    do = jnp.zeros_like(out) if do is None else do
    arrays = x._asdict() | {"out": out, "do": do.astype(x.q.dtype), "lse": lse}
    for names, depth in ((("q", "k"), b.head_dim), (("v", "out", "do"), b.v_dim)):
        arrays |= {name: aligned(arrays[name], depth) for name in names}
    if dlse is not None:
        arrays["dlse"] = dlse
    found = _derivatives(b, arrays, with_bias=of_bias is not None)
    columns = {"q": x.q.shape[-1], "k": x.q.shape[-1], "v": x.v.shape[-1]}
    of_operands = {name: found[f"d{name}"][..., :n] for name, n in columns.items()}
    none = Operands(*[None] * len(x))
    return (none._replace(**of_operands, bias=found.get("dbias")),)


differentiable.defvjp(_forward, _backward, symbolic_zeros=True)


def _derivatives(
    p: BackwardProblem, arrays: dict[str, Any], *, with_bias: bool
) -> dict[str, Any]:
    """Returns dq, dk and dv, and dbias if it is asked for.

    Args:
      arrays: the operands by their names, `out` and `lse`, the results, and `do` and
        `dlse`, their cotangents; without the latter it is zero.
    """
    own = ("out", "do", "lse", "dlse")[: 3 + ("dlse" in arrays)]
    q_ids, kv_ids = arrays["q_ids"], arrays["kv_ids"]
    if p.packed:
        arrays = arrays | {x: arrays[x][None] for x in ("q", "k", "v", *own)}
        starts = arrays["kv_starts"], p.kv_tiles, p.block_kv
        arrays["of_tiles"] = packed_tiles(*starts)
    of_rows = rows.make_kernel(p, own)(arrays)
    arrays |= {"lse": of_rows["lse2"], "delta": of_rows["delta"]}
    if p.mask.segments:
        arrays["q_ids"] = aligned(q_ids, p.padded_q_len)
        arrays["kv_ids"] = aligned(kv_ids, plgpu.align_to(p.kv_len, p.block_kv))
        tile = p.block_kv, p.config.block_q
        arrays["of_segments"] = masks.segment_blocks(kv_ids, q_ids, *tile)
    if p.bias is not None:
        arrays["bias"] = bias.padded(p, arrays["bias"])
    if p.persistent:
        arrays["schedule"] = jnp.asarray(schedule(p))
    zeros = {"dq": of_rows.get("dq")}
    if p.parts > 1:
        zeros |= {f"d{x}": jnp.zeros(arrays[x].shape, jnp.float32) for x in ("k", "v")}
    totals = {name: jax.new_ref(zeros[name]) for name in p.added}
    shifted = {x: _shifted(arrays[x]) for x in ("lse", "delta")} if p.packed else {}
    found = hopper.make_kernel(p)(arrays | shifted | totals)
    if p.config.deterministic:
        tile = queries.BLOCK_Q, queries.BLOCK_KV
        if p.mask.segments:
            arrays["of_segments"] = masks.segment_blocks(q_ids, kv_ids, *tile)
        if p.packed:
            tiles = p.tiles_of(p.q_len, queries.BLOCK_Q)
            arrays["of_tiles"] = packed_tiles(arrays["q_starts"], tiles, tile[0])
        found |= queries.make_kernel(p)(arrays)
        if with_bias:
            found["dbias"] = bias.derivative(p, arrays)
    found |= {name: ref[...] for name, ref in totals.items()}
    if "dq" in totals:
        found["dq"] *= p.scores.sm_scale
    for name in ("dq", "dk", "dv"):
        narrow = found[name].astype(p.dtype)
        found[name] = narrow[0] if p.packed else narrow
    return found


def _shifted(numbers: jax.Array) -> jax.Array:
    """Returns copies, each of which begins an element further than the one before."""
    copies = [
        jnp.pad(numbers, ((0, 0), (0, 0), (n, SHIFTS - n))) for n in range(SHIFTS)
    ]
    return jnp.concatenate(copies)


def backward_problem(p: Problem[Any]) -> BackwardProblem:
    _check_options(p)
    config = p.backward or _default_config(p)
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
