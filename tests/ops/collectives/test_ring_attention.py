# SPDX-License-Identifier: Apache-2.0
"""Attention of sequences that are divided among devices equals that of the whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu.ops import collectives
from tests.support.meshes import emulated, mesh

ROWS = jax.P(None, "d")


def operands(devices):
    rng = np.random.default_rng(devices)
    shapes = (1, 64 * devices, 2, 32), (1, 64 * devices, 1, 32)
    q, k, v = (rng.standard_normal(shapes[i > 0]) for i in range(3))
    return [jnp.asarray(x, jnp.float16) for x in (q, k, v)]


def whole(q, k, v, causal):
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (jnp.repeat(x, q.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    if causal:
        scores = jnp.where(np.tri(q.shape[1], dtype=bool), scores, -jnp.inf)
    out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return out, jax.nn.logsumexp(scores, axis=-1)


@pytest.mark.parametrize("method", ["kernel", "lax"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("devices", [2, 4])
def test_equals_attention_of_the_whole(devices, causal, method):
    args = operands(devices)
    f = emulated(
        lambda *args: collectives.ring_attention(
            *args, "d", causal=causal, return_logsumexp=True, method=method
        ),
        mesh(d=devices), in_specs=ROWS, out_specs=(ROWS, jax.P(None, None, "d")),
    )  # fmt: skip
    for got, expected in zip(f(*args), whole(*args, causal), strict=True):
        np.testing.assert_allclose(got, expected, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("causal", [False, True])
def test_derivatives(causal):
    args = operands(2)
    f = jax.shard_map(
        lambda *args: collectives.ring_attention(
            *args, "d", causal=causal, sm_scale=0.2
        ),
        mesh=mesh(d=2), in_specs=ROWS, out_specs=ROWS,
    )  # fmt: skip
    weights = np.cos(np.arange(np.prod(args[0].shape))).reshape(args[0].shape)

    def loss(*args):
        return (f(*args).astype(jnp.float32) * weights).sum()

    def of_whole(q, k, v):
        scale = jnp.float32(0.2 * np.sqrt(32))
        return (whole(q.astype(jnp.float32) * scale, k, v, causal)[0] * weights).sum()

    got = plgpu.emulate_mesh(jax.grad(loss, (0, 1, 2)))(*args)
    for x, expected in zip(got, jax.grad(of_whole, (0, 1, 2))(*args), strict=True):
        np.testing.assert_allclose(x, expected, atol=2e-2, rtol=2e-2)


def test_rows_that_see_nothing():
    """They have no part in the result, whichever set is theirs."""
    nothing = jnp.zeros((1, 2, 1, 4)), jnp.full((1, 1, 2), -jnp.inf)
    some = jnp.ones((1, 2, 1, 4)), jnp.asarray([[[0.5, -jnp.inf]]])
    for pair in ((nothing, some), (some, nothing)):
        out, lse = collectives.merge(*pair)
        np.testing.assert_array_equal(out[0, :, 0, 0], [1, 0])
        np.testing.assert_array_equal(lse[0, 0], [0.5, -np.inf])
