# SPDX-License-Identifier: Apache-2.0
"""Kernels among JAX's transformations on a GPU; the emulator has the same tests."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu

pytestmark = pytest.mark.gpu
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def on_the_gpu():
    with jax.default_device(jax.devices("cuda")[0]):
        yield


def scale_body(x_ref, s_ref, o_ref):
    o_ref[...] = x_ref[...] * s_ref[0, 0]


def scale(shape=(100, 256), **options):
    block = plgpu.BlockSpec((64, 128), lambda i, j: (i, j))
    factor = plgpu.BlockSpec((1, 4), lambda i, j: (0, 0))
    return plgpu.pallas_call(
        scale_body,
        jax.ShapeDtypeStruct(shape, jnp.float32),
        grid=(plgpu.cdiv(shape[0], 64), plgpu.cdiv(shape[1], 128)),
        in_specs=[block, factor],
        out_specs=block,
        **options,
    )


X = RNG.standard_normal((100, 256)).astype(np.float32)
S = np.array([[2.5, 0, 0, 0]], np.float32)


def test_an_eager_call_runs_on_the_gpu():
    out = scale()(jnp.asarray(X), jnp.asarray(S))
    assert {d.platform for d in out.devices()} == {"gpu"}
    np.testing.assert_array_equal(out, X * 2.5)


def test_a_kernel_in_a_scan_and_a_cond():
    call = scale()

    @jax.jit
    def program(x, s, flag):
        def step(carry, _):
            return call(carry, s), None

        y, _ = lax.scan(step, x, None, length=3)
        return lax.cond(flag, lambda: call(y, s), lambda: y)

    expected = X * np.float32(2.5) ** 3
    np.testing.assert_allclose(program(X, S, False), expected, rtol=1e-6)
    np.testing.assert_allclose(program(X, S, True), expected * 2.5, rtol=1e-6)


def test_vmap_with_and_without_an_axis_and_nested():
    call = scale()
    xs = RNG.standard_normal((3, 100, 256)).astype(np.float32)
    ss = np.stack([S, 2 * S, 3 * S])
    one = jax.jit(jax.vmap(call, in_axes=(0, None)))(xs, S)
    np.testing.assert_array_equal(one, xs * 2.5)
    both = jax.jit(jax.vmap(call))(xs, ss)
    np.testing.assert_array_equal(both, xs * ss[:, 0, 0][:, None, None])
    nested = jax.jit(jax.vmap(jax.vmap(call, in_axes=(0, None)), in_axes=(None, 0)))(
        xs, ss
    )
    np.testing.assert_array_equal(nested, xs[None] * ss[:, 0, 0][:, None, None, None])


def test_several_kernels_in_one_program():
    call = scale()
    out = jax.jit(lambda x, s: call(call(x, s) + 1, s))(X, S)
    np.testing.assert_allclose(out, (X * 2.5 + 1) * 2.5, rtol=1e-6)


def test_the_emulator_runs_on_a_gpu_machine_where_it_is_asked_for():
    out = jax.jit(scale(interpret=True))(X, S)
    np.testing.assert_array_equal(out, X * 2.5)


def test_closed_over_scalars_reach_the_gpu():
    def run(x, factor):
        def body(x_ref, o_ref):
            o_ref[...] = x_ref[...] * factor

        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return plgpu.kernel(body, out_type=shape)(x)

    x = X[:, :128]
    np.testing.assert_array_equal(jax.jit(run)(x, jnp.float32(3)), x * 3)


def test_a_kernel_for_another_target_is_refused():
    params = plgpu.CompilerParams(target="sm_100a")
    with pytest.raises(plgpu.errors.TargetError, match="sm_100a"):
        jax.jit(scale(compiler_params=params))(X, S)
