# SPDX-License-Identifier: Apache-2.0
"""Attention's options, alone and together, against float64; and their refusals."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors
from pallas_gpu.ops.flash.attention import attention
from pallas_gpu.ops.flash.config import AttentionConfig
from tests.support import everywhere, host
from tests.support.refusal import refused
from tests.support.semantics import Warpgroup

pytestmark = pytest.mark.sampled(2)

SMALL = AttentionConfig(block_kv=32)
ROUNDING = 2**-9


def normal(*shape, dtype=jnp.float16, seed=0):
    rng = np.random.default_rng(seed)
    return host.array(rng.standard_normal(shape), dtype)


def operands(q_len=150, kv_len=112, heads=2, kv_heads=1, d=16, batch=2, v_dim=None):
    q = normal(batch, q_len, heads, d)
    k = normal(batch, kv_len, kv_heads, d, seed=1)
    return q, k, normal(batch, kv_len, kv_heads, v_dim or d, seed=2)


def visible(q_len, kv_len, causal=False, window=None, align="start"):
    left, right = window if isinstance(window, tuple) else (window, window)
    shift = kv_len - q_len if align == "end" else 0
    away = np.arange(kv_len)[None, :] - np.arange(q_len)[:, None] - shift
    seen = np.ones((q_len, kv_len), bool)
    seen &= True if left is None else away >= -left
    seen &= True if right is None else away <= right
    return seen & (away <= 0) if causal else seen


def reference(
    q,
    k,
    v,
    *,
    bias=None,
    sm_scale=None,
    soft_cap=None,
    alibi_slopes=None,
    q_segment_ids=None,
    kv_segment_ids=None,
    q_lengths=None,
    kv_lengths=None,
    return_logsumexp=False,
    **band,
):
    """Returns the result and logsumexp in float64, from the whole matrix of scores."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    batch, q_len, _, _ = q.shape
    kv_len = k.shape[1]
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * (sm_scale or q.shape[3] ** -0.5)
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    q_lengths = np.full(batch, q_len) if q_lengths is None else np.asarray(q_lengths)
    kv_lengths = (
        np.full(batch, kv_len) if kv_lengths is None else np.asarray(kv_lengths)
    )
    seen = np.zeros((batch, 1, q_len, kv_len), bool)
    for b, (m, n) in enumerate(zip(q_lengths, kv_lengths, strict=True)):
        seen[b, 0, :m, :n] = visible(m, n, **band)
        if alibi_slopes is not None:
            shift = n - m if band.get("align") == "end" else 0
            away = np.arange(q_len)[:, None] + shift - np.arange(kv_len)[None, :]
            scores[b] -= np.asarray(alibi_slopes)[:, None, None] * np.abs(away)
    if bias is not None:
        scores = scores + np.asarray(bias, np.float64)
    if q_segment_ids is not None:
        same = (
            np.asarray(q_segment_ids)[:, :, None] == np.asarray(kv_segment_ids)[:, None]
        )
        seen = seen & same[:, None]
    scores = np.where(seen, scores, -np.inf)
    with np.errstate(invalid="ignore", divide="ignore"):
        top = np.maximum(scores.max(axis=3, keepdims=True), -1e300)
        p = np.exp(scores - top)
        total = p.sum(axis=3, keepdims=True)
        out = np.einsum("bhqk,bkhd->bqhd", p / np.where(total == 0, 1, total), v)
        lse = (top + np.log(total))[..., 0]
    return (out, lse) if return_logsumexp else out


def check(args=None, c=SMALL, *, atol=ROUNDING, executed=(), **options):
    args = operands() if args is None else args
    arrays = {n: x for n, x in options.items() if isinstance(x, jax.Array)}
    static = {n: x for n, x in options.items() if n not in arrays}

    def make(interpret):
        def f(q, k, v, *others):
            given = dict(zip(arrays, others, strict=True))
            return attention(q, k, v, config=c, interpret=interpret, **given, **static)

        return f

    expected = reference(*args, **options)
    every = *args, *arrays.values()
    everywhere.check(make, every, expected, atol=atol, executed=executed)


def lengths(*values):
    return jnp.array(values, jnp.int32)


# --- each option ----------------------------------------------------------------------


@pytest.mark.parametrize("align", ["start", "end"])
@pytest.mark.parametrize("window", [(20, 0), (0, 40), (None, 5), 33])
def test_windows(window, align):
    check(window=window, align=align)


@pytest.mark.parametrize("q_len", [70, 150])
def test_a_causal_mask_that_ends_at_the_last_column(q_len):
    """With more rows than columns the first ones see nothing, and give zeros."""
    check(operands(q_len), causal=True, align="end", return_logsumexp=True)


@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
def test_a_soft_cap(soft_cap):
    check(soft_cap=soft_cap, causal=True)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(2, 2, 150, 112), (1, 1, 150, 112), (2, 1, 1, 112)])
def test_a_bias_that_broadcasts(shape, dtype):
    check(bias=normal(*shape, dtype=dtype, seed=3))


def test_a_bias_of_one_column():
    check(bias=normal(1, 2, 150, 1, seed=3), return_logsumexp=True, atol=2**-8)


def test_a_bias_of_minus_infinity_hides():
    bias = jnp.where(normal(1, 1, 150, 111, seed=4) > 2.5, 0, -jnp.inf)
    assert np.isinf(bias).all(axis=3).any()
    check(operands(kv_len=111), bias=bias.astype(jnp.float16), return_logsumexp=True)


@pytest.mark.parametrize("align", ["start", "end"])
def test_alibi(align):
    slopes = host.array([0.5, 0.03], jnp.float32)
    check(alibi_slopes=slopes, align=align, return_logsumexp=True, atol=2**-8)


@pytest.mark.parametrize("kind", ["sorted", "any"])
def test_segments(kind):
    rng = np.random.default_rng(0)
    q, kv = rng.integers(0, 4, (2, 150)), rng.integers(0, 4, (2, 112))
    if kind == "sorted":
        q, kv = np.sort(q, axis=1), np.sort(kv, axis=1)
        kv[1] = np.where(kv[1] == 2, 3, kv[1])
    ids = {"q_segment_ids": q, "kv_segment_ids": kv}
    ids = {name: jnp.asarray(x, jnp.int32) for name, x in ids.items()}
    check(**ids, return_logsumexp=True)


@pytest.mark.parametrize("align", ["start", "end"])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_of_each_sequence(causal, align):
    given = {"q_lengths": lengths(150, 33), "kv_lengths": lengths(7, 112)}
    check(**given, causal=causal, align=align, return_logsumexp=True)


def test_sequences_of_no_rows_or_columns():
    given = {"q_lengths": lengths(0, 40), "kv_lengths": lengths(50, 0)}
    check(**given, return_logsumexp=True)


def test_one_of_the_lengths():
    check(kv_lengths=lengths(7, 112))


@pytest.mark.parametrize("causal", [False, True])
def test_logsumexp(causal):
    check(causal=causal, return_logsumexp=True, executed=(Warpgroup,), atol=2**-8)


@pytest.mark.parametrize(("d", "v_dim"), [(8, 40), (33, 7), (48, 96)])
def test_sizes_of_heads(d, v_dim):
    check(operands(100, 70, d=d, v_dim=v_dim), causal=True)


# --- together -------------------------------------------------------------------------

SLOPES = host.array([0.5, 0.03], jnp.float32)
IDS = jnp.sort(host.array(np.random.default_rng(0).integers(0, 3, (2, 112)), jnp.int32))


@pytest.mark.parametrize("blocks", [None, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "window": (40, 0), "soft_cap": 2.0},
        {"q_segment_ids": IDS, "kv_segment_ids": IDS, "causal": True, "window": 50},
        {
            "bias": normal(1, 2, 112, 112, seed=3),
            "kv_lengths": lengths(60, 112),
            "soft_cap": 3.0,
        },
        {"alibi_slopes": SLOPES, "causal": True, "q_lengths": lengths(100, 9)},
    ],
)
def test_options_together(options, blocks):
    c = AttentionConfig(block_kv=32, blocks=blocks)
    check(operands(112), c, **options, return_logsumexp=True, atol=2**-8)


# --- packed sequences -----------------------------------------------------------------


def packed_reference(q, k, v, starts, kv_starts, **options):
    outs, sums = [], []
    for i in range(len(starts) - 1):
        rows = slice(starts[i], starts[i + 1])
        columns = slice(kv_starts[i], kv_starts[i + 1])
        if starts[i] == starts[i + 1]:
            continue
        if kv_starts[i] == kv_starts[i + 1]:
            outs.append(np.zeros((rows.stop - rows.start, *q.shape[1:])))
            sums.append(np.full((q.shape[1], rows.stop - rows.start), -np.inf))
            continue
        one = (x[None] for x in (q[rows], k[columns], v[columns]))
        out, lse = reference(*one, return_logsumexp=True, **options)
        outs.append(out[0])
        sums.append(lse[0])
    return np.concatenate(outs), np.concatenate(sums, axis=1)


@pytest.mark.parametrize("blocks", [None, 3])
@pytest.mark.parametrize(
    ("q", "kv"),
    [((0, 100, 103, 300), (0, 40, 140, 200)), ((0, 0, 9, 9), (0, 30, 30, 65))],
)
@pytest.mark.parametrize("align", ["start", "end"])
def test_packed_sequences(q, kv, align, blocks):
    args = (
        normal(q[-1], 2, 16),
        normal(kv[-1], 1, 16, seed=1),
        normal(kv[-1], 1, 16, seed=2),
    )
    c = AttentionConfig(block_kv=32, blocks=blocks)

    def make(interpret):
        def f(*operands):
            *matrices, starts, kv_starts = operands
            return attention(
                *matrices,
                causal=True,
                align=align,
                cu_seqlens_q=starts,
                cu_seqlens_kv=kv_starts,
                return_logsumexp=True,
                config=c,
                interpret=interpret,
            )

        return f

    expected = packed_reference(*args, q, kv, causal=True, align=align)
    every = *args, lengths(*q), lengths(*kv)
    everywhere.check(make, every, expected, atol=2**-8, executed=())


# --- transformations, schedules -------------------------------------------------------


def test_vmap_of_all_operands():
    args = [x[:, None] for x in operands()]
    bias = normal(2, 1, 1, 1, 112, seed=3)
    given = lengths(50, 112)[:, None]

    def f(q, k, v, bias, kv_lengths):
        return attention(q, k, v, bias=bias, kv_lengths=kv_lengths, config=SMALL)

    got = jax.jit(jax.vmap(f))(*args, bias, given)[:, 0]
    expected = reference(*operands(), bias=bias[:, 0], kv_lengths=given[:, 0])
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, atol=ROUNDING)


@pytest.mark.parametrize(
    "options",
    [
        {"window": (20, 10), "bias": normal(1, 2, 112, 112, seed=3)},
        {"q_segment_ids": IDS, "kv_segment_ids": IDS, "kv_lengths": lengths(60, 112)},
    ],
)
def test_ten_orders_of_events_give_one_result(options):
    interpret = plgpu.InterpretParams(schedules=10)
    c = AttentionConfig(block_kv=32, blocks=2)
    got = attention(*operands(112), config=c, interpret=interpret, **options)
    expected = reference(*operands(112), **options)
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, atol=ROUNDING)


# --- what the compiler makes of it ----------------------------------------------------


@pytest.mark.offline
@pytest.mark.slow
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize(
    "options",
    [
        {"window": (100, 0), "return_logsumexp": True},
        {"soft_cap": 30.0, "causal": True},
        {"bias": (1, 4, 1000, 1000)},
        {"bias": (2, 1, 1, 1000)},
        {"alibi_slopes": (4,)},
        {"q_segment_ids": (2, 1000), "kv_segment_ids": (2, 1000), "causal": True},
        {"kv_lengths": (2,)},
        {"cu_seqlens_q": (9,), "cu_seqlens_kv": (9,), "causal": True},
    ],
)
def test_nothing_spills(options, d):
    types = {"bias": jnp.float32, "alibi_slopes": jnp.float32}
    arrays = {
        name: jax.ShapeDtypeStruct(shape, types.get(name, jnp.int32))
        for name, shape in options.items()
        if isinstance(shape, tuple) and name != "window"
    }
    static = {name: x for name, x in options.items() if name not in arrays}
    shape = (2, 1000, 4, d)[1 if "cu_seqlens_q" in options else 0 :]
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16)] * 3

    def f(q, k, v, arrays):
        return attention(q, k, v, **arrays, **static)

    reports = plgpu.offline.compile(functools.partial(f), *args, arrays)
    for report in reports:
        assert report.resources.remarks == ()
        assert report.resources.spill_store_bytes == 0
        assert report.resources.spill_load_bytes == 0


# --- refusals -------------------------------------------------------------------------

INT = functools.partial(jnp.zeros, dtype=jnp.int32)


@pytest.mark.parametrize(
    "options",
    [
        {"window": (-1, 0)},
        {"window": 2**40},
        {"window": (1, 2, 3)},
        {"window": "all"},
        {"soft_cap": 0},
        {"align": "left"},
        {"bias": host.zeros((150, 112))},
        {"bias": INT((1, 1, 1, 1))},
        {"alibi_slopes": host.ones(3)},
        {"q_segment_ids": INT((2, 150))},
        {"q_segment_ids": INT((2, 9)), "kv_segment_ids": INT((2, 112))},
        {"q_lengths": INT(3)},
        {"kv_lengths": host.ones(2)},
        {"cu_seqlens_q": INT(3)},
    ],
)
@refused
def test_options_that_do_not_fit(options):
    attention(*operands(), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"cu_seqlens_kv": None},
        {"cu_seqlens_kv": INT(4)},
        {"bias": host.zeros((1, 1, 1, 1))},
        {"kv_lengths": INT(2)},
    ],
)
@refused
def test_options_that_do_not_fit_packed_sequences(options):
    given = {"cu_seqlens_q": INT(3), "cu_seqlens_kv": INT(3), **options}
    attention(*(x[0] for x in operands()), **given)


@pytest.mark.parametrize(
    "options", [{"window": (5, 5)}, {"soft_cap": 1.0}, {"return_logsumexp": True}]
)
def test_blackwell_has_no_options(options):
    blackwell = plgpu.CompilerParams(target="sm_100a", approx_math=True)
    with pytest.raises(errors.UnsupportedError) as caught:
        attention(*operands(d=64), **options, compiler_params=blackwell)
    assert caught.value.what == "attention: this option is not supported on Blackwell"
