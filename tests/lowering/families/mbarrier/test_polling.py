# SPDX-License-Identifier: Apache-2.0
"""barrier_test, everywhere: a wait that may fail."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support import everywhere
from tests.support.features.row import Row
from tests.support.refusal import refused_by
from tests.support.rings import DOUBLED, STEPS, X, ring
from tests.support.semantics import BOTH, under

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

    row = plgpu.SMEM((128,), jnp.float32)
    return everywhere.kernel(body, X, row, plgpu.Barrier())


def test_a_loop_of_tests_waits_for_a_copy():
    everywhere.check(copies(), [X], DOUBLED)


def wait_after_a_test(barrier):
    """Waits for the phase that a test did not find complete."""
    done = plgpu.barrier_test(barrier)
    plgpu.when(~done)(lambda: plgpu.barrier_wait(barrier))


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


def clusters():
    def body(o, barrier):
        plgpu.barrier_arrive(barrier)
        until(barrier)
        o[lax.axis_index("c")] = jnp.ones(128)

    barrier = plgpu.ClusterBarrier(collective_axes="c")
    return everywhere.kernel(body, X[:4], barrier, cluster={"c": 4})


def warps():
    """Each warp polls for a copy of its own."""

    def body(x, o, rows, barriers):
        @plgpu.warp_map
        def _(w):
            plgpu.copy_gmem_to_smem(x.at[w], rows.at[w], barriers.at[w])
            until(barriers.at[w])

        o[...] = rows[...]

    rows = plgpu.SMEM((4, 128), jnp.float32)
    return everywhere.kernel(body, X[:4], rows, plgpu.Barrier(num_barriers=4))


POLLS = {
    "a warpgroup for another one": (ring(until, copies=False), [X], DOUBLED),
    "a wait after a test": (copies(wait_after_a_test), [X], DOUBLED),
    "a CTA for the others": (clusters(), [], np.ones((4, 128), np.float32)),
    "each warp": (warps(), [X[:4]], X[:4]),
}


@pytest.mark.parametrize("name", POLLS)
def test_a_test_orders_as_a_wait_does(name):
    everywhere.check(*POLLS[name])


@pytest.mark.parametrize("interpret", SCHEDULES)
@pytest.mark.parametrize("name", ["a copy", *POLLS])
def test_it_does_in_every_schedule(name, interpret):
    make, args, expected = POLLS.get(name, (copies(), [X], DOUBLED))
    np.testing.assert_array_equal(make(interpret)(*args), expected)


@refused_by(everywhere.emulate, [], X[0], plgpu.Barrier(), max_steps=2000)
def test_polling_for_what_never_comes_ends_with_a_report(o, barrier):
    until(barrier)
    o[...] = jnp.ones(128)


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
def test_the_instructions_of_a_test(semantics):
    (report,) = plgpu.offline.compile(under(semantics, copies()(None)), X)
    assert "mbarrier.test_wait.parity" in report.ptx
    assert "barrier.cta.red.and.pred" in report.ptx
    (report,) = plgpu.offline.compile(under(semantics, warps()(None)), X[:4])
    assert "vote.sync.all.pred" in report.ptx
    (report,) = plgpu.offline.compile(under(semantics, clusters()(None)))
    assert "mbarrier.test_wait.parity.acquire.cluster" in report.ptx


GOOD = {"barrier_test": lambda e: {"barrier": e.b}}
FEATURES = [
    Row(
        "tests of a barrier",
        upstream=("primitives: barrier_test",),
        operations=("barrier_test",),
        runs="a_loop_of_tests_waits_for_a_copy",
        offline="the_instructions_of_a_test",
        instruction="mbarrier.test_wait.parity",
        omissions={
            "wait": "lines: no test",
            "count": "polling_for_what_never_comes_ends_with_a_report",
        },
    ),
]
