# SPDX-License-Identifier: Apache-2.0
"""Comparisons of floats in their total order, and what stands on them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import everywhere, host


@pytest.mark.parametrize("method", ["scan", "compare_all"])
def test_searchsorted_agrees_with_jax(method, rng):
    table = jnp.sort(host.array(rng.standard_normal(33), jnp.float32))
    x = np.asarray(rng.standard_normal(64), np.float32)
    x[:4] = [np.nan, np.inf, -np.inf, -0.0]
    expected = jnp.searchsorted(table, x, method=method)
    make = everywhere.elementwise(
        lambda t, v: jnp.searchsorted(t, v, method=method), jnp.int32, shape=(64,)
    )
    everywhere.check(make, [table, x], expected)


def test_exponents_are_ordered_without_a_sign(rng):
    table = np.exp2(np.sort(rng.integers(-127, 127, 33))).astype(jnp.float8_e8m0fnu)
    x = np.exp2(rng.integers(-127, 127, 64)).astype(jnp.float8_e8m0fnu)
    expected = np.searchsorted(table.astype(np.float64), x.astype(np.float64))
    make = everywhere.elementwise(jnp.searchsorted, jnp.int32, shape=(64,))
    everywhere.check(make, [table, x], expected)
