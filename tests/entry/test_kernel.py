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


def nothing(x, o, *scratch):  # HERE
    pass


def made(**options):
    return lambda: make(nothing, **options)


REGS = plgpu.REGS((8, 128), jnp.float32)
DECLARATIONS = {
    "num_threads without a name": made(num_threads=2),
    "0 warpgroups": made(num_threads=0, thread_name="wg"),
    "9 warpgroups": made(num_threads=9, thread_name="wg"),
    "a grid of size -1": made(grid=(-1,), grid_names=("i",)),
    "a grid of size 1.5": made(grid=(1.5,), grid_names=("i",)),
    "an axis without a name": made(grid=(2, 2), grid_names=("i",)),
    "two axes of one name": made(**GRID, num_threads=2, thread_name="i"),
    "an out_type that is a shape": made(out=(64, 128)),
    "a text for interpret": made(interpret="yes"),
    "out_type and out_shape": lambda: plgpu.kernel(  # HERE
        nothing, out_type=f32(), out_shape=f32()
    ),
    "no out_type": lambda: plgpu.kernel(nothing),  # HERE
    "None for out_type": lambda: plgpu.kernel(nothing, out_type=None),  # HERE
    "a number for scratch": lambda: run(nothing, scratch_types=[3]),  # HERE
    "scratch in registers": lambda: run(nothing, scratch_types=[REGS]),  # HERE
}


@pytest.mark.parametrize("declaration", DECLARATIONS.values(), ids=DECLARATIONS)
@refused
def test_a_declaration_that_means_nothing_is_refused(declaration):
    declaration()


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


@pytest.mark.parametrize("call", [lambda: list(doubles), lambda: doubles("text")])
def test_a_kernel_is_no_iterable_and_its_arguments_are_arrays(call):
    with pytest.raises(TypeError, match=r"not iterable|text"):
        call()


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


# --- bodies ---------------------------------------------------------------------------


BODIES = {
    "that returns a value": (lambda x, o: x[...], []),  # HERE
    "with a parameter too many": (lambda x, o, tile: None, []),  # HERE
    "without a parameter for named scratch": (lambda x, o: None, {"t": TILE}),  # HERE
}


@pytest.mark.parametrize(("body", "scratch"), BODIES.values(), ids=BODIES)
@refused
def test_a_body_that_does_not_fit_its_kernel_is_refused(body, scratch):
    run(body, scratch_types=scratch)


LARGE = (64, 128)


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


@refused_by(run, cluster=(2,), cluster_names=(("a", "b"),))
def test_an_axis_index_takes_a_tuple_as_several_axes(x, o):
    o[lax.axis_index(("a", "b"))] = x[0]  # HERE


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
def test_a_tolerance_below_every_error_is_refused(x, o):
    o[...] = lax.exp(x[...], accuracy=lax.Tolerance(ulps=1))  # HERE


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@refused
def test_arguments_by_name_are_refused(jitted):
    @plgpu.kernel(out_type=f32(8))
    def scaled(x, factor, o):
        o[...] = x[...] * factor[...]

    call, x = jax.jit(scaled) if jitted else scaled, numbers(8)
    np.testing.assert_array_equal(call(x, 2.0), 2 * x)
    call(x, factor=2.0)  # HERE
