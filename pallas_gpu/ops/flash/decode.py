# SPDX-License-Identifier: Apache-2.0
"""Decode: attention of a few new tokens to a cache of keys and values"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

import pallas_gpu as plgpu
from pallas_gpu import arch, errors, expect
from pallas_gpu.ops import rules, targets
from pallas_gpu.ops.flash.config import DecodeConfig
from pallas_gpu.ops.flash.decode_kernel import make_kernel
from pallas_gpu.ops.flash.decode_work import Problem, default_config
from pallas_gpu.ops.flash.operands import factor
from pallas_gpu.ops.flash.problem import APPROXIMATE
from pallas_gpu.ops.rules import Array, Factor, Interpret

_WHO = "decode_attention"
_MOST_QUERIES, _MOST_DIMS = 8, 256
_WIDE = jnp.float16, jnp.bfloat16
_NARROW = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8


class _Cache(NamedTuple):
    """Sizes of K and V.

    Attributes:
      outer: sequences, or pages.
      tokens: of each of them.
      heads, head_dim: of each token.
    """

    outer: int
    tokens: int
    heads: int
    head_dim: int


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
    _check(q, k, v, cache, lengths, page_table)
    shapes = (), (1,), (cache.heads,)
    each = "one for all, or for each head, not for each token"
    scales = [
        factor(_WHO, name, x, shapes, each)
        for x, name in ((k_scale, "k_scale"), (v_scale, "v_scale"))
    ]
    batch, q_len, heads, head_dim = q.shape
    sm_scale = 1 / math.sqrt(head_dim) if sm_scale is None else float(sm_scale)
    for name, number in (("sm_scale", sm_scale), ("soft_cap", soft_cap)):
        rules.positive(_WHO, name, number, "negate q, or v, instead")
    target = targets.chosen(compiler_params)
    _check_target(target)
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
        v_factor=factors[1],
        causal=causal,
        window=window,
        soft_cap=soft_cap,
        factor=sm_scale * factors[0] * math.log2(math.e),
        logsumexp=return_logsumexp,
        config=config or DecodeConfig(),
        compiler_params=compiler_params or APPROXIMATE,
        interpret=interpret,
    )
    if config is None:
        config = default_config(problem, target)
        problem = dataclasses.replace(problem, config=config)
    arrays = {"q": q.reshape(batch, q_len, cache.heads, -1, head_dim), "k": k, "v": v}
    arrays |= {"lengths": lengths, "table": page_table}
    for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
        arrays[name] = None if isinstance(scale, float) else scale.reshape(-1)
    given = {name: array for name, array in arrays.items() if array is not None}
    found = _without_derivative(problem, given)
    out = found["out"].reshape(shape)
    if not return_logsumexp:
        return out
    return out, found["logsumexp"].reshape(shape[:-1])


def _without_derivative(p: Problem, arrays: dict[str, Any]) -> Any:
    refusal = errors.DifferentiationError(
        "decode_attention: it has no derivative",
        expected="a call outside jax.grad, jax.jvp and jax.linearize",
        got="a call that JAX differentiates",
        hint="use ops.attention, or jax.lax.stop_gradient of q, k and v",
    )
    return rules.without_derivative(make_kernel(p, tuple(arrays)), refusal)(arrays)


def _cache_sizes(q: Any, k: Any, v: Any, kv_layout: str, kv_axis: int | None) -> _Cache:
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
    return _Cache(outer, tokens, heads, head_dim)


def _check(
    q: Any, k: Any, v: Any, cache: _Cache, lengths: Any, page_table: Any
) -> None:
    batch, q_len, heads, head_dim = q.shape
    paged = page_table is not None
    empty = min(*q.shape, *k.shape) == 0
    if empty or heads % cache.heads or head_dim != cache.head_dim or (
        v is not None and v.shape != k.shape
    ) or not (paged or cache.outer == batch):  # fmt: skip
        shapes = [None if x is None else tuple(x.shape) for x in (q, k, v)]
        raise errors.ShapeError(
            "decode_attention: the shapes do not match",
            expected="q (batch, q_len, heads, head_dim), k and v (batch, kv_len, "
            "kv_heads, head_dim), heads a multiple of kv_heads; with a page table "
            "(pages, page_size, kv_heads, head_dim)",
            got=f"{shapes[0]}, {shapes[1]} and {shapes[2]}",
            hint='kv_layout="HND" is for kv_heads before the tokens',
        )
    if head_dim not in range(16, _MOST_DIMS + 1, 16):
        raise errors.ShapeError(
            "decode_attention: this head_dim is not supported",
            expected=f"a multiple of 16 up to {_MOST_DIMS}",
            got=head_dim,
            hint="pad q, k and v with zeros, and pass sm_scale",
        )
    if q_len > _MOST_QUERIES:
        raise errors.ShapeError(
            "decode_attention: too many queries for one launch",
            expected=f"q_len of 1 to {_MOST_QUERIES}",
            got=q_len,
            hint="use ops.attention for a prompt",
        )
    _check_types(q, k, v, head_dim)
    if lengths is not None:
        each = "one number of tokens for each sequence"
        rules.check_array(_WHO, "lengths", lengths, [(batch,)], each, jnp.int32)
    if paged:
        _check_pages(batch, cache.tokens, page_table)


def _check_types(q: Any, k: Any, v: Any, head_dim: int) -> None:
    found = [jnp.dtype(x.dtype) for x in (q, k, v) if x is not None]
    narrow = found[1] in map(jnp.dtype, _NARROW)
    if q.dtype not in _WIDE or len({*found[1:]}) > 1 or not (
        narrow or found[1] == found[0]
    ):  # fmt: skip
        wanted = "float16 or bfloat16 for q; for k and v the same type, or both "
        wanted += ", ".join(jnp.dtype(d).name for d in _NARROW)
        raise rules.no_types(_WHO, wanted, q, k, v)
    if narrow and head_dim % 32:
        raise errors.ShapeError(
            "decode_attention: this head_dim is not supported for elements of 8 bits",
            expected="a multiple of 32",
            got=head_dim,
            hint="pad q, k and v with zeros, and pass sm_scale",
        )


def _check_pages(batch: int, page_size: int, table: Any) -> None:
    if page_size < 8 or page_size & (page_size - 1):
        raise errors.ShapeError(
            "decode_attention: this page size is not supported",
            expected="a power of two, 8 or more",
            got=page_size,
            hint="a copy carries a page's rows of one head, in whole tiles of 8 rows",
        )
    if len(table.shape) != 2 or table.shape[0] != batch or table.shape[1] < 1:
        raise errors.ShapeError(
            "decode_attention: the page table does not have a row for each sequence",
            expected=f"({batch}, pages_per_sequence)",
            got=tuple(table.shape),
            hint="rows of sequences with fewer pages may end in any numbers",
        )
    rules.check_array(_WHO, "page_table", table, [table.shape], "", jnp.int32)


def _check_target(found: Any) -> None:
    if not found.has(arch.Feature.WGMMA):
        raise errors.TargetError(
            "decode_attention: the target has no wgmma",
            expected="sm_90a",
            got=found.name,
            hint="use ops.attention",
        )
