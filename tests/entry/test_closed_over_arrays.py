# SPDX-License-Identifier: Apache-2.0
"""Small arrays that a body closes over, and loops whose condition is an array."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support import functions

X = np.random.default_rng(0).normal(size=(16, 128)).astype(np.float32)
TABLE = np.random.default_rng(1).normal(size=128).astype(np.float32)


@pytest.mark.smoke
@pytest.mark.parametrize("of", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_a_body_closes_over_a_small_array(of):
    table = of(TABLE)
    functions.check(lambda x: x + table, X)


@pytest.mark.parametrize("of", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_a_jitted_function_closes_over_a_small_array(of):
    table = of(TABLE)
    function = lambda x: jax.jit(lambda v: v * table)(x) + table  # noqa: E731
    functions.check(function, X, atol=1e-6)


def test_literals_of_a_body_are_arrays():
    functions.check(lambda x: jnp.where(jnp.isin(x, jnp.array([X[0, 0], 0])), 1, x), X)


@pytest.mark.parametrize("flow", ["cond", "while", "fori", "jit"])
def test_control_flow_closes_over_a_small_array(flow):
    def function(x):
        if flow == "cond":
            return lax.cond(x[0, 0] > 0, lambda: x + TABLE, lambda: x - TABLE)
        if flow == "jit":
            scaled = jax.jit(lambda x: x * jnp.asarray(TABLE))
            both = scaled, lambda x: scaled(x) + 2 * TABLE
            return lax.cond(x[0, 0] > 0, *both, x)
        if flow == "while":
            return lax.while_loop(lambda y: y[0, 0] < 9, lambda y: y + TABLE**2, x)
        return lax.fori_loop(0, 3, lambda i, y: y + jnp.asarray(TABLE), x)

    functions.check(function, X, rtol=1e-6, atol=1e-6)


def test_a_kernel_closes_over_a_traced_array_and_is_batched_over_it():
    def add(x, table):
        def body(x_ref, o_ref):
            o_ref[...] = x_ref[...] + table

        return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    np.testing.assert_array_equal(jax.jit(add)(X, TABLE), X + TABLE)
    tables = np.stack([TABLE, -TABLE, 2 * TABLE])
    got = jax.jit(jax.vmap(add, in_axes=(None, 0)))(X, tables)
    np.testing.assert_array_equal(got, X[None] + tables[:, None])


def test_a_changed_array_is_another_kernel():
    table = TABLE.copy()

    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...] + table

    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(X.shape, X.dtype))
    np.testing.assert_array_equal(kernel(X), X + TABLE)
    table += 1
    np.testing.assert_array_equal(kernel(X), X + table)


@pytest.mark.parametrize("carry", ["array", "pair"])
def test_rows_leave_a_loop_one_after_the_other(carry):
    """`jax.vmap` of a loop: its condition becomes an array."""

    def halved(row):
        if carry == "array":
            return lax.while_loop(lambda v: jnp.sum(v * v) > 20, lambda v: v / 2, row)
        count, row = lax.while_loop(
            lambda s: jnp.sum(s[1] ** 2) > 20, lambda s: (s[0] + 1, s[1] / 2), (0, row)
        )
        return row + count

    functions.check(jax.vmap(halved), X, rtol=1e-6, atol=1e-6)
