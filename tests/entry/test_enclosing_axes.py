# SPDX-License-Identifier: Apache-2.0
"""`lax.axis_index` of an axis around the call: of `jax.shard_map`, or of `jax.vmap`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.entry_kernels import f32, make, numbers
from tests.support.refusal import refused_by

N = 128
X = numbers(3, N)


def shift(x, o):
    o[...] = x[...] + lax.axis_index("d").astype(jnp.float32)


def in_a_loop(x, o):
    @plgpu.loop(0, 2)
    def _(i):
        rows = plgpu.ds(64 * i, 64)
        o[rows] = x[rows] + lax.axis_index("d").astype(jnp.float32)


def in_a_branch_and_warps(x, o):
    o[...] = x[...]

    @plgpu.when(lax.axis_index("d") > 0)
    def _():
        @plgpu.warp_map
        def _(warp):
            for i in range(32):
                at = 4 * i + warp
                o[at] = x[at] + lax.axis_index("d").astype(jnp.float32)


@pytest.mark.parametrize("body", [shift, in_a_loop, in_a_branch_and_warps])
def test_a_position_on_an_axis_of_vmap(body):
    def f(interpret):
        k = make(body, f32(N), interpret=interpret)
        return jax.vmap(k, axis_name="d")

    expected = X + np.arange(3, dtype=np.float32)[:, None]
    everywhere.check(f, [X], expected)


@pytest.mark.parametrize("jit", [False, True])
def test_an_axis_of_shard_map(jit):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    k = make(shift, f32(1, N))
    f = jax.shard_map(k, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))
    with jax.enable_checks(True):
        result = (jax.jit(f) if jit else f)(X[:1])
    np.testing.assert_array_equal(result, X[:1])


def test_the_size_of_an_axis_around_the_call_is_static():
    def body(x, o):
        o[...] = x[...] * lax.axis_size("d")

    k = make(body, f32(N))
    for n in (2, 3):
        xs = X[:n]
        np.testing.assert_array_equal(jax.vmap(k, axis_name="d")(xs), xs * n)


def test_an_axis_of_the_kernel_hides_one_around_it():
    def body(x, o):
        d = lax.axis_index("d")
        o[d] = x[d] + d.astype(jnp.float32)

    k = make(body, f32(2), grid=(2,), grid_names=("d",))
    xs = numbers(3, 2)
    expected = xs + np.arange(2, dtype=np.float32)
    np.testing.assert_array_equal(jax.vmap(k, axis_name="d")(xs), expected)


@refused_by(lambda body: jax.vmap(make(body, f32(N)), axis_name="d")(X))
def test_a_collective_over_an_axis_around_the_call_is_refused(x, o):
    o[...] = lax.psum(x[...], "d")  # HERE
