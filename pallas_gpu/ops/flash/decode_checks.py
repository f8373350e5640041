# SPDX-License-Identifier: Apache-2.0
"""Decode: what operands have to be"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_gpu import arch, errors, expect
from pallas_gpu.ops.rules import positive

_MOST_QUERIES, _MOST_DIMS = 8, 256
_WIDE = jnp.float16, jnp.bfloat16
SIGN_HINT = "negate q, or v, instead"
_NARROW = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8


@dataclasses.dataclass(frozen=True)
class Cache:
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


def operands(
    q: Any, k: Any, v: Any, cache: Cache, lengths: Any, page_table: Any
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
    _types(q, k, v, head_dim)
    _indices(lengths, "lengths", (batch,), "one number of tokens for each sequence")
    if paged:
        _pages(batch, cache.tokens, page_table)


def _types(q: Any, k: Any, v: Any, head_dim: int) -> None:
    found = [jnp.dtype(x.dtype) for x in (q, k, v) if x is not None]
    narrow = found[1] in map(jnp.dtype, _NARROW)
    if q.dtype not in _WIDE or len({*found[1:]}) > 1 or not (
        narrow or found[1] == found[0]
    ):  # fmt: skip
        raise errors.DTypeError(
            "decode_attention: these element types are not supported",
            expected="float16 or bfloat16 for q; for k and v the same type, or both "
            + ", ".join(jnp.dtype(d).name for d in _NARROW),
            got=", ".join(d.name for d in found),
            hint="convert the operands with astype",
        )
    if narrow and head_dim % 32:
        raise errors.ShapeError(
            "decode_attention: this head_dim is not supported for elements of 8 bits",
            expected="a multiple of 32",
            got=head_dim,
            hint="pad q, k and v with zeros, and pass sm_scale",
        )


def _indices(array: Any, name: str, shape: tuple[int, ...], meaning: str) -> None:
    if array is None:
        return
    if jnp.dtype(array.dtype) != jnp.int32:
        raise errors.DTypeError(
            f"decode_attention: {name} are not int32",
            expected="int32",
            got=jnp.dtype(array.dtype).name,
            hint=f"{name}.astype(jnp.int32)",
        )
    if tuple(array.shape) != shape:
        raise errors.ShapeError(
            f"decode_attention: {name} do not have one element for each sequence",
            expected=f"shape {shape}: {meaning}",
            got=tuple(array.shape),
            hint="jnp.broadcast_to(n, (batch,)) if all are equal",
        )


def _pages(batch: int, page_size: int, table: Any) -> None:
    if page_size < 8 or page_size & (page_size - 1):
        raise errors.ShapeError(
            "decode_attention: this page size is not supported",
            expected="a power of two, 8 or more",
            got=page_size,
            hint="a copy carries a page's rows of one head, in whole tiles of 8 rows",
        )
    if jnp.dtype(table.dtype) != jnp.int32:
        raise errors.DTypeError(
            "decode_attention: the page table is not int32",
            expected="int32",
            got=jnp.dtype(table.dtype).name,
            hint="page_table.astype(jnp.int32)",
        )
    if len(table.shape) != 2 or table.shape[0] != batch or table.shape[1] < 1:
        raise errors.ShapeError(
            "decode_attention: the page table does not have a row for each sequence",
            expected=f"({batch}, pages_per_sequence)",
            got=tuple(table.shape),
            hint="rows of sequences with fewer pages may end in any numbers",
        )


def scale(value: Any, name: str, heads: int) -> Any:
    if value is None:
        return 1.0
    if isinstance(value, float):
        positive("decode_attention", name, value, SIGN_HINT)
        return value
    if jnp.dtype(value.dtype) != jnp.float32 or value.shape not in ((), (1,), (heads,)):
        raise errors.ShapeError(
            f"decode_attention: invalid {name}",
            expected=f"a number, or float32 of shape (), (1,) or ({heads},)",
            got=expect.shown(value),
            hint="scales of single tokens are not supported",
        )
    return value.reshape(-1)


def target(found: Any) -> None:
    if not found.has(arch.Feature.WGMMA):
        raise errors.TargetError(
            "decode_attention: the target has no wgmma",
            expected="sm_90a",
            got=found.name,
            hint="use ops.attention",
        )
