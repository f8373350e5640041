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
from tests.support import everywhere, host, norms
from tests.support.semantics import Warpgroup

pytestmark = pytest.mark.sampled(2)

# Of the derivatives, relative to their norm; operands have 11 bits.
BOUND = 1e-3
QUICK = plgpu.InterpretParams(detect_races=False)
assert_close = functools.partial(norms.assert_close, bound=BOUND)
# Some are empty, one is longer than a tile, and no tile divides any of them.
Q = 0, 70, 70, 73, 210
KV = 0, 20, 60, 60, 200


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


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


def seen_by(q, kv, causal=False, window=None, align="start"):
    """Returns which columns a row sees, and how far they are: (q_len, kv_len)."""
    seen = np.zeros((q[-1], kv[-1]), bool)
    away = np.zeros((q[-1], kv[-1]))
    for i in range(len(q) - 1):
        m, n = q[i + 1] - q[i], kv[i + 1] - kv[i]
        row, column = np.ogrid[:m, :n]
        distance = column - row - (n - m if align == "end" else 0)
        one = np.ones((m, n), bool)
        if causal:
            one &= distance <= 0
        if window is not None:
            one &= (-window[0] <= distance) & (distance <= window[1])
        at = slice(q[i], q[i + 1]), slice(kv[i], kv[i + 1])
        seen[at], away[at] = one, np.abs(distance)
    return seen, away


def reference(q, k, v, *, starts, soft_cap=None, slopes=None, **band):
    """Returns the result and logsumexp in float32, by plain JAX."""
    k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    precise = functools.partial(jnp.einsum, precision="highest")
    scores = precise("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    seen, away = seen_by(*starts, **band)
    if slopes is not None:
        # Of each sequence and head.
        of_rows = np.repeat(slopes, np.diff(starts[0]), axis=0)
        scores -= of_rows.T[:, :, None] * away
    some = seen.any(axis=1, keepdims=True)
    scores = jnp.where(seen | ~some, scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=2)
    p = jnp.where(some, jnp.exp(scores - lse[..., None]), 0)
    return precise("hqk,khd->qhd", p, v), jnp.where(some[:, 0], lse, -jnp.inf)


def derivatives(interpret, *args, starts=(Q, KV), with_sums=True, **options):
    q, k, v, do, dlse = args
    q_starts, kv_starts = (jnp.asarray(x, jnp.int32) for x in starts)
    f = functools.partial(
        attention,
        cu_seqlens_q=q_starts,
        cu_seqlens_kv=kv_starts,
        return_logsumexp=with_sums,
        interpret=interpret,
        **options,
    )
    _, vjp = jax.vjp(f, q, k, v)
    return vjp((do, dlse) if with_sums else do)


def expected(args, *, starts=(Q, KV), **options):
    # In one jit: JAX would compile each of the operations.
    @jax.jit
    def differentiated(q, k, v, do, dlse):
        f = functools.partial(reference, starts=starts, **options)
        (_, lse), vjp = jax.vjp(f, q, k, v)
        return vjp((do, jnp.where(jnp.isfinite(lse), dlse, 0)))

    return differentiated(*(np.asarray(x, np.float32) for x in args))


def check(args=None, interpret=QUICK, deterministic=False, **options):
    args = operands() if args is None else args
    got = derivatives(interpret, *args, deterministic=deterministic, **options)
    assert_close(got, expected(args, **options))


BANDS = [
    {},
    {"causal": True, "align": "end"},
    {"window": (20, 5), "soft_cap": 1.5},
]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("options", BANDS)
def test_masks(options, deterministic):
    check(deterministic=deterministic, **options)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "starts",
    [
        # The last one is empty, and so is the first one.
        ((0, 0, 65, 65), (0, 9, 150, 160)),
        ((0, 1, 2, 3), (0, 1, 1, 2)),
        slow(((0, 128, 256), (0, 128, 256))),
    ],
)
def test_lengths(starts, deterministic):
    args = operands(*starts)
    check(args, starts=starts, causal=True, deterministic=deterministic)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, slow(True)])
@pytest.mark.parametrize(("head_dim", "v_dim"), [(160, 160), slow(24, 40)])
def test_sizes_of_heads(head_dim, v_dim, deterministic):
    starts = (0, 5, 40), (0, 30, 70)
    args = operands(*starts, heads=1, head_dim=head_dim, v_dim=v_dim)
    check(args, starts=starts, deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
def test_slopes_of_each_sequence(deterministic):
    slopes = np.random.default_rng(3).random((4, 2)).astype(np.float32)
    args = operands()
    options = {"deterministic": deterministic, "alibi_slopes": jnp.asarray(slopes)}
    assert_close(derivatives(QUICK, *args, **options), expected(args, slopes=slopes))


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_orders_of_events_change_nothing_but_the_rounding(deterministic):
    """Each schedule looks for races."""
    starts = (0, 70, 135), (0, 60, 61)
    args = operands(*starts, heads=1)
    for seed in range(4):
        asynchrony = "eager" if seed % 2 else "late"
        interpret = plgpu.InterpretParams(seed=seed, asynchrony=asynchrony)
        options = {"causal": True, "starts": starts, "deterministic": deterministic}
        check(args, interpret, **options)


@pytest.mark.slow
def test_the_kernels_everywhere():
    starts = (0, 20, 50), (0, 30, 40)
    args = operands(*starts, heads=1)

    def make(interpret):
        return functools.partial(derivatives, interpret, starts=starts, causal=True)

    wanted = expected(args, starts=starts, causal=True)
    everywhere.check(make, args, wanted, atol=8e-3, executed=[Warpgroup])


@pytest.mark.offline
@pytest.mark.parametrize(
    ("head_dim", "deterministic", "spilled"),
    [
        (128, False, 0),
        slow(64, False, 0),
        # Bounds of the sequences do not fit beside rows of K or of dV, which leave no
        # registers; ptxas stores them around the loop.
        slow(128, True, 16),
        slow(256, False, 64),
    ],
)
def test_next_to_nothing_spills(head_dim, deterministic, spilled):
    x = jax.ShapeDtypeStruct((4096, 8, head_dim), jnp.bfloat16)
    starts = jax.ShapeDtypeStruct((9,), jnp.int32)

    def f(q, k, v, do, starts):
        options = {"causal": True, "deterministic": deterministic}
        of_starts = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}
        f = functools.partial(attention, **options, **of_starts)
        return jax.vjp(f, q, k, v)[1](do)

    _, *reports = plgpu.offline.compile(f, x, x, x, x, starts)
    for report in reports:
        assert report.resources.spill_store_bytes <= spilled


def test_slopes_have_no_derivative():
    q, k, v, *_ = operands((0, 5), (0, 5))
    starts = jnp.asarray((0, 5), jnp.int32)

    def loss(slopes):
        given = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}
        return jnp.sum(attention(q, k, v, alibi_slopes=slopes, **given))

    with pytest.raises(errors.DifferentiationError, match="alibi_slopes has no"):
        jax.grad(loss)(jnp.ones((1, 2), jnp.float32))
