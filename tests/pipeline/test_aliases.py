# SPDX-License-Identifier: Apache-2.0
"""pallas_call with input_output_aliases, and with jax.Ref arguments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support import everywhere
from tests.support.entry_kernels import f32, numbers
from tests.support.refusal import refused

ROWS = plgpu.BlockSpec((8, 128), lambda i: (i, 0))


def called(body, out=None, *, aliases=None, semantics="parallel", **options):
    """Returns what `everywhere.check` takes."""
    axes = {"grid": 4, "in_specs": [ROWS], "out_specs": ROWS} | options

    def make(interpret):
        return plgpu.pallas_call(  # HERE
            body, out or f32(),
            input_output_aliases={0: 0} if aliases is None else aliases,
            interpret=interpret,
            compiler_params=plgpu.CompilerParams(
                dimension_semantics=(semantics,), max_concurrent_steps=2
            ),
            **axes,
        )  # fmt: skip

    return make


def double(x, o):
    o[...] = x[...] * 2


def half_doubled(x):
    return np.concatenate([2 * x[:32], x[32:]])


@pytest.mark.parametrize("semantics", ["parallel", "arbitrary"])
def test_what_the_body_does_not_store_keeps_its_value(semantics):
    everywhere.check(
        called(double, semantics=semantics), [numbers()], half_doubled(numbers())
    )


def test_several_warpgroups_update_an_array_in_place():
    def body(x, o):
        half = plgpu.ds(jax.lax.axis_index("wg") * 4, 4)
        o[half] = x[half] * 2

    make = called(body, semantics="arbitrary", num_threads=2, thread_name="wg")
    everywhere.check(make, [numbers()], half_doubled(numbers()))


def test_the_argument_keeps_its_value_where_it_is_needed_later():
    call = called(double)(None)

    @jax.jit
    def f(x):
        y = x + 1
        return y, call(y), y * 3

    y, doubled, tripled = f(numbers())
    np.testing.assert_array_equal(y, numbers() + 1)
    np.testing.assert_array_equal(doubled, half_doubled(numbers() + 1))
    np.testing.assert_array_equal(tripled, (numbers() + 1) * 3)


def test_a_compiled_call_reuses_the_argument():
    exported = jax.export.export(jax.jit(called(double)(None)), platforms=["cuda"])
    text = exported(f32()).mlir_module()
    assert "output_operand_alias" in text and "operand_index = 0" in text


def test_arguments_are_counted_after_those_that_index_maps_read():
    order = np.array([3, 0, 2, 1], np.int32)
    spec = plgpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=(2,),
        in_specs=[
            plgpu.BlockSpec((8, 128), lambda i, order: (i, 0)),
            plgpu.BlockSpec((8, 128), lambda i, order: (order[i], 0)),
        ],
        out_specs=[
            plgpu.BlockSpec((8, 128), lambda i, order: (i, 0)),
            plgpu.BlockSpec((8, 128), lambda i, order: (order[i], 0)),
        ],
    )  # fmt: skip

    def body(order, x, y, o, p):
        o[...] = x[...]
        p[...] = x[...] + y[...]

    call = plgpu.pallas_call(
        body, [f32(16, 128), f32(32, 128)], grid_spec=spec, input_output_aliases={2: 1}
    )
    x, y = numbers(16, 128), numbers(32, 128)
    copied, added = call(order, x, y)
    expected = y.copy()
    expected[24:32] += x[:8]
    expected[:8] += x[8:]
    np.testing.assert_array_equal(copied, x)
    np.testing.assert_array_equal(added, expected)


@pytest.mark.parametrize("batched", [0, None])
def test_vmap_updates_an_array_for_each_instance(batched):
    def scale(x, s, o):
        o[...] = x[...] * s[0]

    whole = plgpu.BlockSpec((1,), lambda i: (0,))
    call = called(scale, in_specs=[ROWS, whole])(None)
    x = np.stack([numbers(), numbers() + 1])
    scales = np.array([[2.0], [3.0]], np.float32)
    got = jax.jit(jax.vmap(call, in_axes=(batched, 0)))(
        x if batched == 0 else x[0], scales
    )
    for k in range(2):
        a = x[k] if batched == 0 else x[0]
        expected = np.concatenate([a[:32] * scales[k], a[32:]])
        np.testing.assert_array_equal(got[k], expected)


def test_a_grid_without_positions_leaves_the_argument():
    call = called(double, grid=0)(None)
    np.testing.assert_array_equal(call(numbers()), numbers())


def shifted(by):
    return plgpu.BlockSpec((8, 128), lambda i: ((i + by) % 4, 0))


@pytest.mark.parametrize(
    ("by", "semantics"), [(1, "parallel"), (1, "arbitrary"), (3, "arbitrary")]
)
def test_a_block_that_another_cta_or_an_earlier_step_stores_is_not_read(by, semantics):
    """The copies of blocks run ahead of the steps."""
    call = called(double, in_specs=[shifted(by)], semantics=semantics)
    with pytest.raises(errors.RaceError):
        for seed in range(4):
            call(plgpu.InterpretParams(seed=seed))(numbers())


def test_a_jax_ref_is_an_argument_that_blocks_are_read_from():
    ref = jax.new_ref(jnp.asarray(numbers()))
    call = called(double, aliases={}, grid=8)(None)
    np.testing.assert_array_equal(call(ref), numbers() * 2)
    part = jax.jit(lambda x: call(x.at[:, :]))
    np.testing.assert_array_equal(part(ref), numbers() * 2)


def test_a_jax_ref_in_gmem_is_updated_in_place():
    def body(x):
        rows = plgpu.ds(plgpu.program_id(0) * 8, 8)
        x[rows] = x[rows] * 2

    whole = plgpu.BlockSpec(memory_space=plgpu.GMEM)
    call = plgpu.pallas_call(body, (), grid=8, in_specs=[whole])
    ref = jax.new_ref(jnp.asarray(numbers()))
    call(ref)
    np.testing.assert_array_equal(ref[...], numbers() * 2)


# --- refusals -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("aliases", "out"),
    [({1: 0}, f32()), ({0: 1}, f32()), ({-1: 0}, f32()), ({"x": 0}, f32()),
     ({0: 0}, f32(32, 128))],
    ids=["argument 1", "result 1", "argument -1", "a name", "another type"],
)  # fmt: skip
@refused
def test_aliases_name_arguments_and_results_of_one_type(aliases, out):
    call = called(double, out, aliases=aliases)(None)  # HERE
    call(numbers())  # HERE
