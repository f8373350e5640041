# SPDX-License-Identifier: Apache-2.0
"""What the bodies of received calls may contain, and how mistakes in them are told."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as upstream
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as pltriton

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support import everywhere
from tests.support.refusal import refused_by

X = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
F32 = jnp.float32


def call(body, *args, out=None, grid=(), **options):
    """Calls a body over whole arrays."""
    out = jax.ShapeDtypeStruct(X.shape, F32) if out is None else out
    return pl.pallas_call(
        body,
        out_shape=out,
        grid=grid,
        compiler_params=plgpu.CompilerParams(),
        **options,
    )(*args)


def lowers(body, *args, **options):
    """Both semantics have a module for it; raises otherwise."""
    return plgpu.offline.lower(lambda *a: call(body, *a, **options), *args)


def check(body, expected, *args, **options):
    out = call(body, *args, **options)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    lowers(body, *args, **options)


@pytest.mark.parametrize("function", [jnp.tanh, jax.nn.gelu])
def test_derivatives_of_functions(function):
    """A body may differentiate; so may one of this package, by the same operations."""

    def body(x_ref, o_ref):
        o_ref[...] = jax.grad(lambda x: jnp.sum(function(x)))(x_ref[...])

    expected = jax.grad(lambda x: jnp.sum(function(x)))(X)
    check(body, expected, X)
    ours = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(X.shape, F32))
    np.testing.assert_allclose(ours(X), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.select([x > 1, x < -1], [x, -x], 0.0),
        lambda x: jnp.diagonal(x[:, :64])[:, None] + x,
    ],
    ids=["select", "diagonal"],
)
def test_functions_that_move_data(function):
    def body(x_ref, o_ref):
        o_ref[...] = function(x_ref[...])

    check(body, function(X), X)


@refused_by(call, X)
def test_a_function_without_a_form_here_has_a_hint(x_ref, o_ref):
    o_ref[...] = lax.reduce_window_max_p.bind(
        x_ref[...], window_dimensions=(1, 3), window_strides=(1, 1),
        padding=((0, 0), (1, 1)), base_dilation=(1, 1), window_dilation=(1, 1),
    )  # fmt: skip


@everywhere.tests(check, X * np.where(np.arange(64) // 16 % 2, -1, 1)[:, None], X)
def test_loops_branches_and_slices(x_ref, o_ref):
    @pl.loop(0, 4)
    def _(i):
        rows = pl.ds(pl.multiple_of(i * 16, 16), 16)

        @pl.when(i % 2 == 0)
        def _():
            o_ref[rows, :] = x_ref[rows, :]

        @pl.when(i % 2 == 1)
        def _():
            o_ref[rows, :] = -x_ref[rows, :]


@everywhere.tests(check, X + 2, X)
def test_a_switch_a_while_loop_and_a_jitted_function(x_ref, o_ref):
    scaled = jax.jit(lambda x, factor: x * factor)

    def halve(state):
        i, factor = state
        return i + 1, factor / 2

    _, factor = lax.while_loop(lambda s: s[0] < 3, halve, (0, 8.0))
    x = scaled(x_ref[...], factor)
    o_ref[...] = lax.switch(
        (x_ref[0, 0] > 100).astype(jnp.int32) + 1,
        [lambda: x + 1, lambda: x + 2, lambda: x + 3],
    )


@everywhere.tests(check, X + 2 * X.max(), X)
def test_scoped_scratch(x_ref, o_ref):
    def with_tile(tile_ref, other_ref):
        tile_ref[...] = x_ref[...]
        other_ref[...] = tile_ref[...] * 2
        return jnp.max(other_ref[...])

    largest = pl.run_scoped(
        with_tile,
        pl.MemorySpace.DEFAULT(X.shape, F32),
        plgpu.SMEM(X.shape, F32),
    )
    o_ref[...] = x_ref[...] + largest


COLUMN = np.arange(128)


@pytest.mark.parametrize("operations", [pltriton, plgpu.triton], ids=["jax", "ours"])
def test_masked_loads_and_stores(operations):
    def body(x_ref, o_ref):
        o_ref[...] = jnp.zeros_like(o_ref)
        for i in range(2):
            rows = pl.ds(32 * i, 32)
            column = lax.broadcasted_iota(jnp.int32, (32, 128), 1)
            x = operations.load(x_ref.at[rows, :], mask=column < 100, other=7.0)
            operations.store(o_ref.at[rows, :], x, mask=column >= 50)

    expected = np.where(COLUMN < 50, 0, np.where(COLUMN < 100, X, 7))
    check(body, expected, X)


def test_atomic_operations_and_index_arrays():
    def body(x_ref, o_ref):
        o_ref[...] = jnp.zeros_like(o_ref)
        rows = lax.iota(jnp.int32, x_ref.shape[0]) % 2
        pltriton.atomic_add(o_ref, rows, x_ref[...])
        pltriton.atomic_max(
            o_ref, (0, slice(0, 128)), 1e6 + x_ref[0], mask=x_ref[0] > 3
        )
        old = pltriton.atomic_xchg(o_ref, (7, slice(0, 128)), x_ref[1])
        o_ref[6] = old + 1

    shape = X.shape
    expected = np.zeros(shape, np.float32)
    np.add.at(expected, np.arange(shape[0]) % 2, X)
    expected[0] = np.where(X[0] > 3, np.maximum(expected[0], 1e6 + X[0]), expected[0])
    expected[7], expected[6] = X[1], 1
    check(body, expected, X)


STACK = X.reshape(2, 32, 128)


@everywhere.tests(
    check,
    STACK[:, 0:24] + STACK[:, 2:26],
    STACK,
    grid=(2, 3),
    out=jax.ShapeDtypeStruct((2, 24, 128), F32),
    in_specs=[
        pl.BlockSpec(
            (pl.Squeezed(), pl.Element(10), pl.Element(128)),
            lambda i, j: (i, 8 * j, 0),
        )
    ],
    out_specs=pl.BlockSpec((None, 8, 128), lambda i, j: (i, j, 0)),
)
def test_squeezed_and_element_dimensions(x_ref, o_ref):
    assert x_ref.shape == (10, 128)
    o_ref[...] = x_ref[0:8] + x_ref[2:10]


@everywhere.tests(check, X + (np.arange(64) < 32)[:, None], X)
def test_the_sum_of_a_references_part_and_a_value(x_ref, o_ref):
    o_ref[...] = x_ref[...]
    pl_ref = o_ref.at[0:32]
    pl_ref[...] += 1


@everywhere.tests(
    check,
    X + COLUMN,
    X,
    grid=(1,),
    in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
    scratch_shapes=[plgpu.SMEM(X.shape, F32), plgpu.Barrier()],
)
def test_operations_of_this_package_on_its_references_and_on_blocks(
    x_ref, o_ref, tile_ref, barrier_ref
):
    plgpu.copy_gmem_to_smem(x_ref, tile_ref, barrier_ref)
    plgpu.barrier_wait(barrier_ref)
    x = plgpu.layout_cast(tile_ref[...], plgpu.Layout.WGMMA)

    @plgpu.when(pl.program_id(0) == 0)
    def _():
        o_ref[...] = x + plgpu.broadcasted_iota(F32, x.shape, 1)


def test_wgmma_of_blocks_into_an_accumulator():
    def body(a_ref, b_ref, o_ref, acc_ref):
        plgpu.wgmma(acc_ref, a_ref, b_ref)
        o_ref[...] = acc_ref[...]

    a, b = X[:, :64].astype(jnp.bfloat16), X.astype(jnp.bfloat16)
    expected = np.float32(a) @ np.float32(b)
    check(body, expected, a, b, scratch_shapes=[plgpu.ACC((64, 128), F32)])


def test_printed_lines_and_arrays(capsys):
    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        pl.debug_print("program {} of {}", pl.program_id(0), 1)
        jax.debug.print("{what} {x:.1f}", what="first", x=x_ref[0, 0])
        pl.debug_print("{}", x_ref[...] > 0)

    call(body, X, grid=(1,))
    elements = [f"{list(i)}: {X[i] > 0}" for i in np.ndindex(X.shape)]
    expected = ["program 0 of 1", f"first {X[0, 0]:.1f}", *elements]
    assert capsys.readouterr().out.splitlines() == expected


@refused_by(call, X)
def test_a_reference_is_not_printed(x_ref, o_ref):
    o_ref[...] = x_ref[...]
    pl.debug_print("{}", x_ref)  # this line


def test_checks():
    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        pl.debug_check(jnp.all(x_ref[...] < 1e9), "large")
        pl.debug_check(jnp.all(x_ref[...] < -1e9), "not small")

    with pytest.raises(Exception, match="debug_check: not small"):
        call(body, X)


@pytest.mark.parametrize("wrong", ["values", "result"])
@refused_by(call, X)
def test_checks_whose_error_is_a_value_are_refused(x_ref, o_ref, *, wrong):
    x = x_ref[0, 0]
    if wrong == "values":
        checkify.debug_check(x > 0, "{}", x)  # this line
    else:
        checkify.check(x > 0, "small")
    o_ref[...] = x_ref[...]


MOSAIC_BLOCK = upstream.BlockSpec(
    X.shape,
    transforms=(upstream.TilingTransform((8, 32)), upstream.SwizzleTransform(128)),
)


@refused_by(call, X, in_specs=[MOSAIC_BLOCK])
def test_transforms_of_mosaic_gpu_are_refused(x_ref, o_ref):
    o_ref[...] = x_ref[...]


# --- mistakes -------------------------------------------------------------------------


def test_a_store_out_of_bounds_names_the_line():
    def body(x_ref, index_ref, o_ref):
        o_ref[index_ref[0]] = x_ref[0]  # this line

    with pytest.raises(Exception, match="OutOfBounds") as caught:
        call(body, X, np.array([64, 0, 0, 0], np.int32))
    assert "this line" in str(caught.value)


def test_a_race_of_two_programs_is_found():
    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...] + pl.program_id(0)

    with pytest.raises(Exception, match="RaceError"):
        call(body, X, grid=(2,), out_specs=pl.BlockSpec(memory_space=pl.ANY))


@refused_by(call, X, grid=(2,))
def test_a_block_that_several_programs_write_is_refused(x_ref, o_ref):
    o_ref[...] = x_ref[...]


@refused_by(call, X)
def test_an_operation_without_a_counterpart_is_refused_with_its_line(x_ref, o_ref):
    o_ref[...] = lax.rng_uniform(0.0, 1.0, x_ref.shape)  # this line


@refused_by(call, X)
def test_an_operation_of_jaxs_pallas_on_references_is_refused_with_its_line(
    x_ref, o_ref
):
    o_ref[...] = x_ref[...]
    pltpu.prng_seed(0)  # this line


ANY_SCRATCH = pl.MemoryRef(jax.core.ShapedArray((8,), F32), pl.ANY)


@refused_by(call, X, scratch_shapes=[ANY_SCRATCH])
def test_scratch_in_another_memory_is_refused(x_ref, o_ref, s_ref):
    o_ref[...] = x_ref[...]


@refused_by(call, X, scratch_shapes=[pltpu.SemaphoreType.DMA])
def test_a_semaphore_of_dma_is_refused(x_ref, o_ref, sem_ref):
    o_ref[...] = x_ref[...]


def test_buffers_of_one_block_are_refused():
    spec = pl.BlockSpec(X.shape, pipeline_mode=pl.Buffered(2))
    with pytest.raises(errors.UnsupportedError, match="pipeline_mode"):
        call(lambda x_ref, o_ref: o_ref.set(x_ref[...]), X, in_specs=[spec])


def test_any_with_a_block_gives_the_block_also_under_vmap():
    def body(x, o):
        o[...] = x[0, :] + 1

    row = pl.BlockSpec((None, 128), lambda i: (i, 0))
    here = pl.BlockSpec((1, 128), lambda i: (i, 0), memory_space=pl.ANY)
    x = np.arange(8 * 128, dtype=np.float32).reshape(8, 128)
    specs = {"grid": (8,), "in_specs": [here], "out_specs": row}
    f = functools.partial(call, body, out=x, **specs)
    np.testing.assert_array_equal(f(x), x + 1)
    both = np.stack([x, -x])
    np.testing.assert_array_equal(jax.vmap(f)(both), both + 1)


def test_vmap_of_whole_arrays_in_gmem():
    def body(x, o):
        i = pl.program_id(0)
        o[i] = x[(i + 1) % 4]

    whole = pl.BlockSpec(memory_space=pl.ANY)
    x = np.arange(64, dtype=np.float32).reshape(4, 4, 4)
    specs = {"grid": (4,), "in_specs": [whole], "out_specs": whole}
    f = functools.partial(call, body, out=x[0], **specs)
    np.testing.assert_array_equal(jax.vmap(f)(x), np.roll(x, -1, axis=1))


def test_semaphores_pauses_and_index_arrays():
    def body(x_ref, rows_ref, o_ref, sem_ref):
        pl.semaphore_signal(sem_ref)
        pl.semaphore_wait(sem_ref)
        pl.delay(10)
        o_ref[...] = x_ref[rows_ref[...], :]

    rows = np.arange(64, dtype=np.int32)[::-1].copy()
    whole = pl.BlockSpec(memory_space=pl.ANY)
    scratch = [upstream.SemaphoreType.REGULAR]
    check(body, X[rows], X, rows, in_specs=[whole, whole], scratch_shapes=scratch)
