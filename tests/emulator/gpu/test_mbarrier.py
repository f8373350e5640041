# SPDX-License-Identifier: Apache-2.0
"""Barriers in the emulator: phases, counts, what is reported when they are wrong.

Rings of slots are in tests/support/mutations/specialised.py.
"""

from __future__ import annotations

import inspect

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support import everywhere
from tests.support.entry_kernels import f32
from tests.support.refusal import refused_by

F32 = jnp.float32


BARRIER, TWO_ARRIVALS = plgpu.Barrier(), plgpu.Barrier(num_arrivals=2)
TWO_BARRIERS = plgpu.Barrier(num_barriers=2)
TILE = plgpu.SMEM((4,), F32)
ONES = np.ones(4, np.float32)


def run(body, *scratch, args=(), **options):
    """Runs a kernel whose result is four numbers."""
    return everywhere.emulate(body, args, f32(4), *scratch, **options)


@refused_by(run, TWO_ARRIVALS)
def test_a_wait_without_an_arrival_is_a_deadlock_that_names_the_barrier(o, barrier):
    plgpu.barrier_wait(barrier)  # HERE


@refused_by(run, TWO_ARRIVALS, threads={"wg": 2})
def test_a_deadlock_says_where_every_warpgroup_is(o, barrier):
    wg = lax.axis_index("wg")
    plgpu.when(wg == 1)(lambda: plgpu.barrier_arrive(barrier))
    plgpu.when(wg == 0)(lambda: plgpu.barrier_wait(barrier))  # HERE


@refused_by(run, BARRIER)
def test_a_wait_two_phases_behind_is_an_error(o, barrier):
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)  # HERE


def unordered_phases(handshake):
    """Two phases of a barrier that warpgroup 1 waits for; the second one waits for
    warpgroup 1 by another barrier, or not at all."""

    def body(o, barrier, waited):
        @plgpu.when(lax.axis_index("wg") == 0)
        def _():
            plgpu.barrier_arrive(barrier)
            if handshake:
                plgpu.barrier_wait(waited)
            plgpu.barrier_arrive(barrier)

        @plgpu.when(lax.axis_index("wg") == 1)
        def _():
            plgpu.barrier_wait(barrier)  # HERE
            if handshake:
                plgpu.barrier_arrive(waited)
            plgpu.barrier_wait(barrier)
            o[...] = jnp.ones(4)

    return lambda seed: run(body, BARRIER, BARRIER, threads={"wg": 2}, seed=seed)


def test_the_wait_that_can_miss_its_phase_is_named():
    found = set()
    for seed in range(8):
        with pytest.raises(errors.BarrierError) as caught:
            unordered_phases(handshake=False)(seed=seed)
        found.add(caught.value.what.partition(": ")[2])
        if "can miss" in caught.value.what:
            assert "wait by warpgroup 1" in caught.value.got
            assert "latest arrival at " in caught.value.got
            source = inspect.getsource(unordered_phases).splitlines()
            first = unordered_phases.__code__.co_firstlineno
            line = first + next(i for i, text in enumerate(source) if "HERE" in text)
            assert f"test_mbarrier.py:{line} " in caught.value.where
    assert found == {"a wait can miss its phase", "a wait missed its phase"}


@pytest.mark.parametrize("seed", range(4))
def test_a_phase_that_waits_for_the_waits_before_is_no_error(seed):
    np.testing.assert_array_equal(unordered_phases(handshake=True)(seed=seed), 1)


@refused_by(run, TILE, BARRIER, args=[ONES], asynchrony="late")
def test_more_arrivals_than_declared_is_an_error(x, o, tile, barrier):
    plgpu.copy_gmem_to_smem(x, tile, barrier)
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def test_an_arrival_that_nobody_waits_for_is_legal_at_the_end():
    def body(o, barrier):
        plgpu.barrier_arrive(barrier)
        o[...] = jnp.ones(4)

    np.testing.assert_array_equal(run(body, TWO_ARRIVALS), ONES)


@refused_by(run, TILE, args=[ONES], asynchrony="late")
def test_a_barrier_may_not_end_while_a_copy_on_it_is_in_flight(x, o, tile):
    def scope(full):
        plgpu.copy_gmem_to_smem(x, tile, full.at[1])

    plgpu.run_scoped(scope, TWO_BARRIERS)


@refused_by(run, TWO_BARRIERS)
def test_an_index_outside_of_the_array_of_barriers_is_an_error(o, barrier):
    i = lax.fori_loop(0, 3, lambda _, i: i + 1, 0)
    plgpu.barrier_arrive(barrier.at[i])  # HERE
