# SPDX-License-Identifier: Apache-2.0
"""Sorting: the order of NaN, of equal elements, and of several keys."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support import everywhere
from tests.support.functions import check, kernel_of
from tests.support.semantics import BOTH, under


def numbers(dtype: str, shape: tuple[int, ...] = (8, 32)) -> np.ndarray:
    """Few different ones, and all that floats have besides."""
    rng = np.random.default_rng(0)
    low = 0 if dtype.startswith("u") or dtype == "bool" else -9
    x = rng.integers(low, 2 if dtype == "bool" else 9, shape)
    if dtype.endswith("int4"):
        x = np.clip(x, jnp.iinfo(dtype).min, jnp.iinfo(dtype).max)
    x = x.astype(jnp.dtype(dtype))
    if jnp.issubdtype(x.dtype, jnp.floating):
        x[0, :6] = [np.nan, -np.inf, np.inf, 0.0, -0.0, -np.nan]
    return x


DTYPES = ("float32", "bfloat16", "float16", "int32", "int8", "uint8", "uint32", "bool")


@pytest.mark.parametrize(
    ("dtype", "columns"),
    [
        *((dtype, 32) for dtype in (*DTYPES, "int4", "uint4")),
        ("float32", 64),
        ("int8", 64),
    ],
)
def test_the_order_is_that_of_jax(dtype: str, columns: int):
    check(lambda x: lax.sort(x, dimension=1), numbers(dtype, (8, columns)))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((8192,), "uint32"), ((6, 1024), "int32"), ((64, 128), "bfloat16")],
)
def test_rows_of_a_thread_and_halves_of_them_are_sorted_in_turn(shape, dtype):
    check(jnp.sort, numbers(dtype, (1, np.prod(shape))).reshape(shape))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e8m0fnu", "float4_e2m1fn"])
def test_narrow_floats_are_in_the_order_of_numbers(dtype: str):
    raw = np.random.default_rng(2).permutation(256).astype(np.uint8).reshape(8, 32)

    def function(x):
        if dtype == "float4_e2m1fn":
            x = x.astype(jnp.uint4)
        return lax.sort(lax.bitcast_convert_type(x, dtype)).astype(jnp.float32)

    check(function, raw)


@pytest.mark.smoke
def test_equal_elements_keep_their_order():
    x = numbers("float32")
    check(lambda x: jnp.argsort(x, axis=1, stable=True), x)
    check(lambda x: jnp.signbit(jnp.sort(x, axis=1)), x[:, :8].copy())
    # Few elements of a narrow type: the position is in the word of the key.
    check(lambda x: jnp.signbit(jnp.sort(x, axis=1)), numbers("bfloat16"))


@pytest.mark.parametrize("shape", [(16, 8), (100, 3), (5, 7), (1, 130)])
@pytest.mark.parametrize("axis", [0, 1])
def test_any_size_of_any_axis(shape: tuple[int, int], axis: int):
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    check(lambda x: jnp.sort(x, axis=axis), x)


def test_a_vector():
    x = np.random.default_rng(1).normal(size=256).astype(np.float32)
    check(lambda x: jnp.sort(x), x)


@pytest.mark.parametrize("dtype", ["uint32", "int8", "float64"])
@pytest.mark.parametrize("size", [2, 130, 1024])
def test_a_vector_in_lanes_and_warps(size: int, dtype: str):
    """Bits of the index are in registers, lanes and warps."""
    with jax.enable_x64(True):
        x = np.random.default_rng(1).integers(0, 100, size).astype(dtype)
        check(jnp.sort, x)


def test_each_warp_sorts_rows_of_its_own():
    x = np.random.default_rng(1).integers(0, 99, (4, 3, 64)).astype(np.int32)

    def body(x_ref, o_ref):
        @plgpu.warp_map
        def _(warp_id):
            o_ref[warp_id] = jnp.sort(x_ref[warp_id], axis=1)

    everywhere.check(everywhere.kernel(body, x), [x], np.sort(x, axis=-1))


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
@pytest.mark.parametrize(
    ("shape", "dtype", "lines"),
    [
        ((4096,), "uint32", 1400),
        ((8192,), "bfloat16", 5000),
        ((8192,), "float32", 5800),
        ((4, 4096), "int32", 2400),
        ((4, 2048), "float32", 3600),
    ],
)
def test_a_long_sort_is_short_code(semantics, shape, dtype, lines):
    """It compiles in two seconds: unrolled, 4096 elements had 34,000 lines of PTX."""
    x = jax.ShapeDtypeStruct(shape, dtype)
    kernel = under(semantics, kernel_of(jnp.sort, x)())
    (report,) = plgpu.offline.compile(kernel, x)
    assert report.ptx.count("\n") < lines
    assert not report.resources.spill_load_bytes


@pytest.mark.parametrize("bytes_", [16, 128])
def test_a_vector_through_little_scratch(bytes_: int):
    """Warps exchange partners a few at a time."""
    x = np.random.default_rng(1).normal(size=256).astype(np.float32)
    little = plgpu.CompilerParams(reduction_scratch_bytes=bytes_)
    check(jnp.sort, x, compiler_params=little)


@pytest.mark.parametrize("semantics", BOTH)
def test_a_vector_without_scratch_is_refused(semantics):
    none = plgpu.CompilerParams(reduction_scratch_bytes=0)
    x = np.zeros(256, np.float32)
    kernel = under(semantics, kernel_of(jnp.sort, x, compiler_params=none)())
    asked = "pass CompilerParams\\(reduction_scratch_bytes="
    for call in (kernel, functools.partial(plgpu.offline.lower, kernel)):
        with pytest.raises(errors.PallasGpuError, match=asked) as info:
            call(x)
        assert info.value.where


@pytest.mark.parametrize(("num_keys", "columns"), [(1, 64), (2, 32), (3, 32)])
def test_several_keys_and_what_moves_with_them(num_keys: int, columns: int):
    shape = 8, columns
    x, y = numbers("int32", shape), numbers("float32", shape)[::-1].copy()

    def function(x, y):
        moved = lax.broadcasted_iota(jnp.int16, x.shape, 1)
        return lax.sort((x, y, moved), dimension=1, num_keys=num_keys)

    check(function, x, y)


@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize(("k", "columns"), [(1, 32), (5, 32), (64, 64)])
def test_the_largest_elements(k: int, columns: int, dtype: str):
    check(lambda x: lax.top_k(x, k), numbers(dtype, (8, columns)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_few_of_a_long_vector_are_selected(dtype: str):
    x = numbers(dtype, (1, 500)).reshape(-1)
    check(lambda x: lax.top_k(x, 4), x)


def test_int4_is_selected_as_int8_is():
    x = numbers("int4", (1, 500)).reshape(-1)
    expected = [np.asarray(y) for y in lax.top_k(x.astype(np.int8), 4)]
    expected[0] = expected[0].astype(x.dtype)
    make = kernel_of(lambda x: lax.top_k(x, 4), x)
    everywhere.check(make, [x], expected)


def test_few_elements_are_selected_and_more_are_sorted():
    def is_network(k: int) -> bool:
        like = jax.ShapeDtypeStruct((k,), jnp.float32)

        @plgpu.kernel(out_type=like)
        def largest(x, o):
            o[...] = lax.top_k(x[...], k)[0]

        x = np.zeros(64, np.float32)
        return "redux" not in plgpu.offline.lower(largest, x, target="sm_90a")[0].mlir

    assert [is_network(k) for k in (7, 8)] == [False, True]


def test_descending_order():
    x = np.random.default_rng(1).permutation(64 * 8).reshape(8, 64).astype(np.int32)
    check(lambda x: jnp.sort(x, axis=1, descending=True), x)
