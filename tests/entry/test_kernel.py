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
from tests.support.old_refusal import old_refused

GRID = {"grid": (2,), "grid_names": ("i",)}


# --- declarations ---------------------------------------------------------------------


def test_num_threads_and_thread_name_belong_together():
    with old_refused(
        errors.ArgumentError,
        "num_threads and thread_name belong together",
        got="num_threads=2, thread_name=None",
    ):
        make(lambda x, o: None, num_threads=2)  # HERE


@pytest.mark.parametrize("n", [0, 9])
def test_num_threads_counts_warpgroups(n):
    with old_refused(
        errors.ArgumentError,
        "num_threads is out of range",
        expected="1 to 8 warpgroups",
        hint="not CUDA threads",
    ):
        make(lambda x, o: None, num_threads=n, thread_name="wg")  # HERE


@pytest.mark.parametrize("size", [-1, 1.5])
def test_a_grid_has_static_sizes(size):
    with old_refused(errors.ArgumentError, "grid needs static sizes", got=f"({size},)"):
        make(lambda x, o: None, grid=(size,), grid_names=("i",))  # HERE


def test_every_grid_axis_has_a_name():
    with old_refused(
        errors.ArgumentError,
        "grid and grid_names have different lengths",
        expected="2 axes",
        got="('i',)",
    ):
        make(lambda x, o: None, grid=(2, 2), grid_names=("i",))  # HERE


def test_axes_have_different_names():
    with old_refused(errors.ArgumentError, "two axes have the same name", got="['i', 'i']"):
        make(lambda x, o: None, **GRID, num_threads=2, thread_name="i")  # HERE


def test_the_older_spelling_is_not_given_besides_the_new_one():
    with old_refused(
        errors.ArgumentError, "kernel: out_type and out_shape are the same argument"
    ):
        plgpu.kernel(lambda x, o: None, out_type=f32(), out_shape=f32())  # HERE


def test_an_out_type_is_a_type():
    with old_refused(
        errors.ArgumentTypeError,
        "kernel <lambda>: out_type contains a leaf that is not a type",
        expected="jax.ShapeDtypeStruct",
        got="64",
    ):
        make(lambda x, o: None, out=(64, 128))  # HERE


@pytest.mark.parametrize("missing", [{}, {"out_type": None}])
def test_the_types_of_the_results_are_required(missing):
    with old_refused(
        errors.ArgumentTypeError,
        "kernel: out_type is missing",
        hint="pass out_type=jax.ShapeDtypeStruct(shape, dtype)",
    ):
        plgpu.kernel(lambda x, o: None, **missing)  # HERE


def test_interpret_has_three_values_and_parameters():
    with old_refused(errors.ArgumentTypeError, "invalid value of interpret", got="'yes'"):
        make(lambda x, o: None, interpret="yes")  # HERE


def test_scratch_is_declared():
    with old_refused(errors.ArgumentTypeError, "not a scratch declaration", got="3"):
        run(lambda x, o, s: None, scratch_types=[3])  # HERE


def test_scopes_allocate_no_arrays_in_registers():
    scratch = plgpu.REGS((8, 128), jnp.float32)
    with old_refused(
        errors.UnsupportedError,
        "scratch memory in REGS is not supported",
        expected="an array in GMEM, SMEM or TMEM, an accumulator or a barrier",
        got="REGS float32[8, 128]",
        hint="plgpu.ACC",
    ):
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


def test_a_body_returns_nothing():
    def body(x, o):  # HERE
        return x[...]

    with old_refused(
        errors.KernelError,
        "kernel body: the body returns a value",
        expected="None",
        hint="out_ref[...] = value",
    ):
        run(body)


def test_a_body_takes_the_references_it_gets():
    def body(x, o, tile):  # HERE
        pass

    with old_refused(
        errors.ArgumentTypeError,
        "kernel body: the body's signature does not match its references",
        expected="2 positional references",
        got="missing a required argument: 'tile'",
        hint="inputs, outputs, scratch",
    ):
        run(body)


def test_a_body_takes_named_scratch_by_name():
    def body(x, o):  # HERE
        pass

    with old_refused(
        errors.ArgumentTypeError,
        "kernel body: the body's signature does not match its references",
        expected="['tile'] by name",
        got="'tile'",
    ):
        run(body, scratch_types={"tile": TILE})


LARGE = (64, 128)
CLOSURE = "kernel body: the body uses an array from the enclosing function"


def test_a_body_does_not_close_over_a_large_array():
    array = jnp.ones(LARGE)

    def body(x, o):
        o[...] = x[...] + array  # HERE

    with old_refused(
        errors.ClosureError,
        CLOSURE,
        expected="arrays of at most 4096 elements",
        got="float32[64, 128]",
        hint="pass the array as an argument",
    ):
        run(body)


def test_a_body_does_not_close_over_a_large_traced_array():
    def body(x, o):
        o[...] = x[...] + outer  # HERE

    with old_refused(errors.ClosureError, CLOSURE):
        outer = None

        @jax.jit
        def f(x):
            nonlocal outer
            outer = x
            return make(body)(x)

        f(numbers())


@pytest.mark.parametrize("flow", ["cond", "while", "fori", "jit"])
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

    with old_refused(errors.ClosureError, CLOSURE):
        run(body)


@pytest.mark.parametrize("make_array", [jnp.ones, np.ones])
def test_a_large_closure_of_a_jitted_function_is_found(make_array):
    """JAX keeps it with the function: it is no const of the body."""
    array = make_array(LARGE, jnp.float32)

    def body(x, o):
        @jax.jit
        def shifted(value):
            return value + array  # HERE

        o[...] = shifted(x[...])

    with old_refused(errors.ClosureError, CLOSURE, got="float32[64, 128]"):
        run(body)


# --- operations -----------------------------------------------------------------------


def test_an_axis_index_names_an_axis_of_the_kernel():
    def body(x, o):
        o[lax.axis_index("j")] = x[0]  # HERE

    with old_refused(
        errors.AxisNameError,
        "the kernel has no axis named 'j'",
        expected="['i', 'wg']",
        hint="grid_names",
    ):
        run(body, **GRID, num_threads=2, thread_name="wg")


@pytest.mark.parametrize("collective", [lax.psum, lax.pmean, lax.pmax])
def test_a_collective_does_not_run_over_a_grid_axis(collective):
    def body(x, o):
        o[...] = collective(x[...], "i")  # HERE

    primitive = "pmax" if collective is lax.pmax else "psum"
    with old_refused(
        errors.UnsupportedError,
        f"lax.{primitive} over ('i',) inside a kernel",
        expected="['i'] only name positions",
        hint="reduce them after the call",
    ):
        run(body, **GRID)


@pytest.mark.parametrize(
    ("function", "primitive"),
    [
        (lambda v: lax.rng_uniform(0.0, 1.0, v.shape), "rng_uniform"),
        (lambda v: jnp.tile(lax.linalg.qr(v[:, :64])[0], 2), "qr"),
    ],
)
def test_an_operation_without_a_rule_is_refused_when_it_is_traced(function, primitive):
    def body(x, o):
        o[...] = function(x[...])

    with pytest.raises(errors.UnsupportedError) as info:
        run(body)
    assert info.value.what == f"the operation {primitive} is not supported in a kernel"


def test_the_refusal_of_an_operation_names_its_line_each_time():
    def first(x, o):
        o[:, :64] = jnp.linalg.qr(x[:, :64])[0]

    with pytest.raises(errors.UnsupportedError):
        run(first)

    def body(x, o):
        o[:, :64] = jnp.linalg.qr(x[:, :64])[0]  # HERE

    # JAX remembers how it traced it; the line has to be that of this call.
    with old_refused(
        errors.UnsupportedError,
        "the operation qr is not supported in a kernel",
        expected="docs/coverage.md",
        got="qr on float32[64,64]",
    ):
        run(body)


def test_a_call_of_the_host_is_refused():
    def body(x, o):
        jax.debug.callback(print, x[0, 0])  # HERE

    with old_refused(
        errors.UnsupportedError,
        "the operation debug_callback is not supported in a kernel",
    ):
        run(body)


def test_an_accuracy_is_not_chosen():
    def body(x, o):
        o[...] = lax.exp(x[...], accuracy=lax.AccuracyMode.HIGHEST)  # HERE

    with old_refused(
        errors.UnsupportedError,
        "exp: accuracy is not supported in a kernel",
        hint="approx_math",
    ):
        run(body)


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
