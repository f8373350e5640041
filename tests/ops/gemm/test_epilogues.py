# SPDX-License-Identifier: Apache-2.0
"""Bias, activation, gate, residual and scale of a product, with derivatives."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gpu import ops
from tests.support import everywhere
from tests.support.semantics import Warpgroup

pytestmark = pytest.mark.sampled(2)

M, N, K = 70, 96, 40
CONFIG = ops.MatmulConfig(tile_m=64, tile_n=64, stages=2, blocks=2, cluster=None)
OPTIONS = ["bias", "residual", "gate"]


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float16)


A, B = normal(0, M, K), normal(1, K, N)
ARRAYS = {"bias": normal(2, N), "residual": normal(3, M, N), "gate": normal(4, K, N)}


def reference(a, b, bias=0, residual=0, gate=None, activation=None, scale=1.0):
    a, b = (jnp.asarray(x, jnp.float32) for x in (a, b))
    function = {None: lambda x: x, "silu": jax.nn.silu, "relu": jax.nn.relu}.get(
        activation, activation
    )
    if gate is None:
        return function(scale * (a @ b) + bias) + residual
    factor = jax.nn.silu(scale * (a @ jnp.asarray(gate, jnp.float32)))
    return factor * (scale * (a @ b)) + residual


def check(**options):
    def make(interpret):
        return lambda a, b: ops.matmul(
            a, b, config=CONFIG, interpret=interpret, **options
        )

    expected = reference(A, B, **options)
    everywhere.check(
        make, [A, B], expected, atol=2**-5, rtol=2**-9, executed=[Warpgroup]
    )


@pytest.mark.parametrize("activation", ["relu", "silu", jnp.tanh])
def test_an_activation(activation):
    check(activation=activation)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_operand_of_the_epilogue(name):
    check(**{name: ARRAYS[name]})


def test_everything_together():
    both = {name: ARRAYS[name] for name in ("bias", "residual")}
    check(activation="relu", scale=0.5, **both)


@pytest.mark.parametrize("name", OPTIONS)
def test_derivatives(name):
    weights = normal(5, M, N).astype(jnp.float32)

    def gradients(function):
        def loss(a, b, x):
            y = function(a, b, scale=0.25, **{name: x})
            return jnp.sum(y.astype(jnp.float32) * weights)

        return jax.grad(loss, (0, 1, 2))(A, B, ARRAYS[name])

    got = gradients(functools.partial(ops.matmul, config=CONFIG))
    for x, y in zip(got, gradients(reference), strict=True):
        x, y = (np.asarray(z, np.float64) for z in (x, y))
        assert np.linalg.norm(x - y) < 2**-8 * np.linalg.norm(y)
