# SPDX-License-Identifier: Apache-2.0
"""run_state and the scopes of accumulators: results, escapes, misuse."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
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


def state(start, result=lambda ref: None):
    return lambda x, o: plgpu.run_state(result)(start(x))  # HERE


def scope(use, *scratch, **options):
    return lambda x, o: plgpu.run_scoped(use, *scratch, **options)  # HERE


def branch(acc):
    lax.cond(lax.axis_index("wg") == 0, lambda: acc, lambda: acc)  # HERE


THREADS = {"num_threads": 2, "thread_name": "wg"}
ONE = {"num_threads": 1, "thread_name": "wg"}
MISTAKES = {
    "a state of values": (state(lambda x: x[...]), ONE),
    "a state in SMEM": (state(lambda x: TILE), ONE),
    "a start value that is a reference": (state(plgpu.ACC.init), ONE),
    "a function that returns a value": (
        state(lambda x: ACC, lambda ref: ref[...]), ONE  # HERE
    ),
    "a function that returns its state": (
        state(lambda x: ACC, lambda ref: ref), ONE  # HERE
    ),
    "a scope that returns its accumulator": (scope(lambda acc: acc, ACC), ONE),
    "a scope that returns it in a pytree": (scope(lambda acc: {"a": [acc]}, ACC), ONE),
    "a branch that returns an accumulator": (scope(branch, ACC), ONE),
    "a collective accumulator": (
        scope(lambda acc: None, ACC, collective_axes="wg"), THREADS
    ),
    "memory beside that of one warpgroup": (
        scope(lambda acc, tile: None, ACC, TILE), THREADS
    ),
    "scratch of several warpgroups": (
        lambda x, o, acc: None, {**THREADS, "scratch_types": [ACC]}  # HERE
    ),
}  # fmt: skip


@pytest.mark.parametrize(("body", "options"), MISTAKES.values(), ids=MISTAKES)
@refused
def test_accumulators_are_those_of_a_warpgroup_and_stay_in_their_scope(body, options):
    run(body, **options)


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


def test_an_accumulator_kept_by_python_is_not_used_after_its_scope():
    def body(x, o):
        kept = []
        plgpu.run_scoped(lambda acc: kept.append(acc), ACC)
        o[...] = kept[0][...]

    # JAX itself knows a tracer that outlives its trace.
    with pytest.raises(Exception, match=r"(?i)scope|leak"):
        run(body)


@refused_by(run)
def test_a_loop_does_not_carry_an_accumulator(x, o):
    def scope(first, second):
        lax.fori_loop(0, 2, lambda _, acc: second, first)

    plgpu.run_scoped(scope, ACC, plgpu.ACC((64, 128)))


def test_one_warpgroup_may_have_its_accumulator_in_the_scratch():
    def body(x, o, acc, *, tile):
        acc[...] = x[...]
        o[...] = acc[...]

    def positional(x, o, acc, tile):
        body(x, o, acc, tile=tile)

    np.testing.assert_array_equal(run(positional, scratch_types=[ACC, TILE]), numbers())
