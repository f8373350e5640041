# SPDX-License-Identifier: Apache-2.0
"""Barriers in the emulator: phases, counts, what is reported when they are wrong."""

from __future__ import annotations

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.rings import DOUBLED, SLOTS, STEPS, X, ring

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


def test_a_wait_without_an_arrival_is_a_deadlock_that_names_the_barrier():
    def body(o, barrier):
        plgpu.barrier_wait(barrier)

    with pytest.raises(errors.DeadlockError) as caught:
        barrier_kernel(body, plgpu.Barrier(num_arrivals=2))()
    text = str(caught.value)
    assert "warpgroup 0" in text
    assert "waits for phase 0 of barrier barrier at" in text
    assert "0 of 2 arrivals, 0 bytes of copies pending" in text
    assert "test_mbarrier.py" in text


def test_a_deadlock_says_where_every_warpgroup_is():
    def body(o, barrier):
        @plgpu.when(lax.axis_index("wg") == 1)
        def _():
            plgpu.barrier_arrive(barrier)

        @plgpu.when(lax.axis_index("wg") == 0)
        def _():
            plgpu.barrier_wait(barrier)

    with pytest.raises(errors.DeadlockError) as caught:
        barrier_kernel(body, plgpu.Barrier(num_arrivals=2), num_threads=2)()
    text = str(caught.value)
    assert "1 of 2 arrivals" in text
    assert "warpgroup 1 of the only CTA: has ended" in text


def test_a_wait_two_phases_behind_is_an_error():
    def body(o, barrier):
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)

    with pytest.raises(errors.BarrierError, match="missed its phase") as caught:
        barrier_kernel(body, plgpu.Barrier())()
    assert "2 phases are complete" in str(caught.value)


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
def test_a_wait_that_can_miss_its_phase_is_an_error_in_every_schedule(seed):
    with pytest.raises(
        errors.BarrierError, match=r"a wait (can miss|missed) its phase"
    ):
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


def test_more_arrivals_than_declared_is_an_error():
    def body(x, o, tile, barrier):
        plgpu.copy_gmem_to_smem(x, tile, barrier)
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)

    run = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((4,), F32),
        scratch_types=[plgpu.SMEM((4,), F32), plgpu.Barrier()],
        interpret=plgpu.InterpretParams(asynchrony="late"),
    )
    with pytest.raises(errors.BarrierError, match="more arrivals than") as caught:
        run(jnp.ones(4))
    assert "16 bytes" in str(caught.value)


def test_an_arrival_that_nobody_waits_for_is_legal_at_the_end():
    def body(o, barrier):
        plgpu.barrier_arrive(barrier)
        o[...] = jnp.ones(4)

    run = barrier_kernel(body, plgpu.Barrier(num_arrivals=2))
    np.testing.assert_array_equal(run(), np.ones(4))


def test_a_barrier_may_not_end_while_a_copy_on_it_is_in_flight():
    def body(x, o, tile):
        def scope(full):
            plgpu.copy_gmem_to_smem(x, tile, full.at[1])  # the line of the report

        plgpu.run_scoped(scope, plgpu.Barrier(num_barriers=2))

    run = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((4,), F32),
        scratch_types=[plgpu.SMEM((4,), F32)],
        interpret=plgpu.InterpretParams(asynchrony="late"),
    )
    with pytest.raises(errors.BarrierError, match="in the middle of a phase") as caught:
        run(jnp.ones(4))
    text = str(caught.value)
    assert "barrier full[1] ends" in text
    assert "16 bytes pending in phase 0, and 1 of 1 arrivals" in text
    assert re.search(r"at: +\S*test_mbarrier.py:\d+ \(.*\.scope\)", text)


def test_an_index_outside_of_the_array_of_barriers_is_an_error():
    def body(o, barrier):
        i = lax.fori_loop(0, 3, lambda _, i: i + 1, 0)
        plgpu.barrier_arrive(barrier.at[i])

    with pytest.raises(errors.OutOfBoundsError, match="barrier"):
        barrier_kernel(body, plgpu.Barrier(num_barriers=2))()


def run_ring(first, **options):
    params = plgpu.InterpretParams(**options)
    return ring(first=first, initially_complete=False)(params)(X)


@pytest.mark.parametrize("asynchrony", ["eager", "late", "random"])
@pytest.mark.parametrize("seed", range(3))
def test_a_pipeline_of_producer_and_consumer_is_exact(asynchrony, seed):
    got = run_ring(SLOTS, seed=seed, asynchrony=asynchrony)
    np.testing.assert_array_equal(got, DOUBLED)


def test_a_producer_that_does_not_wait_for_the_reader_is_found():
    for seed in range(5):
        with pytest.raises((errors.RaceError, errors.BarrierError)):
            run_ring(STEPS, seed=seed)


def test_threads_race_without_a_barrier():
    def body(o, barrier, tile):
        @plgpu.when(lax.axis_index("wg") == 0)
        def _():
            tile[...] = jnp.full(4, 7.0)

        @plgpu.when(lax.axis_index("wg") == 1)
        def _():
            tile[...] = jnp.full(4, 8.0)

    run = barrier_kernel(
        body,
        plgpu.Barrier(),
        num_threads=2,
        tile=plgpu.SMEM((4,), F32),
        interpret=plgpu.InterpretParams(detect_races=True),
    )
    with pytest.raises(errors.RaceError, match="without an order between") as caught:
        run()
    assert "warpgroup 0" in str(caught.value) and "warpgroup 1" in str(caught.value)
