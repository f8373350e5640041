# SPDX-License-Identifier: Apache-2.0
"""Attention of float8 operands: scales, masks, lengths, heads, against float32."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors, ops
from pallas_gpu.ops.flash import narrow
from pallas_gpu.ops.flash.attention import attention
from pallas_gpu.ops.flash.config import AttentionConfig
from tests.support import everywhere, host
from tests.support.refusal import refused
from tests.support.semantics import Lane, Warpgroup

pytestmark = pytest.mark.sampled(2)

F8 = jnp.float8_e4m3fn
# Of the norm of errors to that of the expected ones; up to 1.03 has been found.
FACTOR = 1.08
QUICK = plgpu.InterpretParams(detect_races=False)
SMALL = AttentionConfig(block_kv=32)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def operands(q_len=130, kv_len=70, heads=2, kv_heads=1, d=32, v_dim=None, batch=2):
    rng = np.random.default_rng(0)
    shapes = (q_len, heads, d), (kv_len, kv_heads, d), (kv_len, kv_heads, v_dim or d)
    return [host.array(rng.standard_normal((batch, *s)), F8) for s in shapes]


def reference(q, k, v, *, scales=(1, 1, 1), causal=False, soft_cap=None, **others):
    """Returns the result and logsumexp in float32, and the norm of expected errors."""
    arrays = []
    for x, scale in zip((q, k, v), scales, strict=True):
        scale = np.asarray(scale, np.float32)
        if scale.ndim:
            scale = scale.reshape(-1, scale.shape[-1])[:, None, :, None]
        arrays.append(np.asarray(x, np.float32) * scale)
    q, k, v = arrays
    k, v = (np.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    scores += np.asarray(others.get("bias", 0.0))
    seen = np.ones((q.shape[0], 1, q.shape[1], k.shape[1]), bool)
    row, column = np.ogrid[: q.shape[1], : k.shape[1]]
    if causal:
        seen &= column <= row
    if "window" in others:
        left, right = others["window"]
        seen &= (column >= row - left) & (column <= row + right)
    if "kv_lengths" in others:
        seen &= column < np.asarray(others["kv_lengths"])[:, None, None, None]
    if "q_segment_ids" in others:
        ids = np.asarray(others["q_segment_ids"]), np.asarray(others["kv_segment_ids"])
        seen &= (ids[0][:, :, None] == ids[1][:, None, :])[:, None]
    scores = np.where(seen, scores, -np.inf)
    top = np.maximum(scores.max(axis=3, keepdims=True), -1e30)
    p = np.exp(scores - top)
    total = p.sum(axis=3, keepdims=True)
    shares = 1 / np.where(total, total, 1)
    out = np.einsum("bhqk,bkhd->bqhd", p * shares, v)
    errors_of_p = np.einsum("bhqk,bkhd->", (of_rounding(p) * shares) ** 2, v**2) ** 0.5
    # Those of the result in bfloat16 are at most 2**-9 of an element.
    norm = np.hypot(errors_of_p, 2**-9 * np.linalg.norm(out))
    with np.errstate(divide="ignore"):
        return out, (top + np.log(total))[..., 0], norm


def of_rounding(p):
    """Returns the standard deviations of rounding to float8_e4m3fn; 0 and 1 are exact.

    Numbers have 3 bits behind the first, and errors are uniform between halves of the
    last.
    """
    bit = np.ldexp(0.5**3, np.frexp(p)[1] - 1)
    return np.where((p == 0) | (p == 1), 0, bit / 12**0.5)


def assert_close(got, wanted):
    out, lse = (np.asarray(x, np.float32) for x in got)
    assert np.isfinite(out).all()
    assert np.linalg.norm(out - wanted[0]) <= FACTOR * wanted[2]
    np.testing.assert_allclose(lse, wanted[1], atol=2e-3)


def check(args=None, scales=None, interpret=QUICK, c=None, **options):
    args = operands() if args is None else args
    names = "q_scale", "k_scale", "v_scale"
    given = {} if scales is None else dict(zip(names, scales, strict=True))
    f = functools.partial(attention, return_logsumexp=True, interpret=interpret)
    got = f(*args, config=c, **given, **options)
    assert got[0].dtype == jnp.bfloat16
    assert_close(got, reference(*args, scales=scales or (1, 1, 1), **options))


@pytest.mark.parametrize("causal", [False, True])
def test_the_kernel_everywhere(causal):
    args = operands(64, 70, heads=1, batch=1)

    def make(interpret):
        return functools.partial(
            attention, causal=causal, interpret=interpret, config=SMALL
        )

    wanted = reference(*args, causal=causal)[0]
    everywhere.check(make, args, wanted, atol=0.2, executed=[Warpgroup, Lane])


@pytest.mark.parametrize("causal", [False, slow(True)])
@pytest.mark.parametrize("q_len", [1, slow(200)])
@pytest.mark.parametrize("kv_len", [70, slow(300)])
def test_lengths_that_nothing_divides(q_len, kv_len, causal):
    check(operands(q_len, kv_len), causal=causal, c=SMALL)


SCALES = [
    (0.5, 2.0, 3.0),
    (jnp.float32(0.5), jnp.full((1,), 2.0), host.array([3.0])),
    (
        host.array([0.5, 2.0]),
        host.array([[0.3], [2.0]]),
        host.array([[3.0], [0.25]]),
    ),
]


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("options", [{"causal": True}, slow({"soft_cap": 1.5})])
def test_scales_of_all_of_heads_and_of_batches(scales, options):
    check(scales=scales, **options)


@pytest.mark.parametrize("scale", [1e-6, slow(3e5)])
def test_scales_far_from_one(scale):
    """Masks hide scores whatever their scale is."""
    check(scales=(scale, 1 / scale, scale), causal=True)


@pytest.mark.parametrize(
    "options",
    [
        {"window": (20, 5)},
        {"kv_lengths": host.array([7, 70], jnp.int32)},
        {"bias": np.random.default_rng(5).random((1, 2, 130, 70), np.float32)},
        {
            "q_segment_ids": jnp.asarray(np.arange(260).reshape(2, 130) // 50, "int32"),
            "kv_segment_ids": jnp.asarray(np.arange(140).reshape(2, 70) // 50, "int32"),
        },
    ],
)
def test_options(options):
    check(scales=(0.5, 1.0, 2.0), **options)


@pytest.mark.parametrize(("d", "v_dim"), [(24, 40), slow(160, 128), slow(128, 256)])
def test_sizes_of_heads(d, v_dim):
    check(operands(70, 70, d=d, v_dim=v_dim, heads=1), causal=True)


@pytest.mark.parametrize("c", [SMALL, AttentionConfig(block_kv=96, blocks=2)])
def test_configurations(c):
    check(operands(300, 200), causal=True, c=c)


def test_the_type_of_the_result():
    args = operands()
    assert attention(*args, interpret=QUICK).dtype == jnp.bfloat16
    got = attention(*args, out_dtype=jnp.float16, interpret=QUICK)
    assert got.dtype == jnp.float16


def test_vmap_of_operands_and_scales():
    args = operands()
    scale = host.array([0.5, 2.0])

    def f(q, k, v, scale):
        one = (x[None] for x in (q, k, v))
        given = {"k_scale": scale, "return_logsumexp": True, "interpret": QUICK}
        return [x[0] for x in attention(*one, **given)]

    got = jax.jit(jax.vmap(f))(*args, scale)
    assert_close(got, reference(*args, scales=(1, scale[:, None], 1)))


def test_orders_of_events_change_nothing():
    args, found = operands(130, 100, heads=1, batch=1), []
    for seed in range(4):
        asynchrony = "eager" if seed % 2 else "late"
        interpret = plgpu.InterpretParams(seed=seed, asynchrony=asynchrony)
        c = AttentionConfig(block_kv=32, blocks=1)
        found.append(attention(*args, causal=True, interpret=interpret, config=c))
        np.testing.assert_array_equal(np.asarray(found[0]), np.asarray(found[-1]))


def test_the_order_of_rows_of_v_is_that_of_the_tensor_core():
    """A thread has columns 2t, 2t + 1, 2t + 8 and 2t + 9 of a group of 16 scores."""
    v = jnp.arange(16, dtype=jnp.float32).reshape(1, 16, 1, 1).astype(F8)
    got = np.asarray(narrow.transposed(v), np.float32).reshape(4, 4)
    for t, row in enumerate(got):
        np.testing.assert_array_equal(row, [2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9])


@pytest.mark.offline
@pytest.mark.parametrize("causal", [False, slow(True)])
@pytest.mark.parametrize("d", [128, slow(64), slow(256)])
def test_products_stay_asynchronous_and_nothing_spills(d, causal):
    x = jax.ShapeDtypeStruct((2, 4096, 8, d), F8)

    def f(q, k, v):
        return attention(q, k, v, causal=causal, q_scale=0.5)

    (report,) = plgpu.offline.compile(f, x, x, x)
    assert report.resources.remarks == ()
    assert report.resources.spill_store_bytes == 0


# --- refusals -------------------------------------------------------------------------


def test_there_are_no_derivatives():
    args = operands(64, 64)

    def loss(q):
        return jnp.sum(attention(q, *args[1:]).astype(jnp.float32))

    with pytest.raises(errors.UnsupportedError) as caught:
        jax.grad(loss)(args[0])
    assert caught.value.what == "attention: no derivatives with this option"
    assert caught.value.got == "operands of float8"

    def of_scale(scale):
        return jnp.sum(attention(*args, q_scale=scale).astype(jnp.float32))

    with pytest.raises(errors.DifferentiationError, match="scales"):
        jax.grad(of_scale)(jnp.float32(1))


@pytest.mark.parametrize(
    "options",
    [
        {"q_scale": -1.0},
        {"k_scale": host.ones(2)},
        {"v_scale": host.ones((), jnp.bfloat16)},
        {"v_scale": "all"},
        {"out_dtype": jnp.float32},
        {"out_dtype": "wide"},
        {"config": AttentionConfig(block_kv=48)},
        {"config": AttentionConfig(keep_maxima=True)},
        {"compiler_params": plgpu.CompilerParams(target="sm_100a")},
    ],
)
@refused
def test_arguments_that_do_not_fit(options):
    attention(*operands(d=64), **options)


def test_float8_is_not_packed():
    starts = host.array([0, 70], jnp.int32)
    args = [x[0] for x in operands(70, 70)]
    with pytest.raises(errors.UnsupportedError, match="float8 is not supported here"):
        attention(*args, cu_seqlens_q=starts, cu_seqlens_kv=starts, q_scale=1.0)


@pytest.mark.parametrize("option", ["q_scale", "k_scale", "v_scale"])
def test_other_operands_have_no_scales(option):
    args = [x.astype(jnp.float16) for x in operands()]
    with pytest.raises(errors.ArgumentError, match=f"{option} without operands"):
        attention(*args, **{option: 2.0})


def test_types_are_not_mixed():
    q, k, v = operands()
    with pytest.raises(errors.DTypeError, match="element types are not supported"):
        attention(q, k, v.astype(jnp.bfloat16))


def test_the_standard_signature_has_no_scales():
    with pytest.raises(errors.DTypeError, match="float8 is not supported"):
        ops.dot_product_attention(*operands())
