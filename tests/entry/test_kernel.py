# SPDX-License-Identifier: Apache-2.0
"""What `kernel` refuses: declarations, launch shapes, bodies."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.entry_kernels import TILE, f32, make, numbers, run
from tests.support.refusal import refused, refused_by

GRID = {"grid": (2,), "grid_names": ("i",)}


# --- declarations ---------------------------------------------------------------------


@refused
def test_num_threads_and_thread_name_belong_together():
    make(lambda x, o: None, num_threads=2)  # HERE


@pytest.mark.parametrize("n", [0, 9])
@refused
def test_num_threads_counts_warpgroups(n):
    make(lambda x, o: None, num_threads=n, thread_name="wg")  # HERE


@pytest.mark.parametrize("size", [-1, 1.5])
@refused
def test_a_grid_has_static_sizes(size):
    make(lambda x, o: None, grid=(size,), grid_names=("i",))  # HERE


@refused
def test_every_grid_axis_has_a_name():
    make(lambda x, o: None, grid=(2, 2), grid_names=("i",))  # HERE


@refused
def test_axes_have_different_names():
    make(lambda x, o: None, **GRID, num_threads=2, thread_name="i")  # HERE


@refused
def test_the_older_spelling_is_not_given_besides_the_new_one():
    plgpu.kernel(lambda x, o: None, out_type=f32(), out_shape=f32())  # HERE


@refused
def test_an_out_type_is_a_type():
    make(lambda x, o: None, out=(64, 128))  # HERE


@pytest.mark.parametrize("missing", [{}, {"out_type": None}])
@refused
def test_the_types_of_the_results_are_required(missing):
    plgpu.kernel(lambda x, o: None, **missing)  # HERE


@refused
def test_interpret_has_three_values_and_parameters():
    make(lambda x, o: None, interpret="yes")  # HERE


@refused
def test_scratch_is_declared():
    run(lambda x, o, s: None, scratch_types=[3])  # HERE


@refused
def test_scopes_allocate_no_arrays_in_registers():
    scratch = plgpu.REGS((8, 128), jnp.float32)
    run(lambda x, o, s: None, scratch_types=[scratch])  # HERE


def test_a_kernel_has_the_name_of_its_body_and_a_signature_of_its_own():
    def body(x, o):
        """Adds nothing."""

    k = make(body)
    assert (k.__name__, k.__doc__) == ("body", "Adds nothing.")
    assert str(inspect.signature(k)).startswith("(*args")


@plgpu.kernel(out_type=f32(4))
def doubles(x, o):
    o[...] = 2 * x[...]


def test_a_kernel_is_copied_and_pickled_as_a_function_is():
    assert pickle.loads(pickle.dumps(doubles)) is doubles
    assert copy.deepcopy(doubles) is doubles and copy.copy(doubles) is doubles


def test_a_kernel_is_no_iterable():
    with pytest.raises(TypeError, match="not iterable"):
        list(doubles)


class _Adds:
    def __call__(self, x, o):
        o[...] = x[...]


@pytest.mark.parametrize(
    ("body", "name"),
    [(functools.partial(lambda x, o: None), "<lambda>"), (_Adds(), "_Adds")],
)
def test_a_body_without_a_name_has_that_of_its_function_or_class(body, name):
    k = make(body)
    assert k.__name__ == name
    assert f"<kernel {name}" in repr(k)


def test_arguments_are_arrays():
    with pytest.raises(TypeError):
        make(lambda x, o: None)("text")


# --- bodies ---------------------------------------------------------------------------


@refused
def test_a_body_returns_nothing():
    def body(x, o):  # HERE
        return x[...]

    run(body)


@refused
def test_a_body_takes_the_references_it_gets():
    def body(x, o, tile):  # HERE
        pass

    run(body)


@refused
def test_a_body_takes_named_scratch_by_name():
    def body(x, o):  # HERE
        pass

    run(body, scratch_types={"tile": TILE})


LARGE = (64, 128)
CLOSURE = "kernel body: the body uses an array from the enclosing function"


@refused
def test_a_body_does_not_close_over_a_large_array():
    array = jnp.ones(LARGE)

    def body(x, o):
        o[...] = x[...] + array  # HERE

    run(body)


@refused
def test_a_body_does_not_close_over_a_large_traced_array():
    def body(x, o):
        o[...] = x[...] + outer  # HERE

    outer = None

    @jax.jit
    def f(x):
        nonlocal outer
        outer = x
        return make(body)(x)

    f(numbers())


@pytest.mark.parametrize("flow", ["cond", "while", "fori", "jit"])
@refused
def test_a_large_closure_is_found_inside_of_control_flow(flow):
    array = jnp.ones(LARGE)

    def body(x, o):
        def step(i):
            o[...] = x[...] + array  # HERE
            return i + 1

        if flow == "cond":
            lax.cond(x[0, 1] > 0, lambda: step(0), lambda: 0)
        elif flow == "while":
            lax.while_loop(lambda i: i < 3, step, 0)
        elif flow == "fori":
            lax.fori_loop(0, 3, lambda _, i: step(i), 0)
        else:
            jax.jit(step)(0)

    run(body)


@pytest.mark.parametrize("make_array", [jnp.ones, np.ones])
@refused
def test_a_large_closure_of_a_jitted_function_is_found(make_array):
    """JAX keeps it with the function: it is no const of the body."""
    array = make_array(LARGE, jnp.float32)

    def body(x, o):
        @jax.jit
        def shifted(value):
            return value + array  # HERE

        o[...] = shifted(x[...])

    run(body)


# --- operations -----------------------------------------------------------------------


@refused_by(run, **GRID, num_threads=2, thread_name="wg")
def test_an_axis_index_names_an_axis_of_the_kernel(x, o):
    o[lax.axis_index("j")] = x[0]  # HERE


@pytest.mark.parametrize("collective", [lax.psum, lax.pmean, lax.pmax])
@refused_by(run, **GRID)
def test_a_collective_does_not_run_over_a_grid_axis(x, o, *, collective):
    o[...] = collective(x[...], "i")  # HERE


@pytest.mark.parametrize(
    "function",
    [
        lambda v: lax.rng_uniform(0.0, 1.0, v.shape),
        lambda v: jnp.tile(lax.linalg.qr(v[:, :64])[0], 2),
    ],
)
@refused_by(run)
def test_an_operation_without_a_rule_is_refused_when_it_is_traced(x, o, *, function):
    o[...] = function(x[...])


@refused
def test_the_refusal_of_an_operation_names_its_line_each_time():
    def first(x, o):
        o[:, :64] = jnp.linalg.qr(x[:, :64])[0]

    with pytest.raises(errors.UnsupportedError):
        run(first)

    def body(x, o):
        o[:, :64] = jnp.linalg.qr(x[:, :64])[0]  # HERE

    # JAX remembers how it traced it; the line has to be that of this call.
    run(body)


@refused_by(run)
def test_a_call_of_the_host_is_refused(x, o):
    jax.debug.callback(print, x[0, 0])  # HERE


@refused_by(run)
def test_an_accuracy_is_not_chosen(x, o):
    o[...] = lax.exp(x[...], accuracy=lax.AccuracyMode.HIGHEST)  # HERE


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_arguments_by_name_are_refused(jitted):
    @plgpu.kernel(out_type=jax.ShapeDtypeStruct((8,), jnp.float32))
    def scaled(x, factor, o):
        o[...] = x[...] * factor[...]

    call = jax.jit(scaled) if jitted else scaled
    x = jnp.arange(8.0)
    with pytest.raises(errors.ArgumentTypeError, match="arguments by name") as info:
        call(x, factor=2.0)
    assert "factor=" in info.value.got
    assert "by position" in info.value.hint
    assert "test_kernel.py" in info.value.where
    np.testing.assert_array_equal(call(x, 2.0), 2 * x)
