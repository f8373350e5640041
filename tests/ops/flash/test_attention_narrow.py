# SPDX-License-Identifier: Apache-2.0
"""Attention of float8 operands: scales, masks, lengths, heads, against float32."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu.ops.flash import narrow
from pallas_gpu.ops.flash.attention import attention
from pallas_gpu.ops.flash.config import AttentionConfig
from tests.support import attention as whole
from tests.support import emulated, host
from tests.support.semantics import Lane, Warpgroup

F8 = jnp.float8_e4m3fn
# Of the norm of errors to that of the expected ones; up to 1.03 has been found.
FACTOR = 1.08
QUICK = plgpu.InterpretParams(detect_races=False)
SMALL = AttentionConfig(block_kv=32)


def operands(q_len=130, kv_len=70, heads=2, kv_heads=1, d=32, v_dim=None, batch=2):
    rng = np.random.default_rng(0)
    shapes = (q_len, heads, d), (kv_len, kv_heads, d), (kv_len, kv_heads, v_dim or d)
    return [host.array(rng.standard_normal((batch, *s)), F8) for s in shapes]


def reference(q, k, v, *, scales=(1, 1, 1), **options):
    """Returns the result and logsumexp, and the norm of the expected errors."""
    arrays = []
    for x, scale in zip((q, k, v), scales, strict=True):
        scale = np.asarray(scale, np.float32)
        if scale.ndim:
            scale = scale.reshape(-1, scale.shape[-1])[:, None, :, None]
        arrays.append(np.asarray(x, np.float32) * scale)
    found = whole.reference(*arrays, **options)
    top = found.p.max(axis=3, keepdims=True)
    # What is rounded is largest where it is 1.
    rounded = of_rounding(found.p / np.where(top, top, 1)) * top
    errors_of_p = np.einsum("bhqk,bkhd->", rounded**2, found.v**2) ** 0.5
    # Those of the result in bfloat16 are at most 2**-9 of an element.
    norm = np.hypot(errors_of_p, 2**-9 * np.linalg.norm(found.out))
    return found.out, found.logsumexp, norm


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
    emulated.check(make, args, wanted, atol=0.2, executed=[Warpgroup, Lane])


SCALES = [
    (0.5, 2.0, 3.0),
    (np.float32(0.5), np.full((1,), 2.0, "f4"), np.array([3.0], "f4")),
    (
        np.array([0.5, 2.0], "f4"),
        np.array([[0.3], [2.0]], "f4"),
        np.array([[3.0], [0.25]], "f4"),
    ),
]


CAUSAL, OF_ALL = {"causal": True}, {"scales": (0.5, 1.0, 2.0)}
CASES = {
    "one row": ({"q_len": 1}, {"c": SMALL}),
    "one row, mask": ({"q_len": 1, "kv_len": 200}, CAUSAL | {"c": SMALL}),
    "few columns": ({"q_len": 200}, CAUSAL | {"c": SMALL}),
    "lengths that nothing divides": ({"q_len": 200, "kv_len": 130}, {"c": SMALL}),
    **{f"scales {i}": ({}, CAUSAL | {"scales": x}) for i, x in enumerate(SCALES)},
    "scales and a soft cap": ({}, {"scales": SCALES[2], "soft_cap": 1.5}),
    # Masks hide scores whatever their scale is.
    "small scales": ({}, CAUSAL | {"scales": (1e-6, 1e6, 1e-6)}),
    "large scales": ({}, CAUSAL | {"scales": (3e5, 1 / 3e5, 3e5)}),
    "window": ({}, OF_ALL | {"window": (20, 5)}),
    "lengths": ({}, OF_ALL | {"kv_lengths": np.array([7, 70], "i4")}),
    "bias": (
        {},
        OF_ALL | {"bias": np.random.default_rng(5).random((1, 2, 130, 70), np.float32)},
    ),
    "segments": (
        {},
        OF_ALL
        | {
            "q_segment_ids": np.arange(260, dtype="i4").reshape(2, 130) // 50,
            "kv_segment_ids": np.arange(140, dtype="i4").reshape(2, 70) // 50,
        },
    ),
    **{
        f"heads of {d} and {v_dim}": (
            {"q_len": 70, "d": d, "v_dim": v_dim, "heads": 1},
            CAUSAL,
        )
        for d, v_dim in ((24, 40), (160, 128), (128, 256))
    },
    "small blocks": ({"q_len": 300, "kv_len": 200}, CAUSAL | {"c": SMALL}),
    "persistent blocks": (
        {"q_len": 300, "kv_len": 200},
        CAUSAL | {"c": AttentionConfig(block_kv=96, blocks=2)},
    ),
}


@pytest.mark.parametrize(("sizes", "options"), CASES.values(), ids=CASES)
def test_sizes_scales_and_options(sizes, options):
    check(operands(**sizes), **options)


def test_the_type_of_the_result():
    args = operands()
    assert attention(*args, interpret=QUICK).dtype == jnp.bfloat16
    got = attention(*args, out_dtype=jnp.float16, interpret=QUICK)
    assert got.dtype == jnp.float16


def test_vmap_of_operands_and_scales():
    args = operands()
    scale = np.array([0.5, 2.0], "f4")

    def f(q, k, v, scale):
        one = (x[None] for x in (q, k, v))
        given = {"k_scale": scale, "return_logsumexp": True, "interpret": QUICK}
        return [x[0] for x in attention(*one, **given)]

    got = jax.jit(jax.vmap(f))(*args, scale)
    assert_close(got, reference(*args, scales=(1, scale[:, None], 1)))


def test_the_order_of_rows_of_v_is_that_of_the_tensor_core():
    """A thread has columns 2t, 2t + 1, 2t + 8 and 2t + 9 of a group of 16 scores."""
    v = jnp.arange(16, dtype=jnp.float32).reshape(1, 16, 1, 1).astype(F8)
    got = np.asarray(narrow.transposed(v), np.float32).reshape(4, 4)
    for t, row in enumerate(got):
        np.testing.assert_array_equal(row, [2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9])
