# SPDX-License-Identifier: Apache-2.0
"""Decode: attention of a few new tokens to a cache of keys and values"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from pallas_gpu import errors, expect
from pallas_gpu.ops import targets
from pallas_gpu.ops.flash import decode_checks as checks
from pallas_gpu.ops.flash.decode_checks import Cache
from pallas_gpu.ops.flash.decode_config import DecodeConfig
from pallas_gpu.ops.flash.decode_kernel import make_kernel
from pallas_gpu.ops.flash.decode_work import Problem, default_config
from pallas_gpu.ops.rules import Array, Factor, Interpret, positive


@expect.arguments(
    kv_axis=expect.optional(expect.integer(0, 1)),
    window=expect.optional(expect.integer(1)),
)
def decode_attention(
    q: Array,
    k: Array,
    v: Array | None = None,
    *,
    lengths: Array | None = None,
    page_table: Array | None = None,
    k_scale: Factor = None,
    v_scale: Factor = None,
    kv_layout: Literal["NHD", "HND"] = "NHD",
    kv_axis: int | None = None,
    causal: bool = True,
    sm_scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    return_logsumexp: bool = False,
    config: DecodeConfig | None = None,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Interpret = None,
) -> Any:
    """Computes attention of each sequence's newest tokens to its cache.

    Since: sm_90a. Issued by: the host; composes with `jax.jit` and `jax.vmap`. One
    launch: CTAs divide the keys and combine their results, in a fixed order, so results
    do not change from run to run. It has no derivative: `attention` has one.

    The queries are the last `q_len` tokens of their sequence, whose keys and values are
    in the cache already. Heads of Q that share a head of K are computed together, with
    one read of K and V for up to 64 of them times the queries.

    Args:
      q: (batch, heads, head_dim), or (batch, q_len, heads, head_dim) with q_len from 1
        to 8; float16 or bfloat16; head_dim a multiple of 16 up to 256.
      k, v: the cache, of the type of q, or of 8 bits, float8_e4m3fn, float8_e5m2 or
        int8, which become float16, exactly: (batch, kv_len, kv_heads, head_dim), or
        with a page table (pages, page_size, kv_heads, head_dim), page_size a power of
        two of 8 or more. Each head of K and V serves heads / kv_heads consecutive heads
        of Q.
      lengths: (batch,), int32: tokens of each sequence, the queries' own included;
        between 0 and the size of its cache, to which others are clamped. Default: all
        of the cache. What lies behind a length is not used, whatever it is.
      page_table: (batch, pages_per_sequence), int32: the pages of each sequence in
        their order. Entries of pages that no query sees are not used.
      k_scale, v_scale: factors of K and V: numbers, or float32 of shape (), (1,) or
        (kv_heads,). Default: 1.
      kv_layout: "NHD" for the shapes above; "HND" if heads come before tokens: (batch
        or pages, kv_heads, kv_len or page_size, head_dim).
      kv_axis: 0 or 1: k is one array of keys and values, which has this axis of size 2
        besides, and v is None: (2, pages, page_size, kv_heads, head_dim) has 0.
      causal: a query sees the tokens up to its own; False: all of its sequence.
      sm_scale: positive factor of the scores; default: 1 / sqrt(head_dim).
      window: a query sees at most this many tokens, its own the last of them.
      soft_cap: positive; scores become `soft_cap * tanh(score / soft_cap)`.
      return_logsumexp: whether to return the logarithm of the softmax's denominator.
      config: blocks and division of work; default: chosen by sizes and target.
      compiler_params: see `kernel`; default: approximate exponentials (`approx_math`).
      interpret: see `kernel`.

    Returns:
      An array of the shape and type of q. A query that sees no token gets zeros. With
      `return_logsumexp` also float32 of that shape without head_dim: natural
      logarithms, -inf where a query sees nothing. Scores, softmax and sums are float32;
      probabilities are rounded to the type of q before the product with V. Beside a
      cache of 8 bits that is float16, and bfloat16 queries are scaled to its range by
      powers of two, for each the one that suits its largest element.

    Raises:
      ShapeError, DTypeError: operands that do not match each other.
      ArgumentError: a number that is not positive.
      TargetError: a target without wgmma.
      OutOfResources: a config that needs more SMEM than there is.
      DifferentiationError: under `jax.grad` and the like.

    Example:
      >>> out = ops.decode_attention(q, k_pages, v_pages, lengths=n, page_table=table)
    """
    shape = tuple(q.shape)
    if len(shape) == 3:
        q = jnp.expand_dims(q, 1)
    cache = _cache_sizes(q, k, v, kv_layout, kv_axis)
    checks.operands(q, k, v, cache, lengths, page_table)
    scales = [
        checks.scale(x, name, cache.heads)
        for x, name in ((k_scale, "k_scale"), (v_scale, "v_scale"))
    ]
    batch, q_len, heads, head_dim = q.shape
    factor = 1 / math.sqrt(head_dim) if sm_scale is None else float(sm_scale)
    for name, number in (("sm_scale", factor), ("soft_cap", soft_cap)):
        positive("decode_attention", name, number, checks.SIGN_HINT)
    target = targets.chosen(compiler_params)
    checks.target(target)
    factors = [x if isinstance(x, float) else 1.0 for x in scales]
    paged = page_table is not None
    kv_len = cache.tokens * (1 if page_table is None else page_table.shape[1])
    if window is not None and window >= kv_len:
        window = None
    problem = Problem(
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        heads=heads,
        kv_heads=cache.heads,
        head_dim=head_dim,
        dtype=jnp.dtype(q.dtype),
        kv_dtype=jnp.dtype(k.dtype),
        page_size=cache.tokens if paged else None,
        heads_first=kv_layout == "HND",
        kv_axis=kv_axis,
        has_lengths=lengths is not None,
        scales=(not isinstance(scales[0], float), not isinstance(scales[1], float)),
        v_factor=factors[1],
        causal=causal,
        window=window,
        soft_cap=soft_cap,
        factor=factor * factors[0] * math.log2(math.e),
        logsumexp=return_logsumexp,
        config=config or DecodeConfig(),
    )
    if config is None:
        config = default_config(problem, target)
        problem = dataclasses.replace(problem, config=config)
    arrays = [q.reshape(batch, q_len, cache.heads, -1, head_dim), k]
    optional = [
        v,
        lengths,
        page_table,
        *(x for x in scales if not isinstance(x, float)),
    ]
    arrays += [x for x in optional if x is not None]
    out = _without_derivative(problem, compiler_params, interpret, *arrays)
    out = [out[0].reshape(shape), *(x.reshape(shape[:-1]) for x in out[1:])]
    return tuple(out) if return_logsumexp else out[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _without_derivative(
    p: Problem, compiler_params: Any, interpret: Any, *arrays: Any
) -> Any:
    return make_kernel(p, compiler_params, interpret)(*arrays)


@_without_derivative.defjvp
def _(p: Problem, compiler_params: Any, interpret: Any, arrays: Any, tangents: Any):
    raise errors.DifferentiationError(
        "decode_attention: it has no derivative",
        expected="a call outside jax.grad, jax.jvp and jax.linearize",
        got="a call that JAX differentiates",
        hint="use ops.attention, or jax.lax.stop_gradient of q, k and v",
    )


def _cache_sizes(q: Any, k: Any, v: Any, kv_layout: str, kv_axis: int | None) -> Cache:
    """Returns the sizes of the cache, after a check of its number of dimensions."""
    expected = "q (batch, heads, head_dim) or (batch, q_len, heads, head_dim); k and v "
    expected += "of four dimensions; with kv_axis, k of five and v=None"
    axis = -1 if kv_axis is None else kv_axis
    together = kv_axis is not None
    if len(q.shape) != 4 or len(k.shape) != 4 + together or (v is None) != together:
        got = [None if x is None else tuple(x.shape) for x in (q, k, v)]
        raise errors.ShapeError(
            "decode_attention: the operands do not have these dimensions",
            expected=expected,
            got=f"{got[0]}, {got[1]} and {got[2]}, kv_axis={kv_axis}",
            hint="kv_axis=1 is for one cache (pages, 2, page_size, kv_heads, head_dim)",
        )
    shape = list(k.shape)
    if together and shape.pop(axis) != 2:
        raise errors.ShapeError(
            "decode_attention: the cache does not consist of keys and values",
            expected=f"2 elements along axis {kv_axis}",
            got=f"k of shape {tuple(k.shape)}",
            hint="kv_axis is the axis of k where keys and values are",
        )
    outer, tokens, heads, head_dim = shape
    if kv_layout == "HND":
        tokens, heads = heads, tokens
    return Cache(outer, tokens, heads, head_dim)
