# SPDX-License-Identifier: Apache-2.0
"""What indices are known to be multiples of while a kernel is traced."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.primitives.indices import multiples


def half(i):
    return (jnp.float32(0.5) * (i * 16).astype(jnp.float32)).astype(jnp.int32)


CASES = {
    "product": (lambda i: i * 48, 48),
    "sum of products": (lambda i: i * 48 + 32, 16),
    "difference": (lambda i: 64 - 24 * i, 8),
    "negative": (lambda i: -(i * 6), 6),
    "of a quotient": (lambda i: i // 4 * 32, 32),
    "remainder": (lambda i: lax.rem(i * 16, 64), 16),
    "choice": (lambda i: jnp.where(i > 3, i * 8, 24), 8),
    "bound": (lambda i: jnp.minimum(i * 64, 96), 32),
    "promise": (lambda i: plgpu.multiple_of(i, 10), 10),
    "promise of a multiple": (lambda i: plgpu.multiple_of(i * 4, 6), 12),
    "zero": (lambda i: i * 0, 0),
    "another type": (lambda i: (i * 8).astype(jnp.uint32), 8),
    "the counter itself": (lambda i: i, 1),
    "a quotient": (lambda i: (i * 8) // 2, 1),
    "bits": (lambda i: i * 8 ^ 8, 1),
    "a half": (half, 1),
    "a half in a jitted function": (jax.jit(half), 1),
}


@pytest.mark.parametrize("case", CASES)
def test_the_divisor_of_an_index(case):
    function, expected = CASES[case]
    found = []

    def traced(i):
        found.append(multiples.divisor(function(i)))
        return i

    jax.make_jaxpr(traced)(jnp.int32(3))
    assert found == [expected]


def test_values_of_outer_traces_are_known():
    found = []

    def traced(i):
        outer = i * 32

        def step(k, carry):
            found.append(multiples.divisor(outer + 8 * k))
            return carry

        return lax.fori_loop(0, 3, step, i)

    jax.make_jaxpr(traced)(3)
    assert found == [8]


def test_a_long_computation_ends():
    def traced(i):
        x = i * 4
        for _ in range(200):
            x = x + x
        assert multiples.divisor(x) == 1
        return i

    jax.make_jaxpr(traced)(3)


def test_a_number():
    assert (multiples.divisor(-12), multiples.divisor(0)) == (12, 0)


GOOD = {"multiple_of": lambda e: {"x": e.i, "values": 8}}
