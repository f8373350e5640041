# SPDX-License-Identifier: Apache-2.0
"""Which calls of JAX's own pallas_call reach this package, on every platform."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import pallas_gpu as plgpu
from pallas_gpu import errors

X = np.arange(512, dtype=np.float32).reshape(2, 256)
PARAMS = plgpu.CompilerParams()


def add_position_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...] + pl.program_id(0)


def add_position(x, **options):
    spec = pl.BlockSpec((128,), lambda i: (i,))
    return pl.pallas_call(
        add_position_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // 128,),
        in_specs=[spec],
        out_specs=spec,
        **{"compiler_params": PARAMS, **options},
    )(x)


def expected(x):
    return x + np.arange(x.shape[-1]) // 128


LATE = """
import sys
import jax, jax.numpy as jnp
import pallas_gpu as plgpu
params = plgpu.CompilerParams()
assert "jax.experimental.pallas" not in sys.modules
from jax.experimental import pallas as pl
def double(x_ref, o_ref):
    o_ref[...] = 2 * x_ref[...]
x = jnp.ones(128)
assert pl.pallas_call(double, out_shape=x, compiler_params=params)(x)[0] == 2
"""


def test_jaxs_pallas_is_not_imported_and_may_be_imported_after_the_parameters():
    ran = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.smoke
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_on_the_cpu_a_call_with_our_parameters_runs_in_the_emulator(transform):
    np.testing.assert_array_equal(transform(add_position)(X[0]), expected(X[0]))


def test_a_call_without_our_parameters_is_jaxs():
    with pytest.raises(ValueError, match="Only interpret mode"):
        add_position(X[0], compiler_params=None)
    out = add_position(X[0], compiler_params=None, interpret=True)
    np.testing.assert_array_equal(out, expected(X[0]))


@pytest.mark.smoke
def test_for_a_gpu_it_is_lowered_to_our_kernel():
    traced = jax.jit(add_position).trace(X[0])
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1
    (report,) = plgpu.offline.lower(add_position, X[0])
    assert report.name == "add_position_kernel"


def test_it_is_exported_for_a_gpu():
    exported = jax.export.export(jax.jit(add_position), platforms=["cuda"])(X[0])
    assert "mosaic_gpu_v2" in exported.mlir_module()


def test_offline_functions_see_it_among_our_kernels_and_inside_of_loops():
    ours = plgpu.kernel(
        lambda x_ref, o_ref: o_ref.set(x_ref[...]),
        out_type=jax.ShapeDtypeStruct((256,), jnp.float32),
        name="ours",
    )

    def program(x):
        x = jax.lax.fori_loop(0, 2, lambda _, y: add_position(y, name="theirs"), x)
        return ours(x)

    names = [report.name for report in plgpu.offline.lower(program, X[0])]
    assert names == ["theirs", "ours"]


def test_offline_functions_ignore_calls_of_jax():
    with pytest.raises(errors.ArgumentError, match="does not call a kernel"):
        plgpu.offline.lower(
            lambda x: add_position(x, compiler_params=None, interpret=True), X[0]
        )


@pytest.mark.parametrize("interpret", [True, plgpu.InterpretParams(seed=3)])
def test_interpret_is_the_emulators(interpret):
    out = add_position(X[0], interpret=interpret)
    np.testing.assert_array_equal(out, expected(X[0]))


def test_parameters_of_the_emulator_reach_it():
    def read_unwritten(x_ref, o_ref, scratch_ref):
        o_ref[...] = x_ref[...] + scratch_ref[...]

    def call(**options):
        return pl.pallas_call(
            read_unwritten,
            out_shape=jax.ShapeDtypeStruct((128,), jnp.float32),
            scratch_shapes=[plgpu.SMEM((128,), jnp.float32)],
            compiler_params=PARAMS,
            **options,
        )(X[0, :128])

    zeros = plgpu.InterpretParams(uninitialized_memory="zero")
    np.testing.assert_array_equal(call(interpret=zeros), X[0, :128])
    with pytest.raises(Exception, match=r"scratch_ref\) is read where nothing"):
        call()


@pytest.mark.gpu
def test_interpret_runs_the_emulator_on_a_gpu():
    with jax.default_device(jax.devices("cuda")[0]):
        text = jax.jit(lambda x: add_position(x, interpret=True)).lower(X[0]).as_text()
    assert "mosaic_gpu_v2" not in text


def test_interpret_parameters_of_jaxs_pallas_are_refused():
    from jax.experimental.pallas import tpu as pltpu

    with pytest.raises(errors.ArgumentTypeError, match="object of JAX's Pallas"):
        add_position(X[0], interpret=pltpu.InterpretParams())


@pytest.mark.smoke
def test_vmap_adds_an_axis_that_the_body_does_not_see():
    np.testing.assert_array_equal(jax.vmap(add_position)(X), expected(X))
    nested = jax.vmap(jax.vmap(add_position))(np.stack([X, X + 1]))
    np.testing.assert_array_equal(nested, expected(np.stack([X, X + 1])))


def sums_kernel(x_ref, o_ref):
    @pl.when(pl.program_id(0) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += x_ref[...]


def sums(x, steps=None):
    return pl.pallas_call(
        sums_kernel,
        out_shape=jax.ShapeDtypeStruct((128,), x.dtype),
        grid=(x.shape[0] // 128 if steps is None else steps,),
        in_specs=[pl.BlockSpec((128,), lambda i: (i,))],
        out_specs=pl.BlockSpec((128,), lambda i: (0,)),
        compiler_params=plgpu.CompilerParams(dimension_semantics=("arbitrary",)),
    )(x)


def test_vmap_leaves_sequential_axes_sequential():
    np.testing.assert_array_equal(jax.vmap(sums)(X), X.reshape(2, -1, 128).sum(axis=1))


def square_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...] * x_ref[...]


def square(x):
    return pl.pallas_call(square_kernel, out_shape=x, compiler_params=PARAMS)(x)


def test_grad_through_a_custom_vjp():
    squares = jax.custom_vjp(square)
    squares.defvjp(lambda x: (square(x), x), lambda x, g: (2 * x * g,))
    x = jnp.asarray(X[0, :128])
    np.testing.assert_array_equal(jax.grad(lambda x: squares(x).sum())(x), 2 * x)


def test_jaxs_own_derivative_of_a_kernel_runs_too():
    """JAX differentiates the body before this package receives it."""
    x = jnp.asarray(X[0, :128])
    out, tangent = jax.jvp(square, (x,), (jnp.ones_like(x),))
    np.testing.assert_array_equal(out, x * x)
    np.testing.assert_array_equal(tangent, 2 * x)


def test_a_traced_grid_size_of_a_sequential_axis():
    out = jax.jit(sums)(X.reshape(-1), 3)
    np.testing.assert_array_equal(out, X.reshape(-1, 128)[:3].sum(axis=0))


def test_references_that_a_body_closes_over_are_updated_in_place():
    """JAX turns them into arguments that results alias."""

    def program(x):
        ref = jax.new_ref(x)

        def body(x_ref, o_ref):
            o_ref[...] = x_ref[...] + ref[...]
            ref[...] = 3 * x_ref[...]

        out = pl.pallas_call(body, out_shape=x, compiler_params=PARAMS)(x)
        return out, ref[...]

    x = X[0, :128]
    out, updated = jax.jit(program)(x)
    np.testing.assert_array_equal(out, 2 * x)
    np.testing.assert_array_equal(updated, 3 * x)


def test_debug_prints_the_body_of_our_kernel(capsys):
    add_position(X[0], debug=True)
    assert "kernel add_position_kernel:" in capsys.readouterr().out


def test_under_shard_map_the_type_of_the_result_varies_as_jax_asks():
    def double(x):
        def body(x_ref, o_ref):
            o_ref[...] = 2 * x_ref[...]

        return pl.pallas_call(body, out_shape=jax.typeof(x), compiler_params=PARAMS)(x)

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",))
    sharded = jax.shard_map(
        double, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d")
    )
    np.testing.assert_array_equal(jax.jit(sharded)(X), 2 * X)


def test_vmap_of_aliases():
    def body(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    spec = pl.BlockSpec((128,), lambda i: (i,))
    add = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(X[0].shape, X.dtype),
        grid=(2,),
        in_specs=[spec, spec],
        out_specs=spec,
        input_output_aliases={0: 0},
        compiler_params=PARAMS,
    )
    np.testing.assert_array_equal(jax.vmap(add)(X, X), 2 * X)


def test_names_of_upstreams_run_scoped_in_our_kernels_are_told():
    def body(x_ref, o_ref):
        pl.run_scoped(lambda tile: None, plgpu.SMEM((8,), jnp.float32))
        o_ref[...] = x_ref[...]

    def with_tile(x_ref, o_ref):
        def scope(tile_ref):
            o_ref[...] = x_ref[...]

        pl.run_scoped(scope, plgpu.SMEM((8,), jnp.float32))

    for each in (body, with_tile):
        kernel = plgpu.kernel(each, out_type=jax.ShapeDtypeStruct((256,), jnp.float32))
        with pytest.raises(errors.ArgumentTypeError, match="run_scoped of JAX's"):
            kernel(X[0])
