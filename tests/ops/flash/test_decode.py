# SPDX-License-Identifier: Apache-2.0
"""Decode: lengths, pages, queries, heads, windows and types, against float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gpu import arch
from pallas_gpu.ops.flash.config import DecodeConfig
from pallas_gpu.ops.flash.decode import decode_attention
from pallas_gpu.ops.flash.decode_work import Problem, default_config
from tests.support import attention, emulated
from tests.support.semantics import BOTH, Warpgroup

# Three CTAs divide the blocks; two share a tile.
GRID = DecodeConfig(stages=2, workers=3)
CLUSTER = DecodeConfig(stages=2, cluster=2)
ROUNDING = {"float16": 2**-9, "bfloat16": 2**-6}
F8, INT8 = "float8_e4m3fn", "int8"
_BF16 = jnp.dtype("bfloat16")
PROBLEM = Problem(
    **{field.name: None for field in dataclasses.fields(Problem)}
    | {"q_len": 1, "kv_len": 8192, "heads": 32, "kv_heads": 8, "head_dim": 128}
    | {"has_lengths": True, "dtype": _BF16, "kv_dtype": _BF16, "config": GRID}
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one call; `lengths` of the sequences, or all of the cache."""

    batch: int = 1
    q_len: int = 1
    kv_len: int = 150
    heads: int = 4
    kv_heads: int = 1
    head_dim: int = 64
    lengths: tuple[int, ...] | None = None


def operands(s: Shape, dtype="float16", cache=None, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((s.batch, s.q_len, s.heads, s.head_dim))
    kv = rng.standard_normal((2, s.batch, s.kv_len, s.kv_heads, s.head_dim))
    if cache == INT8:
        kv = np.round(kv * 32).clip(-127, 127)
    kv = jnp.asarray(kv, jnp.float32).astype(cache or dtype)
    return jnp.asarray(q, dtype), kv[0], kv[1]


def reference(
    q, k, v, lengths, *, causal=True, window=None, k_scale=1, v_scale=1, **options
):
    """Returns result and logsumexp: those of the last rows of each sequence."""
    k, v = (np.asarray(x, np.float64) * by for x, by in ((k, k_scale), (v, v_scale)))
    options |= {"window": None if window is None else (window - 1, None)}
    options |= {"causal": causal, "align": "end", "kv_lengths": np.asarray(lengths)}
    found = attention.reference(q, k, v, **options)
    return found.out, np.swapaxes(found.logsumexp, 1, 2)


def lengths_of(s: Shape):
    return s.lengths or (s.kv_len,) * s.batch


def with_nan(s: Shape, *arrays):
    """Puts NaN where no query looks."""
    row = np.arange(s.kv_len)[:, None, None]
    seen = row < np.reshape(lengths_of(s), (-1, 1, 1, 1))
    return [jnp.where(seen, x, jnp.nan).astype(x.dtype) for x in arrays]


def in_pages(x, size, table):
    """Returns the pages of a cache, where a table says."""
    pages = x.reshape(-1, size, *x.shape[2:])
    order = np.argsort(np.asarray(table).reshape(-1))
    return pages[order]


def random_table(s: Shape, size: int):
    pages = s.batch * s.kv_len // size
    order = np.random.default_rng(1).permutation(pages)
    return jnp.asarray(order.reshape(s.batch, -1), jnp.int32)


def check(
    s: Shape,
    c: DecodeConfig | None = GRID,
    *,
    dtype="float16",
    cache=None,
    page_size=None,
    executed: Any = (),
    **options,
):
    """Compares result and logsumexp in the emulator; `executed`: as of `emulated`."""
    q, k, v = operands(s, dtype, cache)
    masks = {x: options[x] for x in options if x != "kv_layout"}
    expected = reference(q, k, v, lengths_of(s), **masks)
    arrays: dict[str, Any] = {"q": q}
    if cache != INT8:
        k, v = with_nan(s, k, v)
    if page_size is not None:
        table = arrays["page_table"] = random_table(s, page_size)
        k, v = (in_pages(x, page_size, table) for x in (k, v))
    if options.get("kv_layout") == "HND":
        k, v = (jnp.swapaxes(x, 1, 2) for x in (k, v))
    arrays |= {"k": k, "v": v}
    if s.lengths is not None:
        arrays["lengths"] = jnp.asarray(s.lengths, jnp.int32)

    def make(interpret):
        def f(*given):
            named = dict(zip(arrays, given, strict=True))
            return decode_attention(
                **named, config=c, interpret=interpret, return_logsumexp=True, **options
            )

        return f

    args = list(arrays.values())
    emulated.check(make, args, expected, executed, atol=ROUNDING[dtype])


def changed(c=GRID, **changes):
    return dataclasses.replace(c, **changes)


IN_INT8 = {"cache": INT8, "k_scale": 1 / 32, "v_scale": 1 / 32}
WG = {"executed": (Warpgroup,)}
DIFFERENT = {"batch": 4, "kv_len": 200, "heads": 2, "kv_heads": 2}
DIFFERENT["lengths"] = (200, 0, 1, 77)
# Two warpgroups share a block.
SHARED = DecodeConfig(block_kv=128, consumers=2, stages=1, workers=3)
LONG = Shape(2, 1, 300, 4, 2, lengths=(300, 129))
CASES = {
    "a grid": (Shape(), GRID, WG),
    "a cluster": (Shape(), CLUSTER, {"dtype": "bfloat16", "executed": BOTH}),
    # The statistics are sent while the last product is under way.
    "equal shares": (Shape(kv_len=256), CLUSTER, {"dtype": "bfloat16"} | WG),
    "dimensions that three CTAs divide": (
        Shape(kv_len=200),
        changed(CLUSTER, cluster=3),
        {},
    ),
    # They are causal among themselves.
    **{f"{n} queries": (Shape(1, n, 70, heads=1), GRID, {}) for n in (1, 2, 5, 8)},
    "shorter than the cache": (Shape(q_len=4, lengths=(66,)), GRID, {}),
    "later queries": (Shape(q_len=4, lengths=(66,)), GRID, {"causal": False}),
    **{
        f"{n} queries of {heads} heads share {kv_heads}": (
            *(Shape(1, n, 70, heads, kv_heads), GRID, {}),
        )
        for heads, kv_heads, n in (
            *((1, 1, 1), (8, 2, 1), (14, 2, 3), (40, 1, 1), (72, 1, 1), (16, 1, 8)),
        )
    },
    **{
        f"heads of {d}": (Shape(kv_len=70, head_dim=d), GRID, {})
        for d in (16, 80, 128, 256)
    },
    "lengths": (Shape(**DIFFERENT), GRID, WG),
    "lengths, three queries": (Shape(**DIFFERENT, q_len=3), GRID, {}),
    "lengths in a cluster": (Shape(**DIFFERENT, q_len=3), CLUSTER, {}),
    "lengths, seven CTAs": (Shape(**DIFFERENT), changed(workers=7), {}),
    **{
        f"{n} CTAs": (Shape(2, 1, 300, kv_heads=2), changed(workers=n), {})
        for n in (1, 5, 11)
    },
    "large blocks": (Shape(), DecodeConfig(block_kv=128, stages=2, workers=2), {}),
    "one stage": (Shape(), DecodeConfig(stages=1), {}),
    "the default": (Shape(), None, {}),
    "two warpgroups": (LONG, SHARED, WG),
    "two warpgroups in a cluster": (LONG, changed(SHARED, cluster=2), WG),
    "two warpgroups, float8": (LONG, changed(SHARED, cluster=2), {"cache": F8}),
    "two warpgroups, int8": (LONG, SHARED, IN_INT8),
    "two warpgroups, window": (LONG, SHARED, {"window": 90}),
    **{
        f"window of {n}": (Shape(kv_len=300), GRID, {"window": n})
        for n in (1, 64, 100, 1000)
    },
    **{
        f"window of several queries, causal {causal}": (
            Shape(3, 3, lengths=(150, 3, 77)),
            GRID,
            {"window": 30, "causal": causal},
        )
        for causal in (True, False)
    },
    "cap and scale": (Shape(), GRID, {"soft_cap": 2.0, "sm_scale": 0.3}),
    **{
        f"pages of {n} in any order": (
            Shape(batch=2, kv_len=256, lengths=(130, 256)),
            GRID,
            {"page_size": n} | (WG if n == 16 else {}),
        )
        for n in (8, 16, 64, 128)
    },
    "more pages than are read at once": (
        Shape(kv_len=1104, lengths=(1099,), head_dim=16),
        changed(workers=1),
        {"page_size": 8},
    ),
    "one page": (Shape(2, kv_len=16, lengths=(1, 9)), GRID, {"page_size": 16}),
    "pages outside of a window": (
        Shape(batch=2, kv_len=384, lengths=(300, 384)),
        GRID,
        {"page_size": 16, "window": 50},
    ),
    **{
        f"heads before tokens, pages of {n}": (
            Shape(batch=2, kv_len=80, kv_heads=2, lengths=(33, 80)),
            GRID,
            {"page_size": n, "kv_layout": "HND"},
        )
        for n in (None, 16)
    },
    **{
        f"{options['cache']} is widened": (
            Shape(kv_len=100, lengths=(90,)),
            GRID,
            {"dtype": "bfloat16"} | options,
        )
        for options in ({"cache": F8}, {"cache": "float8_e5m2"}, IN_INT8 | WG)
    },
}


@pytest.mark.parametrize("name", CASES)
def test_result_and_logsumexp(name):
    s, c, options = CASES[name]
    check(s, c, **options)


def compare(got, s, *args, atol=2**-8, **options):
    expected, _ = reference(*args, lengths_of(s), **options)
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, atol=atol)


def test_scores_beyond_the_range_of_exponentials():
    q, k, v = operands(Shape())
    got = decode_attention(q * 64, k * 16, v, config=GRID)
    compare(got, Shape(), q * 64, k * 16, v, atol=2**-7)


def test_entries_of_unused_pages_are_not_used():
    s = Shape(batch=2, kv_len=192, lengths=(40, 0))
    q, k, v = operands(s)
    table = np.array(random_table(s, 16))
    k, v = (in_pages(x, 16, table) for x in (k, v))
    table[0, 3:], table[1] = 2**30, -5
    got = decode_attention(
        *(q, k, v),
        lengths=jnp.array(s.lengths, jnp.int32),
        page_table=jnp.asarray(table),
        config=GRID,
    )
    compare(got, s, *operands(s), atol=2**-9)


@pytest.mark.parametrize("kv_axis", [0, 1])
def test_keys_and_values_in_one_array(kv_axis):
    s = Shape(batch=2, kv_len=96, kv_heads=2)
    q, k, v = operands(s)
    table = random_table(s, 16)
    pages = jnp.stack([in_pages(x, 16, table) for x in (k, v)], kv_axis)
    got = decode_attention(q, pages, page_table=table, kv_axis=kv_axis, config=GRID)
    compare(got, s, q, k, v, atol=2**-9)


def test_an_axis_of_queries_may_be_left_out():
    q, k, v = operands(Shape())
    got = decode_attention(q[:, 0], k, v, config=GRID)
    np.testing.assert_array_equal(got, decode_attention(q, k, v, config=GRID)[:, 0])


def test_four_warpgroups_multiply_with_the_registers_of_the_launch():
    # Only beside warpgroups that widen may those that multiply request more.
    c = DecodeConfig(block_kv=256, consumers=4, stages=1, workers=2)
    args = operands(Shape(kv_len=300), "bfloat16")
    compare(decode_attention(*args, config=c), Shape(kv_len=300), *args)


@pytest.mark.parametrize("factor", [2.0**60, 2.0**-60, 0.0])
def test_queries_beyond_the_range_of_float16(factor):
    q, k, v = operands(Shape(kv_len=100), "bfloat16", F8)
    sm_scale = 0.125 / (factor or 1)
    got = decode_attention(q * factor, k, v, sm_scale=sm_scale, config=GRID)
    alike = decode_attention(q * bool(factor), k, v, sm_scale=0.125, config=GRID)
    np.testing.assert_array_equal(got, alike)
    assert np.isfinite(np.asarray(got, np.float32)).all()


@pytest.mark.parametrize("per_head", [True, False])
def test_scales_of_heads(per_head):
    s = Shape(batch=2, kv_len=100, kv_heads=2)
    q, k, v = operands(s, cache=F8)
    scales = jnp.array([0.5, 2] if per_head else [0.75], jnp.float32)
    got = decode_attention(q, k, v, k_scale=scales, v_scale=scales, config=GRID)
    wide = np.resize(np.asarray(scales, np.float64), 2)[:, None]
    k, v = (np.asarray(x, np.float64) * wide for x in (k, v))
    compare(got, s, q, k, v)


@pytest.mark.parametrize("c", [GRID, CLUSTER])
def test_vmap_and_jit(c):
    s = Shape(batch=4, kv_len=100, lengths=(100, 3, 64, 0))
    q, k, v = operands(s)
    stacked = [x.reshape(2, 2, *x.shape[1:]) for x in (q, k, v)]
    lengths = jnp.array(s.lengths, jnp.int32)

    def f(q, k, v, n):
        return decode_attention(q, k, v, lengths=n, config=c)

    got = jax.jit(jax.vmap(f))(*stacked, lengths.reshape(2, 2))
    compare(got.reshape(q.shape), s, q, k, v, atol=2**-9)


WIDE = {"batch": 1, "kv_dtype": jnp.dtype(INT8)}


@pytest.mark.parametrize(
    ("sizes", "cluster", "ctas"),
    [
        ({"batch": 1}, 8, 64),
        ({"batch": 2}, 4, 64),
        (WIDE | {"kv_len": 8192}, 8, 64),
        (WIDE | {"kv_len": 8256}, 1, 128),
        (WIDE | {"kv_len": 8256, "window": 8192}, 8, 64),
        ({"kv_dtype": jnp.dtype(INT8), "kv_len": 4096, "batch": 2}, 4, 64),
        ({"batch": 16}, 1, 128),
        ({"batch": 3}, 1, 128),
        ({"batch": 1, "kv_heads": 1, "heads": 8}, 1, 32),
        ({"batch": 128, "kv_heads": 6, "heads": 6}, 1, 132),
    ],
)
def test_the_work_fills_the_card(sizes, cluster, ctas):
    p = dataclasses.replace(PROBLEM, **sizes)
    p = dataclasses.replace(p, config=default_config(p, arch.target("sm_90a")))
    assert p.config.cluster == cluster
    persistent = p.lanes * p.abreast
    assert ctas == (persistent if cluster == 1 else p.batch * p.units * cluster)
