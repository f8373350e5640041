# SPDX-License-Identifier: Apache-2.0
"""Eager calls on a device find the launch of an earlier one like them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import types
from pallas_gpu.entry import kernel as entry


@pytest.fixture(autouse=True)
def traces(monkeypatch):
    """The CPU counts as the kernels' device; returns the calls that were looked at."""
    monkeypatch.setattr(types.Mesh, "platforms", ("cuda", "cpu"))
    calls, launch_body = [], entry.launch_body

    def counted(*args, **options):
        calls.append(args)
        return launch_body(*args, **options)

    monkeypatch.setattr(entry, "launch_body", counted)
    return calls


def scaled(by):
    """A kernel, and a function that changes what its body captures."""

    def body(x, o):
        o[...] = (x[...] * by).astype(o.dtype)

    def change(value):
        nonlocal by
        by = value

    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    return plgpu.kernel(body, out_type=x), change


@pytest.fixture
def x():
    return jnp.arange(1024, dtype=jnp.float32).reshape(8, 128)


def test_the_second_call_is_the_launch_of_the_first(traces, x):
    f, _ = scaled(2.0)
    for y in (x, x + 1, x + 2):
        np.testing.assert_array_equal(f(y), y * 2)
    assert len(traces) == 1


def test_what_the_body_captures_may_change(traces, x):
    f, change = scaled(2.0)
    np.testing.assert_array_equal(f(x), x * 2)
    change(3.0)
    np.testing.assert_array_equal(f(x), x * 3)
    assert len(traces) == 2


def test_results_are_in_their_tree(traces, x):
    out = {"a": jax.ShapeDtypeStruct((8, 128), jnp.float32)}

    def body(x, o):
        o["a"][...] = x[...] + 1

    spec = plgpu.BlockSpec((8, 128), lambda: (0, 0))
    calls = (
        plgpu.kernel(body, out_type=out),
        plgpu.pallas_call(body, out, in_specs=[spec], out_specs={"a": spec}),
    )
    for f in calls:
        for _ in range(2):
            np.testing.assert_array_equal(f(x)["a"], x + 1)
    assert len(traces) == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda f, x: f(np.asarray(x)),
        lambda f, x: jax.jit(f)(x),
        lambda f, x: jax.vmap(f)(x[None])[0],
        lambda f, x: f(x.astype(jnp.bfloat16)),
    ],
)
def test_a_call_of_another_kind_is_looked_at(call, traces, x):
    f, _ = scaled(2.0)
    f(x)
    np.testing.assert_array_equal(call(f, x), call(lambda x: x, x) * 2)
    assert len(traces) == 2


def test_the_emulator_is_asked_for_where_it_is_wanted(traces, monkeypatch, x):
    f, _ = scaled(2.0)
    f(x)
    monkeypatch.setenv("PALLAS_GPU_INTERPRET", "1")
    np.testing.assert_array_equal(f(x), x * 2)
    assert len(traces) == 2


def test_a_nan_is_looked_for(traces, x):
    f, _ = scaled(float("nan"))
    f(x)
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        f(x)
    assert len(traces) == 2
