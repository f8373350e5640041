# SPDX-License-Identifier: Apache-2.0
"""Attention's options, alone and together, against float64; and their refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gpu.ops.flash.attention import attention
from pallas_gpu.ops.flash.config import AttentionConfig
from tests.support import emulated
from tests.support.attention import reference
from tests.support.semantics import Warpgroup

SMALL, TWO = (AttentionConfig(block_kv=32, blocks=n) for n in (None, 2))
BF16 = jnp.bfloat16
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
    arrays = {
        n: x for n, x in options.items() if isinstance(x, (jax.Array, np.ndarray))
    }
    static = {n: x for n, x in options.items() if n not in arrays}

    def make(interpret):
        def f(q, k, v, *others):
            given = dict(zip(arrays, others, strict=True))
            how = {"interpret": interpret, "return_logsumexp": logsumexp}
            return attention(q, k, v, config=c, **how, **given, **static)

        return f

    found = reference(*args, **options)
    expected = found.both if logsumexp else found.out
    every = *args, *arrays.values()
    emulated.check(make, every, expected, executed, atol=atol)


def lengths(*values):
    return np.array(values, np.int32)


SLOPES = np.array([0.5, 0.03], np.float32)
IDS = np.sort(np.random.default_rng(0).integers(0, 3, (2, 112)).astype(np.int32))
SHORT = {"kv_lengths": lengths(7, 112)}
CAUSAL = {"causal": True}
# Operands, a configuration and options of `check`.
CASES = {
    **{
        f"window {window} from the {align}": ({}, {"window": window, "align": align})
        for window, align in (
            *(((20, 0), "end"), ((0, 40), "start"), ((None, 5), "end"), (33, "start")),
        )
    },
    # With more rows than columns the first ones see nothing, and give zeros.
    "a mask that ends at the last column": ({"q_len": 70}, CAUSAL | {"align": "end"}),
    "more rows than columns": ({"q_len": 150}, CAUSAL | {"align": "end"}),
    "soft cap 0.5": ({}, CAUSAL | {"soft_cap": 0.5}),
    "soft cap 30": ({}, CAUSAL | {"soft_cap": 30.0}),
    "bias": ({}, {"bias": normal(2, 2, 150, 112, dtype=np.float32, seed=3)}),
    "bias of all heads": ({}, {"bias": normal(1, 1, 150, 112, dtype=BF16, seed=3)}),
    "bias of columns": ({}, {"bias": normal(2, 1, 1, 112, dtype=np.float32, seed=3)}),
    "bias of rows": ({}, {"bias": normal(1, 2, 150, 1, seed=3)}),
    "alibi": ({}, {"alibi_slopes": SLOPES}),
    "alibi from the end": ({}, {"alibi_slopes": SLOPES, "align": "end"}),
    "lengths": ({}, SHORT | {"q_lengths": lengths(150, 33)}),
    "lengths and a mask": (
        {},
        SHORT | CAUSAL | {"q_lengths": lengths(150, 33), "align": "end"},
    ),
    "sequences of no rows or columns": (
        {},
        {"q_lengths": lengths(0, 40), "kv_lengths": lengths(50, 0)},
    ),
    "one of the lengths": ({}, SHORT),
    "logsumexp": ({}, {"executed": (Warpgroup,)}),
    "logsumexp and a mask": ({}, CAUSAL | {"executed": (Warpgroup,)}),
    **{
        f"heads of {d} and {v_dim}": (
            {"q_len": 100, "kv_len": 70, "d": d, "v_dim": v_dim},
            CAUSAL,
        )
        for d, v_dim in ((8, 40), (33, 7), (48, 96))
    },
    "mask, window and soft cap": (
        {"q_len": 112},
        CAUSAL | {"c": TWO, "window": (40, 0), "soft_cap": 2.0},
    ),
    "segments and window": (
        {"q_len": 112},
        {"c": TWO, "q_segment_ids": IDS, "kv_segment_ids": IDS, "window": 50},
    ),
    "bias, lengths and soft cap": (
        {"q_len": 112},
        {
            "bias": normal(1, 2, 112, 112, seed=3),
            "kv_lengths": lengths(60, 112),
            "soft_cap": 3.0,
        },
    ),
    "alibi, mask and lengths": (
        {"q_len": 112},
        CAUSAL | {"c": TWO, "alibi_slopes": SLOPES, "q_lengths": lengths(100, 9)},
    ),
}


@pytest.mark.parametrize(("sizes", "options"), CASES.values(), ids=CASES)
def test_options(sizes, options):
    check(operands(**sizes), **options)


def test_a_bias_of_minus_infinity_hides():
    bias = jnp.where(normal(1, 1, 150, 111, seed=4) > 2.5, 0, -jnp.inf)
    assert np.isinf(bias).all(axis=3).any()
    check(operands(kv_len=111), bias=bias.astype(jnp.float16))


@pytest.mark.parametrize("kind", ["sorted", "any"])
def test_segments(kind):
    rng = np.random.default_rng(0)
    q, kv = rng.integers(0, 4, (2, 150)), rng.integers(0, 4, (2, 112))
    if kind == "sorted":
        q, kv = np.sort(q, axis=1), np.sort(kv, axis=1)
        kv[1] = np.where(kv[1] == 2, 3, kv[1])
    check(q_segment_ids=q.astype(np.int32), kv_segment_ids=kv.astype(np.int32))


@pytest.mark.parametrize(
    ("q", "kv", "align", "blocks"),
    [
        ((0, 100, 103, 300), (0, 40, 140, 200), "end", 3),
        ((0, 100, 103, 300), (0, 40, 140, 200), "start", None),
        ((0, 0, 9, 9), (0, 30, 30, 65), "end", None),
    ],
)
def test_packed_sequences(q, kv, align, blocks):
    args = [x[0] for x in operands(q[-1], kv[-1], batch=1)]
    given = {"cu_seqlens_q": lengths(*q), "cu_seqlens_kv": lengths(*kv)}
    c = AttentionConfig(block_kv=32, blocks=blocks)
    check(args, c, **given, causal=True, align=align)


def test_vmap_of_all_operands():
    args = [x[:, None] for x in operands()]
    bias = normal(2, 1, 1, 1, 112, seed=3)
    given = lengths(50, 112)[:, None]

    def f(q, k, v, bias, kv_lengths):
        return attention(q, k, v, bias=bias, kv_lengths=kv_lengths, config=SMALL)

    got = jax.jit(jax.vmap(f))(*args, bias, given)[:, 0]
    expected = reference(*operands(), bias=bias[:, 0], kv_lengths=given[:, 0]).out
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, atol=ROUNDING)
