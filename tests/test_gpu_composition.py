# SPDX-License-Identifier: Apache-2.0
"""Kernels among JAX's transformations on a GPU; the emulator has the same tests."""

import functools

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


# --- in place -------------------------------------------------------------------------


def double(ref):
    ref[...] = ref[...] * 2


def in_place(body=double):
    return plgpu.kernel(body, out_type=())


@pytest.mark.parametrize("jit", [False, True])
def test_a_reference_is_updated_in_place(jit):
    ref = jax.new_ref(jnp.asarray(X[:, :128]))
    f = in_place()
    (jax.jit(f) if jit else f)(ref)
    np.testing.assert_array_equal(ref[...], 2 * X[:, :128])


@pytest.mark.parametrize("jit", [False, True])
def test_a_captured_reference_in_a_scan_and_a_cond(jit):
    def program(x):
        ref = jax.new_ref(x)
        k = in_place(lambda: double(ref))
        lax.scan(lambda c, _: (c, k())[:1] * 2, 0, length=3)
        lax.cond(ref[0, 0] != 0, k, lambda: ())
        return ref[...]

    x = X[:, :128]
    np.testing.assert_array_equal((jax.jit(program) if jit else program)(x), 16 * x)


def test_a_donated_array_is_updated_in_its_own_memory():
    @functools.partial(jax.jit, donate_argnums=0)
    def program(x):
        ref = jax.new_ref(x)
        in_place()(ref)
        return jax.freeze(ref)

    x = jnp.asarray(X[:, :128])
    before = x.unsafe_buffer_pointer()
    result = program(x)
    assert x.is_deleted()
    assert result.unsafe_buffer_pointer() == before
    np.testing.assert_array_equal(result, 2 * X[:, :128])


def test_an_array_that_is_used_later_is_not_overwritten():
    @jax.jit
    def program(x):
        ref = jax.new_ref(x)
        in_place()(ref)
        return ref[...] - x

    x = X[:, :128]
    np.testing.assert_array_equal(program(x), x)


def test_vmap_of_references():
    xs = np.stack([X[:, :128], X[:, 128:]])
    ref = jax.new_ref(jnp.asarray(xs))
    jax.jit(jax.vmap(in_place()))(ref)
    np.testing.assert_array_equal(ref[...], 2 * xs)


# --- axes around the call, derivatives, export ----------------------------------------


def test_a_position_on_an_axis_around_the_call():
    def body(x, o):
        o[...] = x[...] + lax.axis_index("b").astype(jnp.float32)

    k = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32))
    xs = X[:3, :128]
    result = jax.jit(jax.vmap(k, axis_name="b"))(xs)
    np.testing.assert_array_equal(result, xs + np.arange(3, dtype=np.float32)[:, None])


def test_a_gradient_through_kernels_and_of_array_code_in_one():
    like = jax.ShapeDtypeStruct((128,), jnp.float32)

    @plgpu.kernel(out_type=like)
    def forward(x, o):
        o[...] = x[...] * x[...]

    @plgpu.kernel(out_type=like)
    def backward(x, g, o):
        _, vjp = jax.vjp(lambda v: v * v, x[...])
        o[...] = vjp(g[...])[0]

    f = jax.custom_vjp(forward)
    f.defvjp(lambda x: (forward(x), x), lambda x, g: (backward(x, g),))
    x = X[0, :128]
    gradient = jax.jit(jax.grad(lambda x: f(x).sum()))(x)
    np.testing.assert_array_equal(gradient, 2 * x)


def test_a_program_that_was_exported_and_read_again():
    pytest.importorskip("flatbuffers")
    call = scale()
    exported = jax.export.export(jax.jit(call), platforms=["cuda"])(X, S)
    read = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(jax.jit(read.call)(X, S), X * 2.5)


def test_a_program_that_was_compiled_before_the_call():
    compiled = jax.jit(scale()).lower(jnp.asarray(X), jnp.asarray(S)).compile()
    np.testing.assert_array_equal(compiled(jnp.asarray(X), jnp.asarray(S)), X * 2.5)


def test_nans_are_found():
    like = jax.ShapeDtypeStruct((128,), jnp.float32)
    k = plgpu.kernel(lambda x, o: o.set(jnp.log(x[...])), out_type=like)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        jax.block_until_ready(k(-jnp.ones(128)))
