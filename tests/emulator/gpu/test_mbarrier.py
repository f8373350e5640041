# SPDX-License-Identifier: Apache-2.0
"""Barriers in the emulator: phases, counts, what is reported when they are wrong."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.refusal import refused, refused_by

F32 = jnp.float32


def barrier_kernel(body, barrier, *, num_threads=1, interpret=None, **scratch):
    """A kernel without inputs over one barrier and an output of four numbers."""
    threads = {}
    if num_threads > 1:
        threads = {"num_threads": num_threads, "thread_name": "wg"}
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((4,), F32),
        scratch_types={"barrier": barrier, **scratch},
        interpret=interpret,
        **threads,
    )


@refused_by(lambda body: barrier_kernel(body, plgpu.Barrier(num_arrivals=2))())
def test_a_wait_without_an_arrival_is_a_deadlock_that_names_the_barrier(o, barrier):
    plgpu.barrier_wait(barrier)


@refused
def test_a_deadlock_says_where_every_warpgroup_is():
    def body(o, barrier):
        @plgpu.when(lax.axis_index("wg") == 1)
        def _():
            plgpu.barrier_arrive(barrier)

        @plgpu.when(lax.axis_index("wg") == 0)
        def _():
            plgpu.barrier_wait(barrier)

    barrier_kernel(body, plgpu.Barrier(num_arrivals=2), num_threads=2)()


def test_a_completed_phase_nobody_waits_for_is_legal():
    def body(o, barrier):
        plgpu.barrier_arrive(barrier)
        o[...] = jnp.ones(4)

    np.testing.assert_array_equal(barrier_kernel(body, plgpu.Barrier())(), np.ones(4))


@refused_by(lambda body: barrier_kernel(body, plgpu.Barrier())())
def test_a_wait_two_phases_behind_is_an_error(o, barrier):
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


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

    def run(seed):
        return barrier_kernel(
            body,
            plgpu.Barrier(),
            waited=plgpu.Barrier(),
            num_threads=2,
            interpret=plgpu.InterpretParams(seed=seed),
        )()

    return run


@pytest.mark.parametrize("seed", range(8))
@refused
def test_a_wait_that_can_miss_its_phase_is_an_error_in_every_schedule(seed):
    unordered_phases(handshake=False)(seed=seed)


def test_the_wait_that_can_miss_its_phase_is_named():
    found = set()
    for seed in range(8):
        with pytest.raises(errors.BarrierError) as caught:
            unordered_phases(handshake=False)(seed=seed)
        found.add(caught.value.what.partition(": ")[2])
        if "can miss" in caught.value.what:
            assert "wait by warpgroup 1" in caught.value.got
            source = inspect.getsource(unordered_phases).splitlines()
            first = unordered_phases.__code__.co_firstlineno
            line = first + next(i for i, text in enumerate(source) if "HERE" in text)
            assert f"test_mbarrier.py:{line} " in caught.value.where
    assert found == {"a wait can miss its phase", "a wait missed its phase"}


@pytest.mark.parametrize("seed", range(4))
def test_a_phase_that_waits_for_the_waits_before_is_no_error(seed):
    np.testing.assert_array_equal(unordered_phases(handshake=True)(seed=seed), 1)


@refused_by(
    lambda body: plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((4,), F32),
        scratch_types=[plgpu.SMEM((4,), F32), plgpu.Barrier()],
        interpret=plgpu.InterpretParams(asynchrony="late"),
    )(jnp.ones(4))
)
def test_more_arrivals_than_declared_is_an_error(x, o, tile, barrier):
    plgpu.copy_gmem_to_smem(x, tile, barrier)
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def test_an_arrival_that_nobody_waits_for_is_legal_at_the_end():
    def body(o, barrier):
        plgpu.barrier_arrive(barrier)
        o[...] = jnp.ones(4)

    run = barrier_kernel(body, plgpu.Barrier(num_arrivals=2))
    np.testing.assert_array_equal(run(), np.ones(4))


@refused_by(
    lambda body: plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((4,), F32),
        scratch_types=[plgpu.SMEM((4,), F32)],
        interpret=plgpu.InterpretParams(asynchrony="late"),
    )(jnp.ones(4))
)
def test_a_barrier_may_not_end_while_a_copy_on_it_is_in_flight(x, o, tile):
    def scope(full):
        plgpu.copy_gmem_to_smem(x, tile, full.at[1])  # the line of the report

    plgpu.run_scoped(scope, plgpu.Barrier(num_barriers=2))


def test_a_false_predicate_skips_the_arrival():
    def body(o, barrier):
        plgpu.barrier_arrive(barrier, predicate=jnp.asarray(False))
        o[...] = jnp.zeros(o.shape)

    barrier_kernel(body, plgpu.Barrier(num_arrivals=2))()


@refused_by(lambda body: barrier_kernel(body, plgpu.Barrier(num_barriers=2))())
def test_an_index_outside_of_the_array_of_barriers_is_an_error(o, barrier):
    i = lax.fori_loop(0, 3, lambda _, i: i + 1, 0)
    plgpu.barrier_arrive(barrier.at[i])


@pytest.mark.parametrize("seed", range(4))
def test_a_barrier_carries_values_from_one_warpgroup_to_another(seed):
    def body(o, barrier, tile):
        @plgpu.when(lax.axis_index("wg") == 0)
        def _():
            tile[...] = jnp.full(4, 7.0)
            plgpu.barrier_arrive(barrier)

        @plgpu.when(lax.axis_index("wg") == 1)
        def _():
            plgpu.barrier_wait(barrier)
            o[...] = tile[...]

    run = barrier_kernel(
        body,
        plgpu.Barrier(),
        num_threads=2,
        tile=plgpu.SMEM((4,), F32),
        interpret=plgpu.InterpretParams(seed=seed, detect_races=True),
    )
    np.testing.assert_array_equal(run(), np.full(4, 7.0))


def _pipeline(body_of_consumer, *, steps=6, stages=2, release=True, **interpret):
    """One producer, one consumer, a ring of stages; returns the kernel."""

    def body(x, o, ring, full, empty):
        wg = lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def _():
            @plgpu.loop(0, steps)
            def _(i):
                slot = lax.rem(i, stages)
                if release:

                    @plgpu.when(i >= stages)
                    def _():
                        plgpu.barrier_wait(empty.at[slot])

                plgpu.copy_gmem_to_smem(x.at[i], ring.at[slot], full.at[slot])

        @plgpu.when(wg == 1)
        def _():
            @plgpu.loop(0, steps)
            def _(i):
                slot = lax.rem(i, stages)
                plgpu.barrier_wait(full.at[slot])
                body_of_consumer(i, ring.at[slot], o)
                if release:
                    plgpu.barrier_arrive(empty.at[slot])

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((steps, 32), F32),
        scratch_types=[
            plgpu.SMEM((stages, 32), F32),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
        ],
        num_threads=2,
        thread_name="wg",
        interpret=plgpu.InterpretParams(**interpret),
    )


@pytest.mark.parametrize("asynchrony", ["eager", "late", "random"])
@pytest.mark.parametrize("seed", range(3))
def test_a_pipeline_of_producer_and_consumer_is_exact(asynchrony, seed):
    def consume(i, stage, o):
        o[i] = stage[...] * 2

    x = jnp.arange(192, dtype=F32).reshape(6, 32)
    run = _pipeline(consume, seed=seed, asynchrony=asynchrony, detect_races=True)
    np.testing.assert_array_equal(run(x), x * 2)


def test_a_producer_that_does_not_wait_for_the_reader_is_found():
    def consume(i, stage, o):
        o[i] = stage[...] * 2

    x = jnp.arange(192, dtype=F32).reshape(6, 32)
    for seed in range(5):
        run = _pipeline(consume, release=False, seed=seed)
        with pytest.raises((errors.RaceError, errors.BarrierError)):
            run(x)


@refused_by(
    lambda body: barrier_kernel(
        body,
        plgpu.Barrier(),
        num_threads=2,
        tile=plgpu.SMEM((4,), F32),
        interpret=plgpu.InterpretParams(detect_races=True),
    )()
)
def test_threads_race_without_a_barrier(o, barrier, tile):
    @plgpu.when(lax.axis_index("wg") == 0)
    def _():
        tile[...] = jnp.full(4, 7.0)

    @plgpu.when(lax.axis_index("wg") == 1)
    def _():
        tile[...] = jnp.full(4, 8.0)
