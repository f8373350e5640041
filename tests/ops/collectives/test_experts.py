# SPDX-License-Identifier: Apache-2.0
"""Rows of tokens to experts on other devices, and back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu.ops.collectives import combine, dispatch
from tests.support.meshes import emulated, mesh, numbers
from tests.support.refusal import refused

TOKENS, CHOICES, WIDTH = 6, 2, 72


def problem(devices, experts, *, dtype="float32"):
    """Rows, experts and weights of all devices; some choices are none."""
    rng = np.random.default_rng(devices)
    n = devices * TOKENS
    order = rng.permuted(np.tile(np.arange(experts), (n, 1)), axis=1)[:, :CHOICES]
    chosen = np.where(rng.random((n, CHOICES)) < 0.1, -1, order).astype(np.int32)
    weights = rng.integers(1, 3, (n, CHOICES)).astype(np.float32)
    return numbers(n, WIDTH, dtype=dtype), chosen, weights


def layer(axis="d", **options):
    """Each expert multiplies rows by its number, counted from 1 on."""

    def f(x, experts, weights):
        sent = dispatch(x, experts, axis, **options)
        local = sent.rows.shape[0]
        first = jax.lax.axis_index(axis) * local
        number = (first + jnp.arange(local) + 1).astype(x.dtype)
        y = sent.rows * number[:, None, None, None]
        options_of_combine = {
            k: v for k, v in options.items() if k not in ("num_experts", "capacity")
        }
        return combine(y, experts, sent.slots, weights, axis, **options_of_combine)

    return f


def expected(x, experts, weights):
    factor = np.where(experts < 0, 0, (experts + 1) * weights).sum(axis=1)
    return np.asarray(x) * factor[:, None]


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_20_schedules(devices):
    args = problem(devices, 8)
    options = {"interpret": plgpu.InterpretParams(schedules=20), "method": "kernel"}
    f = emulated(layer(num_experts=8, **options), mesh(d=devices))
    np.testing.assert_array_equal(f(*args), expected(*args))


@pytest.mark.parametrize("method", ["kernel", "lax"])
def test_what_arrives(method):
    """Rows are those of a device, in the order of its tokens; counts say how many."""
    x, experts, _ = problem(2, 4)
    f = emulated(
        lambda x, e: dispatch(x, e, "d", num_experts=4, method=method),
        mesh(d=2),
    )
    rows, counts, slots = map(np.asarray, f(x, experts))
    of_devices = experts.reshape(2, TOKENS, CHOICES)
    for expert in range(4):
        for device, chosen in enumerate(of_devices):
            tokens = np.nonzero((chosen == expert).any(axis=1))[0]
            assert counts[expert, device] == len(tokens)
            sent = rows[expert, device, : len(tokens)]
            np.testing.assert_array_equal(sent, x[device * TOKENS + tokens])
    assert ((slots < 0) == (experts < 0)).all()


@pytest.mark.parametrize("method", ["kernel", "lax"])
def test_rows_beyond_the_capacity_are_not_sent(method):
    x, weights = numbers(8, 128), np.ones((8, 1), np.float32)
    experts = np.zeros((8, 1), np.int32)
    options = {"num_experts": 2, "capacity": 3, "method": method}
    got = np.asarray(emulated(layer(**options), mesh(d=2))(x, experts, weights))
    kept = np.arange(8)[:, None] % 4 < 3
    np.testing.assert_array_equal(got, np.where(kept, x, 0))


@pytest.mark.parametrize("method", ["kernel", "lax"])
def test_derivatives(method):
    x, experts, weights = problem(2, 4)
    f = jax.shard_map(
        layer(num_experts=4, method=method),
        mesh=mesh(d=2), in_specs=jax.P("d"), out_specs=jax.P("d"),
    )  # fmt: skip
    cotangent = np.asarray(numbers(*x.shape))

    def loss(x, weights):
        return (f(x, experts, weights) * cotangent).sum()

    of_x, of_weights = plgpu.emulate_mesh(jax.grad(loss, (0, 1)))(x, weights)
    np.testing.assert_array_equal(of_x, expected(cotangent, experts, weights))
    dots = (cotangent * np.asarray(x)).sum(axis=1, keepdims=True)
    factor = np.where(experts < 0, 0, experts + 1)
    np.testing.assert_array_equal(of_weights, dots * factor)


def test_narrow_rows_over_two_axes():
    args = problem(4, 8, dtype="bfloat16")
    f = emulated(layer(("x", "y"), num_experts=8), mesh(x=2, y=2))
    np.testing.assert_array_equal(f(*args).astype(jnp.float32), expected(*args))


X, E = np.zeros((4, 8), np.float32), np.zeros((4, 2), np.int32)
ROOM = np.zeros((2, 2, 4, 8), np.float32)
REFUSED = {
    "experts": lambda: dispatch(X, E, "d", num_experts=3),
    "tokens": lambda: dispatch(X, E[:3], "d", num_experts=2),
    "integers": lambda: dispatch(X, E.astype(np.int16), "d", num_experts=2),
    "rows": lambda: dispatch(X.astype(np.int32), E, "d", num_experts=2),
    "weights": lambda: combine(ROOM, E, E, X, "d"),
    "room": lambda: combine(X, E, E, E, "d"),
}


@pytest.mark.parametrize("name", REFUSED)
@refused
def test_a_refused_call(name):
    specs = {"in_specs": (), "out_specs": jax.P("d"), "check_vma": False}
    emulated(REFUSED[name], mesh(d=2), **specs)()
