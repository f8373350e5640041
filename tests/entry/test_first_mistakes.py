# SPDX-License-Identifier: Apache-2.0
"""Mistakes of a first kernel: a missing @, an output that nothing is stored to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.entry_kernels import numbers, run
from tests.support.old_refusal import old_refused

OUT = jax.ShapeDtypeStruct((64, 128), jnp.float32)
X = np.zeros((64, 128), np.float32)
INPUT = numbers()  # of `run`


@pytest.mark.parametrize("who", ["when", "loop", "nd_loop"])
def test_a_decorator_without_its_at_sign_is_refused(who):
    arguments = {"when": (True,), "loop": (0, 4), "nd_loop": ((4,),)}[who]
    options = {"collective_axes": ()} if who == "nd_loop" else {}

    def body(x, o):
        o[...] = x[...]
        getattr(plgpu, who)(*arguments, **options)  # HERE

        def _(*_):
            o[...] = x[...]

    with old_refused(
        errors.KernelError,
        f"{who} is called and decorates no function",
        expected=f"@plgpu.{who}(...)",
        hint="write the @",
    ):
        run(body)


def test_a_decorator_that_is_applied_later_is_one():
    def body(x, o):
        guard = plgpu.when(x[0, 0] == 0)
        guard(lambda: o.__setitem__(..., x[...] + 1))

    np.testing.assert_array_equal(run(body), INPUT + 1)


def test_an_output_block_that_nothing_stores_to_names_the_body():
    def body(x, o):
        o = 2 * x[...]  # noqa: F841

    call = plgpu.pallas_call(body, OUT)
    with pytest.raises(errors.UninitializedReadError) as info:
        call(X)
    assert "(o) is read where nothing has been written" in info.value.what
    assert "the body stores the block of a result: ref[...] = x" in info.value.hint


def test_the_same_tma_copy_to_a_whole_result_in_each_program_is_refused():
    def body(x, o, tile):
        tile[...] = x[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, o)  # HERE
        plgpu.wait_smem_to_gmem(0)

    scratch = [plgpu.SMEM((64, 128), jnp.float32)]
    call = plgpu.pallas_call(body, OUT, grid=(4,), scratch_shapes=scratch)
    what = "result 0 of pallas_call body: several CTAs write the same elements"
    with old_refused(errors.ArgumentError, what):
        call(X)


def test_a_loops_body_with_a_carry_needs_an_initial_one():
    def body(x, o):
        @plgpu.loop(0, 4)  # HERE
        def total(i, carry):
            return carry + x[i]

    with old_refused(
        errors.ArgumentTypeError,
        "loop: the body's signature does not match its arguments",
        expected="1 positional argument",
        hint="init_carry=x",
    ):
        run(body)


def test_a_scan_over_a_reference_is_refused():
    def body(x, o):
        total, _ = lax.scan(lambda c, row: (c + row, None), jnp.zeros(128), x)  # HERE
        o[0] = total

    with old_refused(
        errors.ArgumentTypeError,
        "scan over a value that has no leading axis",
        hint="lax.scan(f, init, x_ref[...])",
    ):
        run(body)


@pytest.mark.parametrize("use", ["index", "unpack"])
def test_the_info_of_a_loop_is_not_its_index(use):
    def body(x, o):
        @plgpu.nd_loop((64,), collective_axes=())
        def _(info):
            (i,) = info if use == "unpack" else (info[0],)  # HERE
            o[i] = x[i]

    with old_refused(
        errors.ArgumentTypeError,
        "the argument of a loop's body is indexed",
        hint="info.index[0]",
    ):
        run(body)


def test_a_value_before_its_index_is_refused():
    def body(x, o):
        plgpu.store(o, x[0], jnp.arange(128))  # HERE

    with old_refused(
        errors.ArgumentTypeError,
        "invalid index of a reference",
        hint="plgpu.store(ref, index, x)",
    ):
        run(body)


def double(x, o):
    o[...] = 2 * x[...]


@pytest.mark.parametrize("entry", [plgpu.kernel, plgpu.pallas_call])
def test_a_kernel_is_not_launched_by_brackets(entry):
    call = entry(double, OUT)
    with old_refused(
        errors.ArgumentTypeError,
        "double is indexed, but a kernel is called with arrays only",
        expected="double(x, ...), which returns the results",
        got="double[(4,)]",
        hint="grid=(...)",
    ):
        call[(4,)](X)  # HERE


def test_constants_are_not_arguments_of_the_call():
    call = plgpu.kernel(double, OUT)
    with old_refused(
        errors.ArgumentTypeError,
        "double is called with arguments by name",
        got="BLOCK=128",
        hint="functools.partial(body, BLOCK=128)",
    ):
        call(X, BLOCK=128)  # HERE


@pytest.mark.parametrize(
    ("named", "hint"),
    [
        ({"interpret": True}, "interpret=... is an argument of plgpu.kernel"),
        ({"num_warps": 4}, "pass num_threads=..."),
        ({"p": {"a": X}}, "a dict of arrays is one argument"),
    ],
)
def test_arguments_by_name_are_told_from_each_other(named, hint):
    with pytest.raises(errors.ArgumentTypeError) as info:
        plgpu.kernel(double, OUT)(X, **named)
    assert hint in info.value.hint and "partial" not in info.value.hint


def test_a_complex_argument_is_refused_at_the_line_of_the_call():
    call = plgpu.kernel(double, OUT)
    with old_refused(
        errors.ArgumentTypeError,
        "kernel double: an argument is not an array of bools, integers or floats",
        got="complex64",
        hint="jnp.real(z), jnp.imag(z)",
    ):
        call(X.astype(np.complex64))  # HERE


@pytest.mark.parametrize("given_as", ["out_type", "out_shape"])
def test_the_types_of_results_are_called_what_the_author_called_them(given_as):
    with old_refused(
        errors.ArgumentTypeError,
        f"kernel <lambda>: {given_as} contains a leaf that is not a type",
    ):
        plgpu.kernel(lambda x, o: None, **{given_as: 3})  # HERE


def test_a_pallas_call_speaks_of_its_out_shape():
    with old_refused(
        errors.ArgumentTypeError,
        "pallas_call <lambda>: out_shape contains a leaf that is not a type",
    ):
        plgpu.pallas_call(lambda x, o: None, 3)  # HERE


def adds_rows(x, o):
    o[...] = x[...] + jnp.sum(x[...], axis=1)


def adds_some_rows(x, o):
    o[...] = x[...] + x[:32]


def spreads(x, o):
    o[...] = jnp.broadcast_to(x[:32], x.shape)


def multiplies(x, o):
    o[...] = x[...] @ x[...]


@pytest.mark.parametrize(
    "body, what, got",
    [
        (adds_rows, "the shapes of an operation's operands do not match", "(64,)"),
        (adds_some_rows, "the shapes of an operation's operands do not match", "(32,"),
        (spreads, "the shapes of an operation's operands do not match", "[32,"),
        (multiplies, "a product of matrices whose inner dimensions differ", "(128,)"),
    ],
)
def test_shapes_that_do_not_match_are_refused(body, what, got):
    with pytest.raises(errors.ShapeError) as info:
        run(body)
    assert info.value.what == what
    assert got in info.value.got
    assert f"({body.__name__})" in info.value.where
    assert "shape of its block" in info.value.hint


def test_a_value_of_a_kernel_is_not_formatted():
    def body(x, o):
        o[...] = x[...]
        print(f"{x[0, 0]:.3f}")  # HERE

    with old_refused(
        errors.TracedValueError,
        "Python formats a value that is known only when the kernel runs",
        hint="plgpu.debug_print",
    ):
        run(body)


@pytest.mark.parametrize("view", [False, True])
def test_a_reference_is_not_a_pointer(view):
    def body(x, o):
        rows = jnp.arange(64)
        o[0] = plgpu.load((x.at[0] if view else x) + rows)  # HERE

    with old_refused(
        errors.ArgumentTypeError,
        "arithmetic on a reference",
        hint="plgpu.load(x_ref, offsets, mask=...)",
    ):
        run(body)


def test_a_result_is_not_passed_in_the_call():
    call = plgpu.pallas_call(double, OUT)
    with pytest.raises(errors.ArgumentTypeError) as info:
        call(X, X)
    assert "the call passes the inputs only" in info.value.hint


@pytest.mark.parametrize(
    "entry, name, hint",
    [
        (plgpu.pallas_call, "out_type", "did you mean out_shape?"),
        (plgpu.pallas_call, "scratch_types", "did you mean scratch_shapes?"),
        (plgpu.pallas_call, "grid_names", "plgpu.program_id(0)"),
        (plgpu.pallas_call, "num_warps", "warpgroups of 4 warps"),
        (plgpu.kernel, "num_stages", "max_concurrent_steps"),
        (plgpu.kernel, "in_specs", "plgpu.pallas_call"),
    ],
)
def test_arguments_of_other_functions_are_explained(entry, name, hint):
    with pytest.raises(errors.ArgumentTypeError) as info:
        entry(double, **{name: OUT})
    assert hint in info.value.hint
    assert "test_first_mistakes.py" in info.value.where


INTS = jax.ShapeDtypeStruct((64, 128), jnp.int32)


@pytest.mark.parametrize("view", [lambda ref: ref, lambda ref: ref.at[:32]])
def test_references_that_are_added_are_no_pointers(view):
    def body(x, o):
        o[...] = view(x) + view(x)

    with pytest.raises(errors.ArgumentTypeError) as info:
        plgpu.kernel(body, INTS)(jnp.ones((64, 128), jnp.int32))
    assert info.value.what == "arithmetic on a reference"
    assert "read it first" in info.value.hint and "pointer" not in info.value.hint


def test_a_store_without_an_index_is_explained():
    def body(x, o):
        plgpu.store(o, x[...])  # HERE

    with old_refused(
        errors.ArgumentTypeError,
        "store: the arguments do not fit the parameters",
        hint="plgpu.store(ref, index, x)",
    ):
        run(body)
