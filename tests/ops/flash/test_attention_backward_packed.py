# SPDX-License-Identifier: Apache-2.0
"""Attention's derivatives of packed sequences: lengths, masks, heads, schedules."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors
from pallas_gpu.ops.flash.attention import attention
from tests.ops.flash import test_attention_backward as padded
from tests.support import emulated, host, norms
from tests.support.semantics import Warpgroup

# Of the derivatives, relative to their norm; operands have 11 bits.
BOUND = 1e-3
QUICK = plgpu.InterpretParams(detect_races=False)
assert_close = functools.partial(norms.assert_close, bound=BOUND)
# Some are empty, one is longer than a tile, and no tile divides any of them.
Q = 0, 70, 70, 73, 210
KV = 0, 20, 60, 60, 200


def operands(q=Q, kv=KV, heads=2, kv_heads=1, head_dim=16, v_dim=16, seed=0):
    """Returns q, k, v and the cotangents of the result and of logsumexp."""
    rng = np.random.default_rng(seed)
    shapes = [
        (q[-1], heads, head_dim),
        (kv[-1], kv_heads, head_dim),
        (kv[-1], kv_heads, v_dim),
        (q[-1], heads, v_dim),
    ]
    arrays = [host.array(rng.standard_normal(s), jnp.float16) for s in shapes]
    return [*arrays, host.array(rng.standard_normal((heads, q[-1])), jnp.float32)]


def packed(starts):
    names = "cu_seqlens_q", "cu_seqlens_kv"
    values = (jnp.asarray(x, jnp.int32) for x in starts)
    return dict(zip(names, values, strict=True))


def derivatives(interpret, *args, starts=(Q, KV), **options):
    options |= packed(starts)
    return padded.derivatives(interpret, *args, with_sums=True, **options)


def expected(args, *, starts=(Q, KV), **options):
    return padded.expected(args, with_sums=True, **packed(starts), **options)


# The last sequence is empty, and so is the first one; short ones; wide heads.
EMPTY, SHORT = ((0, 0, 65, 65), (0, 9, 150, 160)), ((0, 1, 2, 3), (0, 1, 1, 2))
WIDE = (0, 5, 40), (0, 30, 70)
SLOPES = np.random.default_rng(3).random((4, 2)).astype(np.float32)
ONE_HEAD = {"heads": 1, "head_dim": 160, "v_dim": 160}
CASES = {
    "no mask": ((Q, KV), {}, {}, False),
    "causal": ((Q, KV), {}, {"causal": True, "align": "end"}, True),
    "window": ((Q, KV), {}, {"window": (20, 5), "soft_cap": 1.5}, False),
    "odd heads": (WIDE, {"heads": 1, "head_dim": 24, "v_dim": 40}, {}, False),
    **{
        f"{name}, deterministic {deterministic}": (*row, deterministic)
        for name, *row in (
            ("empty sequences", EMPTY, {}, {"causal": True}),
            ("short sequences", SHORT, {}, {"causal": True}),
            ("wide heads", WIDE, ONE_HEAD, {}),
            ("slopes of each sequence", (Q, KV), {}, {"alibi_slopes": SLOPES}),
        )
        for deterministic in (False, True)
    },
}


@pytest.mark.parametrize("name", CASES)
def test_sequences_heads_and_options(name):
    starts, sizes, options, deterministic = CASES[name]
    args, options = operands(*starts, **sizes), options | {"starts": starts}
    got = derivatives(QUICK, *args, deterministic=deterministic, **options)
    assert_close(got, expected(args, **options))


def test_vmap_of_tokens_and_of_starts():
    starts = ((0, 30, 66), (0, 40, 70)), ((0, 66, 66), (0, 1, 70))
    args = [operands(*s, seed=i) for i, s in enumerate(starts)]
    stacked = [jnp.stack(x) for x in zip(*args, strict=True)]
    both = [jnp.asarray(x, jnp.int32) for x in zip(*starts, strict=True)]

    def f(*operands):
        *arrays, q_starts, kv_starts = operands
        return derivatives(QUICK, *arrays, starts=(q_starts, kv_starts), causal=True)

    got = jax.jit(jax.vmap(f))(*stacked, *both)
    for i, s in enumerate(starts):
        assert_close([x[i] for x in got], expected(args[i], starts=s, causal=True))


def test_the_kernels_everywhere():
    starts = (0, 20, 50), (0, 30, 40)
    args = operands(*starts, heads=1)

    def make(interpret):
        return functools.partial(derivatives, interpret, starts=starts, causal=True)

    wanted = expected(args, starts=starts, causal=True)
    emulated.check(make, args, wanted, atol=8e-3, executed=[Warpgroup])


def test_slopes_have_no_derivative():
    q, k, v, *_ = operands((0, 5), (0, 5))
    starts = jnp.asarray((0, 5), jnp.int32)

    def loss(slopes):
        given = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}
        return jnp.sum(attention(q, k, v, alibi_slopes=slopes, **given))

    with pytest.raises(errors.DifferentiationError, match="alibi_slopes has no"):
        jax.grad(loss)(jnp.ones((1, 2), jnp.float32))
