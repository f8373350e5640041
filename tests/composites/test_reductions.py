# SPDX-License-Identifier: Apache-2.0
"""Positions of extrema, and reductions by exclusive or."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.support import everywhere


def values(dtype: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    # Few different ones: the first of equal ones counts.
    return rng.integers(0, 40, (64, 128)).astype(jnp.dtype(dtype))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("function", [jnp.argmax, jnp.argmin])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "int8"])
def test_the_first_of_equal_extrema_counts(function, axis: int, dtype: str):
    x = values(dtype)
    expected = np.asarray(function(x, axis=axis))
    make = everywhere.elementwise(
        lambda x: function(x, axis=axis), jnp.int32, shape=expected.shape
    )
    everywhere.check(make, [x], expected)


@pytest.mark.parametrize("function", [jnp.argmax, jnp.argmin])
def test_the_first_nan_exceeds_everything(function):
    x = np.random.default_rng(1).normal(size=(64, 128)).astype(np.float32)
    x[3, 40] = x[3, 90] = x[5, 127] = np.nan
    x[6], x[7], x[8, 3:] = -np.inf, np.inf, -0.0
    expected = np.asarray(function(x, axis=1))
    assert expected[3] == 40
    make = everywhere.elementwise(
        lambda x: function(x, axis=1), jnp.int32, shape=expected.shape
    )
    everywhere.check(make, [x], expected)


def test_the_position_in_a_whole_array():
    x = values("float32")
    x[17, 5] = 99

    def body(x):
        return jnp.full((128,), jnp.argmax(x), jnp.int32)

    make = everywhere.elementwise(body, jnp.int32, shape=(128,))
    everywhere.check(make, [x], np.full(128, 17 * 128 + 5, np.int32))


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
def test_exclusive_or(dtype: str):
    x = (values("int32") * 2654435).astype(dtype)
    make = everywhere.elementwise(
        lambda x: lax.reduce_xor(x, (1,)), jnp.dtype(dtype), shape=(64,)
    )
    everywhere.check(make, [x], np.bitwise_xor.reduce(x, axis=1))
