# SPDX-License-Identifier: Apache-2.0
"""barrier_test, everywhere: a wait that may fail."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support import everywhere
from tests.support.rings import DOUBLED, STEPS, X, ring
from tests.support.semantics import BOTH, under

ROWS = jax.ShapeDtypeStruct((STEPS, 128), jnp.float32)
SCHEDULES = [
    plgpu.InterpretParams(seed=seed, asynchrony=asynchrony)
    for asynchrony in ("eager", "late", "random")
    for seed in range(3)
]


def until(barrier):
    """Tests a barrier until its phase is complete."""
    lax.while_loop(lambda done: ~done, lambda _: plgpu.barrier_test(barrier), False)


def copies(poll=until):
    """A kernel that polls for each of its copies."""

    def body(x, o, row, barrier):
        @plgpu.loop(0, STEPS)
        def _(i):
            plgpu.copy_gmem_to_smem(x.at[i], row, barrier)
            poll(barrier)
            o[i] = row[...] * 2

    return everywhere.kernel(
        body, ROWS, plgpu.SMEM((128,), jnp.float32), plgpu.Barrier()
    )


def test_a_loop_of_tests_waits_for_a_copy():
    everywhere.check(copies(), [X], DOUBLED)


@pytest.mark.parametrize("interpret", SCHEDULES)
def test_it_does_in_every_schedule(interpret):
    np.testing.assert_array_equal(copies()(interpret)(X), DOUBLED)


def test_a_wait_after_a_test_that_failed_waits_for_the_same_phase():
    def poll(barrier):
        done = plgpu.barrier_test(barrier)
        plgpu.when(~done)(lambda: plgpu.barrier_wait(barrier))

    everywhere.check(copies(poll), [X], DOUBLED)
    for interpret in SCHEDULES:
        np.testing.assert_array_equal(copies(poll)(interpret)(X), DOUBLED)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_read_after_a_test_that_failed_is_a_race(seed):
    late = plgpu.InterpretParams(seed=seed, asynchrony="late")
    kernel = copies(plgpu.barrier_test)(late)
    with pytest.raises(errors.RaceError, match="the copy from"):
        kernel(X)


@everywhere.gives([], lambda: np.zeros(128, np.float32), plgpu.Barrier())
def test_one_success_is_one_phase(o, barrier):
    """The second test is for the second phase, which never completes."""

    plgpu.barrier_arrive(barrier)
    # One lane arrives, and the other warps may test before.
    until(barrier)
    second = plgpu.barrier_test(barrier)
    plgpu.barrier_arrive(barrier)
    until(barrier)
    o[...] = jnp.full(128, second.astype(jnp.float32))


def test_a_warpgroup_polls_for_another_one():
    everywhere.check(ring(until, copies=False), [X], DOUBLED)


@pytest.mark.parametrize("interpret", SCHEDULES)
def test_a_test_orders_as_a_wait_does(interpret):
    got = ring(until, copies=False)(interpret)(X)
    np.testing.assert_array_equal(got, DOUBLED)


def clusters():
    def body(o, barrier):
        plgpu.barrier_arrive(barrier)
        until(barrier)
        o[lax.axis_index("c")] = jnp.ones(128)

    return everywhere.kernel(
        body,
        jax.ShapeDtypeStruct((4, 128), jnp.float32),
        plgpu.ClusterBarrier(collective_axes="c"),
        cluster={"c": 4},
    )


def test_a_cta_polls_for_the_others():
    everywhere.check(clusters(), [], np.ones((4, 128), np.float32))


def warps():
    """Each warp polls for a copy of its own."""

    def body(x, o, rows, barriers):
        @plgpu.warp_map
        def _(w):
            plgpu.copy_gmem_to_smem(x.at[w], rows.at[w], barriers.at[w])
            until(barriers.at[w])

        o[...] = rows[...]

    return everywhere.kernel(
        body,
        jax.ShapeDtypeStruct((4, 128), jnp.float32),
        plgpu.SMEM((4, 128), jnp.float32),
        plgpu.Barrier(num_barriers=4),
    )


def test_warps_poll_by_themselves():
    everywhere.check(warps(), [X[:4]], X[:4])


def test_polling_for_what_never_comes_ends_with_a_report():
    def body(o, barrier):
        until(barrier)
        o[...] = jnp.ones(128)

    kernel = plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        scratch_types=[plgpu.Barrier()],
        interpret=plgpu.InterpretParams(max_steps=2000),
    )  # fmt: skip
    with pytest.raises(errors.PallasGpuError, match="max_steps"):
        kernel()


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
def test_the_instructions_of_a_test(semantics):
    x = jax.ShapeDtypeStruct(ROWS.shape, ROWS.dtype)
    (report,) = plgpu.offline.compile(under(semantics, copies()(None)), x)
    assert "mbarrier.test_wait.parity" in report.ptx
    assert "barrier.cta.red.and.pred" in report.ptx
    (report,) = plgpu.offline.compile(
        under(semantics, warps()(None)), jax.ShapeDtypeStruct((4, 128), jnp.float32)
    )
    assert "vote.sync.all.pred" in report.ptx
    (report,) = plgpu.offline.compile(under(semantics, clusters()(None)))
    assert "mbarrier.test_wait.parity.acquire.cluster" in report.ptx
