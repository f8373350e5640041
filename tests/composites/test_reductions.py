# SPDX-License-Identifier: Apache-2.0
"""Positions of extrema, exclusive or, any computation, scans of logarithms."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.support import everywhere


def values(dtype: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    # Few different ones: the first of equal ones counts.
    return rng.integers(0, 40, (64, 128)).astype(jnp.dtype(dtype))


def check(function, x: np.ndarray, rtol: float = 0.0, atol: float = 0.0) -> None:
    expected = np.asarray(jax.jit(function)(x))
    make = everywhere.elementwise(function, expected.dtype, shape=expected.shape)
    everywhere.check(make, [x], expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("function", [jnp.argmax, jnp.argmin])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "int8"])
def test_the_first_of_equal_extrema_counts(function, axis: int, dtype: str):
    check(lambda x: function(x, axis=axis), values(dtype))


@pytest.mark.parametrize("function", [jnp.argmax, jnp.argmin])
def test_the_first_nan_exceeds_everything(function):
    x = np.random.default_rng(1).normal(size=(64, 128)).astype(np.float32)
    x[3, 40] = x[3, 90] = x[5, 127] = np.nan
    x[6], x[7], x[8, 3:] = -np.inf, np.inf, -0.0
    x[9, 7], x[9, 9], x[9, 11] = -np.inf, np.inf, np.nan
    x[10], x[10, 5:] = 0.0, -0.0
    x[11, ::2], x[11, 1::2] = np.inf, np.finfo(np.float32).max
    assert function(x, axis=1)[3] == 40
    check(lambda x: function(x, axis=1), x)


def test_the_position_in_a_whole_array():
    x = values("float32")
    x[17, 5] = 99
    check(lambda x: jnp.full((128,), jnp.argmax(x), jnp.int32), x)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
def test_exclusive_or(dtype: str):
    x = (values("int32") * 2654435).astype(dtype)
    check(lambda x: lax.reduce_xor(x, (1,)), x)


# --- any computation ------------------------------------------------------------------


def largest_and_its_place(x):
    def combine(a, b):
        first = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
        return tuple(jnp.where(first, p, q) for p, q in zip(a, b, strict=True))

    column = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    none = (jnp.float32(-jnp.inf), jnp.int32(2**31 - 1))
    value, place = lax.reduce((x, column), none, combine, (1,))
    return value * 1000 + place


@pytest.mark.parametrize("columns", [128, 77, 1])
def test_a_reduction_of_two_arrays(columns: int):
    check(largest_and_its_place, values("float32")[:16, :columns].copy())


def test_a_reduction_that_is_not_commutative():
    """Of affine maps: the order of the elements matters."""

    def function(x):
        def combine(f, g):
            return f[0] * g[0], f[1] * g[0] + g[1]

        numbers = x.astype(jnp.uint32) | 1, x.astype(jnp.uint32)
        return lax.reduce(numbers, (jnp.uint32(1), jnp.uint32(0)), combine, (1,))[1]

    x = values("int32")[:8]
    state = np.zeros(8, np.uint32)
    for column in x.astype(np.uint32).T:
        state = state * (column | 1) + column
    make = everywhere.elementwise(function, np.uint32, shape=(8,))
    everywhere.check(make, [x], state)


def test_a_reduction_of_all_axes():
    x = np.random.default_rng(2).normal(size=(16, 128)).astype(np.float32)

    def function(x):
        total = lax.reduce(x, jnp.float32(-jnp.inf), jnp.logaddexp, (0, 1))
        return jnp.full((128,), total)

    check(function, x, rtol=1e-5)


def test_a_reduction_of_bools():
    x = values("float32")
    check(lambda x: lax.reduce(x > 20, False, lambda a, b: a ^ b, (1,)), x)


# --- scans of logarithms --------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape", [(16, 128), (8, 77)])
def test_sums_of_exponentials_do_not_overflow(shape: tuple[int, int], reverse: bool):
    x = (np.random.default_rng(3).normal(size=shape) * 5).astype(np.float32)
    x[0, :5] = [-np.inf, -np.inf, 1, 1e30, 2]
    x[1, 3], x[2, 5] = np.nan, np.inf
    x[3] -= 1e4
    for axis in (0, 1):
        expected = np.flip(x, axis) if reverse else x
        expected = np.logaddexp.accumulate(expected.astype(np.float64), axis=axis)
        expected = np.flip(expected, axis) if reverse else expected
        make = everywhere.elementwise(
            lambda x, a=axis: lax.cumlogsumexp(x, axis=a, reverse=reverse),
            x.dtype,
            shape=shape,
        )
        everywhere.check(make, [x], expected.astype(np.float32), rtol=3e-6, atol=3e-6)


def test_sums_of_exponentials_of_halves():
    x = np.random.default_rng(4).normal(size=(16, 128)).astype(jnp.bfloat16)
    check(lambda x: lax.cumlogsumexp(x, axis=1), x, rtol=2e-2, atol=1e-2)
