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
from tests.support.refusal import refused, refused_by

OUT = jax.ShapeDtypeStruct((64, 128), jnp.float32)
X = np.zeros((64, 128), np.float32)
INPUT = numbers()  # of `run`


@pytest.mark.parametrize("who", ["when", "loop", "nd_loop"])
@refused
def test_a_decorator_without_its_at_sign_is_refused(who):
    arguments = {"when": (True,), "loop": (0, 4), "nd_loop": ((4,),)}[who]
    options = {"collective_axes": ()} if who == "nd_loop" else {}

    def body(x, o):
        o[...] = x[...]
        getattr(plgpu, who)(*arguments, **options)  # HERE

        def _(*_):
            o[...] = x[...]

    run(body)


def test_a_decorator_that_is_applied_later_is_one():
    def body(x, o):
        guard = plgpu.when(x[0, 0] == 0)
        guard(lambda: o.__setitem__(..., x[...] + 1))

    np.testing.assert_array_equal(run(body), INPUT + 1)


@refused_by(lambda body: plgpu.pallas_call(body, OUT)(X))
def test_an_output_block_that_nothing_stores_to_names_the_body(x, o):
    o = 2 * x[...]  # noqa: F841


@refused
def test_the_same_tma_copy_to_a_whole_result_in_each_program_is_refused():
    def body(x, o, tile):
        tile[...] = x[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, o)  # HERE
        plgpu.wait_smem_to_gmem(0)

    scratch = [plgpu.SMEM((64, 128), jnp.float32)]
    call = plgpu.pallas_call(body, OUT, grid=(4,), scratch_shapes=scratch)
    call(X)


@refused_by(run)
def test_a_loops_body_with_a_carry_needs_an_initial_one(x, o):
    @plgpu.loop(0, 4)  # HERE
    def total(i, carry):
        return carry + x[i]


@refused_by(run)
def test_a_scan_over_a_reference_is_refused(x, o):
    total, _ = lax.scan(lambda c, row: (c + row, None), jnp.zeros(128), x)  # HERE
    o[0] = total


@pytest.mark.parametrize("use", ["index", "unpack"])
@refused_by(run)
def test_the_info_of_a_loop_is_not_its_index(x, o, *, use):
    @plgpu.nd_loop((64,), collective_axes=())
    def _(info):
        (i,) = info if use == "unpack" else (info[0],)  # HERE
        o[i] = x[i]


@refused_by(run)
def test_a_value_before_its_index_is_refused(x, o):
    plgpu.store(o, x[0], jnp.arange(128))  # HERE


def double(x, o):
    o[...] = 2 * x[...]


@pytest.mark.parametrize("entry", [plgpu.kernel, plgpu.pallas_call])
@refused
def test_a_kernel_is_not_launched_by_brackets(entry):
    call = entry(double, OUT)
    call[(4,)](X)  # HERE


@refused
def test_constants_are_not_arguments_of_the_call():
    call = plgpu.kernel(double, OUT)
    call(X, BLOCK=128)  # HERE


@pytest.mark.parametrize(
    "named", [{"interpret": True}, {"num_warps": 4}, {"p": {"a": X}}]
)
@refused
def test_arguments_by_name_are_told_from_each_other(named):
    plgpu.kernel(double, OUT)(X, **named)


@refused
def test_a_complex_argument_is_refused_at_the_line_of_the_call():
    call = plgpu.kernel(double, OUT)
    call(X.astype(np.complex64))  # HERE


@pytest.mark.parametrize("given_as", ["out_type", "out_shape"])
@refused
def test_the_types_of_results_are_called_what_the_author_called_them(given_as):
    plgpu.kernel(lambda x, o: None, **{given_as: 3})  # HERE


@refused
def test_a_pallas_call_speaks_of_its_out_shape():
    plgpu.pallas_call(lambda x, o: None, 3)  # HERE


def adds_rows(x, o):
    o[...] = x[...] + jnp.sum(x[...], axis=1)


def adds_some_rows(x, o):
    o[...] = x[...] + x[:32]


def spreads(x, o):
    o[...] = jnp.broadcast_to(x[:32], x.shape)


def multiplies(x, o):
    o[...] = x[...] @ x[...]


@pytest.mark.parametrize("body", [adds_rows, adds_some_rows, spreads, multiplies])
@refused
def test_shapes_that_do_not_match_are_refused(body):
    run(body)


@refused_by(run)
def test_a_value_of_a_kernel_is_not_formatted(x, o):
    o[...] = x[...]
    print(f"{x[0, 0]:.3f}")  # HERE


@pytest.mark.parametrize("view", [False, True])
@refused_by(run)
def test_a_reference_is_not_a_pointer(x, o, *, view):
    rows = jnp.arange(64)
    o[0] = plgpu.load((x.at[0] if view else x) + rows)  # HERE


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
@refused_by(lambda body: plgpu.kernel(body, INTS)(jnp.ones((64, 128), jnp.int32)))
def test_references_that_are_added_are_no_pointers(x, o, *, view):
    o[...] = view(x) + view(x)


@refused_by(run)
def test_a_store_without_an_index_is_explained(x, o):
    plgpu.store(o, x[...])  # HERE
