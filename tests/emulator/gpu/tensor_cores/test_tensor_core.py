# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of the tensor core: the model by itself, and beside a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_gpu as plgpu
from pallas_gpu.emulator.gpu.tensor_cores import tensor_core
from tests.support import everywhere
from tests.support.products import tiles


def accumulated(a, b, acc_dtype=np.float32):
    acc = np.zeros((a.shape[0], b.shape[1]), acc_dtype)
    tensor_core.accumulate(acc, a, b)
    return acc


@pytest.mark.parametrize(
    "name", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float16"]
)
def test_widening_keeps_every_value(name):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    word = np.dtype(f"u{dtype.itemsize}")
    every = np.arange(2 ** (8 * dtype.itemsize), dtype=word).view(dtype)
    np.testing.assert_array_equal(tensor_core.widen(every), every.astype(np.float32))


def test_widening_takes_transposed_views():
    x = np.arange(12, dtype=np.float32).reshape(3, 4).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(tensor_core.widen(x.T), x.T.astype(np.float32))


@settings(max_examples=10)
@given(k=st.integers(1, 40), seed=st.integers(0, 99))
def test_int8_products_are_those_of_int64_modulo_two_to_the_32(k, seed):
    rng = np.random.default_rng(seed)
    a = rng.integers(-128, 128, (8, 32 * k)).astype(np.int8)
    b = rng.integers(-128, 128, (32 * k, 8)).astype(np.int8)
    want = (a.astype(np.int64) @ b.astype(np.int64)).astype(np.int32)
    np.testing.assert_array_equal(accumulated(a, b, np.int32), want)


E4M3 = ml_dtypes.float8_e4m3fn
# Operands of one element, padded with zeros to K, what it starts from, and ends as.
ONE_ELEMENT = {
    "float32 keeps ten bits of mantissa": (
        np.float32, [1 + 2.0**-10 + 2.0**-11], [1], 32, np.float32(0), 1 + 2.0**-10,
    ),
    "int8 wraps modulo two to the 32": (
        np.int8, [-128] * 128, [-128] * 128, 128, np.int32(2**31 - 1),
        2**21 - 2**31 - 1,
    ),
    # The unit is 2**14 * 2**-13 = 2: neither 1 nor 1/64 is a whole unit.
    "float8 keeps 14 bits below the largest product": (
        E4M3, [256, 1, 2.0**-6], [64, 1, 1], 64, np.float32(0), 2.0**14,
    ),
    "float8 keeps them of the sum of an earlier instruction": (
        E4M3, [0, 1] + [0] * 38 + [256], [0, 1] + [0] * 38 + [64], 64, np.float32(0),
        2.0**14,
    ),
    # 2048 + 15/16 rounds to 2048, in float16's steps of 2; so does each of three + 1.
    "float16 is rounded after each instruction": (
        np.float16, [2048] + [1] * 63, [1] + [2.0**-4] * 63, 64, np.float16(0), 2048,
    ),
    "float16 adds what is large enough": (
        np.float16, [1] * 64, [1] + [2.0**-4] * 63, 64, np.float16(0), 1 + 63 / 16,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "a", "b", "k", "start", "want"), ONE_ELEMENT.values(), ids=ONE_ELEMENT
)
def test_an_element_has_the_precision_of_its_type(dtype, a, b, k, start, want):
    left, right = (np.array([*x, *[0] * (k - len(x))], dtype) for x in (a, b))
    acc = np.full((1, 1), start)
    tensor_core.accumulate(acc, left[None], right[:, None])
    assert acc[0, 0] == want


def slow_float8(acc, a, b):
    """One element, written down from the description with Python's numbers."""
    for k in range(0, len(a), 32):
        pairs = list(zip(a[k : k + 32], b[k : k + 32], strict=True))
        exponents = [
            np.frexp(x)[1] - 1 + np.frexp(y)[1] - 1 for x, y in pairs if x and y
        ]
        if acc:
            exponents.append(np.frexp(acc)[1] - 1)
        if not exponents:
            continue
        unit = 2.0 ** (max(exponents) - 13)
        total = unit * (
            sum(np.trunc(float(x) * float(y) / unit) for x, y in pairs)
            + np.trunc(acc / unit)
        )
        if total:
            last = 2.0 ** (np.frexp(total)[1] - 1 - 13)
            total = np.trunc(total / last) * last
        acc = total
    return acc


@settings(max_examples=10)
@given(seed=st.integers(0, 99), spread=st.sampled_from([0.01, 1.0, 3.0]))
def test_float8_sums_are_truncated_as_described(seed, spread):
    rng = np.random.default_rng(seed)
    size = np.exp(spread * rng.standard_normal((2, 96)))
    values = np.clip(rng.standard_normal((2, 96)) * size, -448, 448)
    a, b = values.astype(ml_dtypes.float8_e4m3fn)
    got = accumulated(a[None], b[:, None])[0, 0]
    assert got == slow_float8(0.0, a.astype(np.float64), b.astype(np.float64))


@pytest.mark.parametrize(
    "shape",
    [(128, 64, 128), (64, 64, 256), (128, 128, 256), (64, 4096, 256), (8, 3, 5)],
)
def test_large_products_are_made_of_small_ones(monkeypatch, shape):
    m, k, n = shape
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-9, 9, s).astype(np.float32) for s in ((m, k), (k, n)))
    want, sizes = a @ b, []
    matmul = np.matmul

    def counted(x, y):
        sizes.append(x.shape[-2] * x.shape[-1] * y.shape[-1])
        return matmul(x, y)

    monkeypatch.setattr(np, "matmul", counted)
    np.testing.assert_array_equal(tensor_core.product(a, b), want)
    assert sizes
    assert max(sizes) <= tensor_core._ONE_THREAD_TERMS


def test_float8_sums_need_no_rank_promotion():
    a = np.full((8, 32), 0.5, ml_dtypes.float8_e4m3fn)
    with jax.numpy_rank_promotion("raise"):
        np.testing.assert_array_equal(accumulated(a, a.T), np.full((8, 8), 8.0))


@pytest.mark.parametrize("acc_dtype", [np.float32, np.float16])
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_sums_with_infinities_and_nan_are_those_of_float32(name, acc_dtype):
    """Where a term is not finite there are no bits to align."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal((16, 64)).astype(name)
    b = rng.standard_normal((64, 8)).astype(name)
    a[0, 3] = a[5, 40] = np.nan
    if name == "float8_e5m2":
        a[1, 2], a[2, 33], b[7, 1] = np.inf, -np.inf, np.inf
    got = accumulated(a, b, acc_dtype)
    plain = a.astype(np.float32) @ b.astype(np.float32)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(plain))
    infinite = np.isinf(plain)
    np.testing.assert_array_equal(np.isinf(got), infinite)
    np.testing.assert_array_equal(got[infinite], plain[infinite])
    finite = np.isfinite(plain)
    np.testing.assert_allclose(got[finite], plain[finite], atol=0.1)


def test_settings_of_jax_do_not_reach_the_emulator():
    a = jnp.ones((64, 128), jnp.float8_e4m3fn)
    a = jax.block_until_ready(a.at[0, 0].set(jnp.nan))
    with jax.transfer_guard("disallow"):
        out = product(a, a, jnp.float32, True)
    want = np.full((64, 64), 128.0)
    want[0] = want[:, 0] = np.nan
    np.testing.assert_array_equal(out, want)


# --- beside a GPU ---------------------------------------------------------------------


def product(a, b, acc_dtype, interpret):
    """a @ b.T in one wgmma."""
    shape = (a.shape[0], b.shape[0])

    def body(a_ref, b_ref, o, sa, sb, barrier):
        plgpu.copy_gmem_to_smem(a_ref, sa, barrier)
        plgpu.copy_gmem_to_smem(b_ref, sb, barrier)
        plgpu.barrier_wait(barrier)

        def scope(acc):
            plgpu.wgmma(acc, sa, sb.T)
            return acc[...]

        o[...] = plgpu.run_scoped(scope, plgpu.ACC(shape, acc_dtype))

    scratch = tiles(a.shape, a.dtype), tiles(b.shape, b.dtype)
    barrier, out = plgpu.Barrier(num_arrivals=2), jax.ShapeDtypeStruct(shape, acc_dtype)
    return everywhere.kernel(body, out, *scratch, barrier)(interpret)(a, b)


# The unit of the last place of a sum of 256 terms, which stays below 64: what float32
# rounds (its own rounding, in any order), what fp8 keeps, what float16 keeps.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "acc_dtype", "atol"),
    [
        (jnp.float16, jnp.float32, 256 * 2.0**-19),
        (jnp.float32, jnp.float32, 256 * 2.0**-19),
        (jnp.float8_e4m3fn, jnp.float32, 2 * 2.0**-8),
        (jnp.float8_e5m2, jnp.float32, 2 * 2.0**-8),
        (jnp.float16, jnp.float16, 2 * 2.0**-5),
        (jnp.int8, jnp.int32, 0),
    ],
)
def test_the_model_and_a_gpu_agree(dtype, acc_dtype, atol):
    rng = np.random.default_rng(0)
    scale = 40 if dtype == jnp.int8 else 1
    a, b = (
        jnp.asarray(scale * rng.standard_normal((64, 256)), dtype) for _ in range(2)
    )
    model = np.asarray(product(a, b, acc_dtype, True)).astype(np.float64)
    gpu = jax.devices("cuda")[0]
    with jax.default_device(gpu):
        a, b = jax.device_put((a, b), gpu)
        got = np.asarray(product(a, b, acc_dtype, None)).astype(np.float64)
    np.testing.assert_allclose(got, model, rtol=0, atol=atol)
