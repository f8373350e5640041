# SPDX-License-Identifier: Apache-2.0
"""run_state and the scopes of accumulators: results, escapes, misuse."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.entry_kernels import TILE, numbers, run
from tests.support.refusal import refused, refused_by

ACC = plgpu.ACC((64, 128))


def test_a_state_is_returned_as_its_pytree():
    def body(x, o):
        def double(refs):
            refs["one"][...] = refs["one"][...] * 2

        start = {"one": plgpu.ACC.init(x[...]), "more": [plgpu.ACC((64, 8)), ACC]}
        end = plgpu.run_state(double)(start)
        assert end["more"][0].shape == (64, 8)
        o[...] = end["one"] + end["more"][1]

    np.testing.assert_array_equal(run(body), 2 * numbers())


def test_a_state_without_leaves_is_empty():
    def body(x, o):
        assert plgpu.run_state(lambda refs: None)(()) == ()
        o[...] = x[...]

    np.testing.assert_array_equal(run(body), numbers())


@refused_by(run)
def test_the_leaves_of_a_state_are_accumulators(x, o):
    plgpu.run_state(lambda ref: None)(x[...])  # HERE


@refused_by(run)
def test_a_state_is_in_registers(x, o):
    plgpu.run_state(lambda ref: None)(TILE)  # HERE


@pytest.mark.parametrize("result", [lambda ref: ref[...], lambda ref: ref])
@refused_by(run)
def test_a_function_over_a_state_returns_nothing(x, o, *, result):
    update = plgpu.run_state(lambda ref: result(ref))  # HERE
    update(ACC)


@refused_by(run)
def test_a_start_value_is_an_array(x, o):
    plgpu.run_state(lambda ref: None)(plgpu.ACC.init(x))  # HERE


@pytest.mark.parametrize("where", ["run_scoped", "scratch_types"])
@refused
def test_a_start_value_belongs_to_run_state(where):
    start = plgpu.ACC.init(jnp.zeros((64, 64)))

    def body(x, o, *scratch):
        plgpu.run_scoped(lambda acc: None, start)

    run(body, **({} if where == "run_scoped" else {"scratch_types": [start]}))


@refused
def test_a_state_is_part_of_a_kernel():
    plgpu.run_state(lambda ref: None)(ACC)  # HERE


# --- accumulators do not escape -------------------------------------------------------


@pytest.mark.parametrize("escape", [lambda acc: acc, lambda acc: {"a": [acc]}])
@refused_by(run)
def test_an_accumulator_does_not_leave_its_scope(x, o, *, escape):
    plgpu.run_scoped(lambda acc: escape(acc), ACC)  # HERE


def test_an_accumulator_kept_by_python_is_not_used_after_its_scope():
    def body(x, o):
        kept = []
        plgpu.run_scoped(lambda acc: kept.append(acc), ACC)
        o[...] = kept[0][...]

    # JAX itself knows a tracer that outlives its trace.
    with pytest.raises(Exception, match=r"(?i)scope|leak"):
        run(body)


def test_a_loop_does_not_carry_an_accumulator():
    def body(x, o):
        def scope(first, second):
            def step(_, acc):
                return second

            lax.fori_loop(0, 2, step, first)

        plgpu.run_scoped(scope, ACC, plgpu.ACC((64, 128)))

    with pytest.raises((errors.UnsupportedError, errors.KernelError)) as caught:
        run(body)
    assert "REGS float32[64, 128]" in str(caught.value.got)
    assert "test_run_state.py" in caught.value.where


@refused_by(run, grid=(1,), grid_names=("i",))
def test_a_branch_does_not_return_an_accumulator(x, o):
    def scope(acc):
        i = lax.axis_index("i")
        lax.cond(i == 0, lambda: acc, lambda: acc)  # HERE

    plgpu.run_scoped(scope, ACC)


# --- accumulators belong to one warpgroup ---------------------------------------------

THREADS = {"num_threads": 2, "thread_name": "wg"}
TOGETHER = "an accumulator is allocated by all warpgroups together"


@refused_by(run, **THREADS)
def test_an_accumulator_is_not_allocated_collectively(x, o):
    plgpu.run_scoped(lambda acc: None, ACC, collective_axes="wg")  # HERE


@refused
def test_the_scratch_of_several_warpgroups_holds_no_accumulator():
    run(lambda x, o, acc: None, scratch_types=[ACC], **THREADS)


@refused_by(run, **THREADS)
def test_one_warpgroup_of_several_does_not_allocate_memory_beside_it(x, o):
    plgpu.run_scoped(lambda acc, tile: None, ACC, TILE)  # HERE


def test_one_warpgroup_may_have_its_accumulator_in_the_scratch():
    def body(x, o, acc, *, tile):
        acc[...] = x[...]
        o[...] = acc[...]

    def positional(x, o, acc, tile):
        body(x, o, acc, tile=tile)

    np.testing.assert_array_equal(run(positional, scratch_types=[ACC, TILE]), numbers())
