# SPDX-License-Identifier: Apache-2.0
"""Loops that slice and stack arrays, in any order and with any unrolling."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.support import everywhere, functions
from tests.support.refusal import refused_by

X = np.random.default_rng(0).normal(size=(16, 128)).astype(np.float32)


def check(function: Callable, *args: np.ndarray, **options) -> None:
    functions.check(function, *args, rtol=2e-6, atol=1e-6, **options)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("reverse", "unroll"),
    # Which need not divide the length.
    [(False, 1), (True, 1), (True, 2), (True, 5), (True, 16), (True, 20)],
)
def test_a_loop_slices_and_stacks(reverse: bool, unroll: int):
    def function(x):
        def step(carry, row):
            return carry + row, carry * 2

        return lax.scan(step, jnp.zeros(128), x, reverse=reverse, unroll=unroll)

    check(function, X)


def test_a_loop_without_arrays_is_unrolled_in_part():
    def function(x):
        return lax.fori_loop(0, 5, lambda i, c: c * 0.5 + i, x, unroll=2)

    check(function, X)


def test_a_loop_carries_and_slices_trees():
    def function(x):
        def step(carry, parts):
            total, count = carry
            row, number, even = parts
            total = total + jnp.where(even, row, 0)
            return (total, count + number), (row * count, count, number > 7, even)

        numbers = jnp.arange(16)
        parts = (x, numbers, numbers % 2 == 0)
        return lax.scan(step, (jnp.zeros(128), jnp.int32(0)), parts)

    check(function, X)


def test_a_loop_in_a_loop():
    def function(x):
        return lax.map(lambda row: lax.fori_loop(0, 3, lambda i, c: c + row, row), x)

    check(function, X)


def test_a_loop_with_references_of_the_kernel():
    def body(x_ref, o_ref, sum_ref):
        def step(carry, row):
            index, total = carry
            o_ref[index] = row + x_ref[index]
            return (index + 1, total + row), None

        start = (jnp.int32(0), jnp.zeros(128))
        (_, total), _ = lax.scan(step, start, x_ref[...])
        sum_ref[...] = total

    everywhere.run(body, [X], [2 * X, X.sum(0)], rtol=2e-6, atol=1e-6)


def test_each_of_two_warpgroups_has_its_own_arrays():
    def body(x_ref, o_ref):
        me = lax.axis_index("wg")

        def step(carry, row):
            return carry + row, carry

        _, sums = lax.scan(step, jnp.zeros(128) + me, x_ref[me])
        o_ref[me] = sums

    x = X.reshape(2, 8, 128)
    expected = np.cumsum(x, axis=1) - x + np.float32([0, 1])[:, None, None]
    everywhere.run(body, [x], expected, threads={"wg": 2}, rtol=2e-6, atol=2e-6)


def test_only_the_code_for_cuda_runs():
    def function(x):
        return lax.platform_dependent(
            x,
            cpu=lambda x: jnp.fft.irfft(jnp.fft.rfft(x)),
            cuda=lambda x: x + 1,
            default=lambda x: x + 2,
        )

    make = everywhere.elementwise(function, X.dtype, shape=X.shape)
    everywhere.check(make, [X], X + 1)


def test_a_value_of_a_kernel_is_on_one_device_wherever_it_is_put():
    place = jax.NamedSharding(jax.make_mesh((1,), ("x",)), jax.P())

    def function(x):
        moved = jax.jit(lambda x: jax.reshard(2 * x, place))(x)
        return lax.fori_loop(0, 2, lambda _, x: jax.reshard(x, place) + 1, moved)

    make = everywhere.elementwise(function, X.dtype, shape=X.shape)
    everywhere.check(make, [X], 2 * X + 1 + 1)


def under_a_mesh(body):
    with jax.set_mesh(jax.make_mesh((1,), ("x",))):
        everywhere.elementwise(body, X.dtype, shape=X.shape)(True)(X)


@pytest.mark.parametrize("place", [jax.reshard, lax.with_sharding_constraint])
@refused_by(under_a_mesh)
def test_a_value_of_a_kernel_has_no_place_on_a_mesh(x, *, place):
    return place(x, jax.P())


@refused_by(lambda body: everywhere.elementwise(body, X.dtype, shape=X.shape)(True)(X))
def test_code_for_other_platforms_alone_is_refused(x):
    return lax.platform_dependent(x, cpu=lambda x: x, tpu=lambda x: x)
