# SPDX-License-Identifier: Apache-2.0
"""Attention's options, alone and together, against float64; and their refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gpu.ops.flash.attention import attention
from pallas_gpu.ops.flash.config import AttentionConfig
from tests.support import emulated, host
from tests.support.attention import reference
from tests.support.semantics import Warpgroup

SMALL = AttentionConfig(block_kv=32)
ROUNDING = 2**-9


def normal(*shape, dtype=jnp.float16, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal(shape).astype(dtype)


def operands(q_len=150, kv_len=112, heads=2, kv_heads=1, d=16, batch=2, v_dim=None):
    q = normal(batch, q_len, heads, d)
    k = normal(batch, kv_len, kv_heads, d, seed=1)
    return q, k, normal(batch, kv_len, kv_heads, v_dim or d, seed=2)


def check(args=None, c=SMALL, *, atol=2**-8, executed=(), logsumexp=True, **options):
    """Compares in the emulator; `executed`: as of `emulated`."""
    args = operands() if args is None else args
    arrays = {n: x for n, x in options.items() if isinstance(x, jax.Array)}
    static = {n: x for n, x in options.items() if n not in arrays}

    def make(interpret):
        def f(q, k, v, *others):
            given = dict(zip(arrays, others, strict=True))
            return attention(
                q,
                k,
                v,
                config=c,
                interpret=interpret,
                return_logsumexp=logsumexp,
                **given,
                **static,
            )

        return f

    found = reference(*args, **options)
    expected = found.both if logsumexp else found.out
    every = *args, *arrays.values()
    emulated.check(make, every, expected, executed, atol=atol)


def lengths(*values):
    return np.array(values, np.int32)


# --- each option ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "align"),
    [((20, 0), "end"), ((0, 40), "start"), ((None, 5), "end"), (33, "start")],
)
def test_windows(window, align):
    check(window=window, align=align)


@pytest.mark.parametrize("q_len", [70, 150])
def test_a_causal_mask_that_ends_at_the_last_column(q_len):
    """With more rows than columns the first ones see nothing, and give zeros."""
    check(operands(q_len), causal=True, align="end")


@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
def test_a_soft_cap(soft_cap):
    check(soft_cap=soft_cap, causal=True)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 2, 150, 112), jnp.float32),
        ((1, 1, 150, 112), jnp.bfloat16),
        ((2, 1, 1, 112), jnp.float32),
    ],
)
def test_a_bias_that_broadcasts(shape, dtype):
    check(bias=normal(*shape, dtype=dtype, seed=3))


def test_a_bias_of_one_column():
    check(bias=normal(1, 2, 150, 1, seed=3))


def test_a_bias_of_minus_infinity_hides():
    bias = jnp.where(normal(1, 1, 150, 111, seed=4) > 2.5, 0, -jnp.inf)
    assert np.isinf(bias).all(axis=3).any()
    check(operands(kv_len=111), bias=bias.astype(jnp.float16))


@pytest.mark.parametrize("align", ["start", "end"])
def test_alibi(align):
    slopes = host.array([0.5, 0.03], jnp.float32)
    check(alibi_slopes=slopes, align=align)


@pytest.mark.parametrize("kind", ["sorted", "any"])
def test_segments(kind):
    rng = np.random.default_rng(0)
    q, kv = rng.integers(0, 4, (2, 150)), rng.integers(0, 4, (2, 112))
    if kind == "sorted":
        q, kv = np.sort(q, axis=1), np.sort(kv, axis=1)
        kv[1] = np.where(kv[1] == 2, 3, kv[1])
    ids = {"q_segment_ids": q, "kv_segment_ids": kv}
    ids = {name: jnp.asarray(x, jnp.int32) for name, x in ids.items()}
    check(**ids)


@pytest.mark.parametrize(("causal", "align"), [(False, "start"), (True, "end")])
def test_lengths_of_each_sequence(causal, align):
    given = {"q_lengths": lengths(150, 33), "kv_lengths": lengths(7, 112)}
    check(**given, causal=causal, align=align)


def test_sequences_of_no_rows_or_columns():
    given = {"q_lengths": lengths(0, 40), "kv_lengths": lengths(50, 0)}
    check(**given)


def test_one_of_the_lengths():
    check(kv_lengths=lengths(7, 112))


@pytest.mark.parametrize("causal", [False, True])
def test_logsumexp(causal):
    check(causal=causal, executed=(Warpgroup,))


@pytest.mark.parametrize(("d", "v_dim"), [(8, 40), (33, 7), (48, 96)])
def test_sizes_of_heads(d, v_dim):
    check(operands(100, 70, d=d, v_dim=v_dim), causal=True)


# --- together -------------------------------------------------------------------------

SLOPES = np.array([0.5, 0.03], np.float32)
IDS = np.sort(np.random.default_rng(0).integers(0, 3, (2, 112)).astype(np.int32))


@pytest.mark.parametrize(
    ("blocks", "options"),
    [
        (2, {"causal": True, "window": (40, 0), "soft_cap": 2.0}),
        (2, {"q_segment_ids": IDS, "kv_segment_ids": IDS, "window": 50}),
        (
            None,
            {
                "bias": normal(1, 2, 112, 112, seed=3),
                "kv_lengths": lengths(60, 112),
                "soft_cap": 3.0,
            },
        ),
        (2, {"alibi_slopes": SLOPES, "causal": True, "q_lengths": lengths(100, 9)}),
    ],
)
def test_options_together(options, blocks):
    c = AttentionConfig(block_kv=32, blocks=blocks)
    check(operands(112), c, **options)


# --- packed sequences -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("q", "kv", "align", "blocks"),
    [
        ((0, 100, 103, 300), (0, 40, 140, 200), "end", 3),
        ((0, 100, 103, 300), (0, 40, 140, 200), "start", None),
        ((0, 0, 9, 9), (0, 30, 30, 65), "end", None),
    ],
)
def test_packed_sequences(q, kv, align, blocks):
    args = (
        normal(q[-1], 2, 16),
        normal(kv[-1], 1, 16, seed=1),
        normal(kv[-1], 1, 16, seed=2),
    )
    given = {"cu_seqlens_q": lengths(*q), "cu_seqlens_kv": lengths(*kv)}
    c = AttentionConfig(block_kv=32, blocks=blocks)
    check(args, c, **given, causal=True, align=align)


# --- transformations -------------------------------------------------------


def test_vmap_of_all_operands():
    args = [x[:, None] for x in operands()]
    bias = normal(2, 1, 1, 1, 112, seed=3)
    given = lengths(50, 112)[:, None]

    def f(q, k, v, bias, kv_lengths):
        return attention(q, k, v, bias=bias, kv_lengths=kv_lengths, config=SMALL)

    got = jax.jit(jax.vmap(f))(*args, bias, given)[:, 0]
    expected = reference(*operands(), bias=bias[:, 0], kv_lengths=given[:, 0]).out
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, atol=ROUNDING)


# --- what the compiler makes of it ----------------------------------------------------
