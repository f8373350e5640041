# SPDX-License-Identifier: Apache-2.0
"""Cluster launch control: clusters that take over the work of others."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import offline
from tests.support import everywhere
from tests.support.features.row import Row
from tests.support.public_calls import top
from tests.support.refusal import refused, refused_by
from tests.support.semantics import BOTH, under

PARAMS = plgpu.CompilerParams(target="sm_100a")
GRID, NAMES = (3, 50), ("i", "j")
OUT = jax.ShapeDtypeStruct((*GRID, 128), jnp.int32)


def kernel(body, interpret=None, *, cluster=1, more=(), **options):
    """A kernel whose clusters take over work until there is none."""
    if cluster > 1:
        options |= {"cluster": (cluster,), "cluster_names": ("c",)}
    scratch = [
        plgpu.TryClusterCancelResult(num_buffers=2),
        plgpu.Barrier(num_barriers=2),
    ]
    return plgpu.kernel(
        body,
        **{"out_type": OUT, "grid": GRID, "grid_names": NAMES, **options},
        scratch_types=[*scratch, *more],
        compiler_params=PARAMS,
        interpret=interpret,
    )


def until_there_is_none(work, answers, barriers, axes=()):
    """Calls `work(i, j)` for the own position, then for those taken over."""

    def step(state):
        i, j, _, count = state
        slot = count % 2
        plgpu.try_cluster_cancel(
            answers.at[slot], barriers.at[slot], collective_axes=axes
        )
        work(i, j)
        plgpu.barrier_wait(barriers.at[slot])
        (i, j), more = plgpu.query_cluster_cancel(answers.at[slot], NAMES)
        return i, j, more, count + 1

    own = lax.axis_index("i"), lax.axis_index("j")
    lax.while_loop(lambda state: state[2], step, (*own, True, 0))


def rows(o, answers, barriers):
    def work(i, j):
        o[i, j] = jnp.full((128,), 100 * i + j, jnp.int32)

    until_there_is_none(work, answers, barriers)


EXPECTED = np.broadcast_to(
    (100 * np.arange(GRID[0])[:, None] + np.arange(GRID[1]))[..., None], OUT.shape
)


@pytest.mark.smoke
def test_every_position_is_worked_on():
    everywhere.check(lambda i: kernel(rows, i), (), EXPECTED, on_gpu=False)


def test_work_is_taken_over_in_any_schedule():
    got = kernel(rows, plgpu.InterpretParams(schedules=6))()
    np.testing.assert_array_equal(got, EXPECTED)


def test_a_cluster_takes_over_the_work_of_several():
    """What a cluster counts is more than one for some."""

    def body(o, answers, barriers):
        def step(state):
            _, count = state
            plgpu.try_cluster_cancel(answers.at[0], barriers.at[0])
            plgpu.barrier_wait(barriers.at[0])
            _, more = plgpu.query_cluster_cancel(answers.at[0], ())
            return more, count + 1

        _, count = lax.while_loop(lambda state: state[0], step, (True, 0))
        plgpu.atomic_add(o.at[0], count)
        plgpu.atomic_max(o.at[1], count)

    counts = jax.new_ref(jnp.zeros(2, jnp.int32))
    kernel(body, out_type=())(counts)
    total, most = counts[...]
    assert total == GRID[0] * GRID[1]
    assert most > 1


def halves(axis, o, answers, barriers, free):
    """Two CTAs, or warpgroups, do half of the work of a position each."""
    half = plgpu.ds(64 * lax.axis_index(axis), 64)
    own = lax.axis_index("i"), lax.axis_index("j")

    def step(state):
        i, j, _ = state
        plgpu.try_cluster_cancel(answers.at[0], barriers.at[0], collective_axes=axis)
        o[i, j, half] = jnp.full((64,), 100 * i + j, jnp.int32)
        plgpu.barrier_wait(barriers.at[0])
        (i, j), more = plgpu.query_cluster_cancel(answers.at[0], NAMES)
        if free is not None:
            plgpu.barrier_arrive(free)
            plgpu.barrier_wait(free)
        return i, j, more

    lax.while_loop(lambda state: state[2], step, (*own, True))


in_cluster = functools.partial(halves, "c")
by_two_warpgroups = functools.partial(halves, "wg")
FREE = plgpu.ClusterBarrier(collective_axes=("c",))


def test_every_cta_of_a_cluster_gets_the_answer():
    make = functools.partial(kernel, in_cluster, cluster=2, more=[FREE])
    everywhere.check(make, (), EXPECTED, on_gpu=False)


@refused
def test_a_request_over_an_answer_that_another_cta_reads_is_a_race():
    mistaken(functools.partial(in_cluster, free=None), cluster=2)


def two_warpgroups(interpret, body=by_two_warpgroups, arrivals=2):
    make = everywhere.kernel(
        body,
        OUT,
        plgpu.TryClusterCancelResult(1),
        plgpu.Barrier(num_arrivals=arrivals, num_barriers=1),
        plgpu.Barrier(num_arrivals=2),
        grid=dict(zip(NAMES, GRID, strict=True)),
        threads={"wg": 2},
        target="sm_100a",
    )
    return make(interpret)


def test_one_of_several_warpgroups_asks():
    everywhere.check(two_warpgroups, (), EXPECTED, on_gpu=False)


def test_instances_of_vmap_do_their_own_work():
    def add(x):
        def body(x_ref, o, answers, barriers):
            def work(i, j):
                o[i, j] = jnp.full((128,), 100 * i + j, jnp.int32) + x_ref[0]

            until_there_is_none(work, answers, barriers)

        return kernel(body)(jnp.reshape(x, (1,)))

    got = jax.vmap(add)(jnp.arange(2, dtype=jnp.int32))
    np.testing.assert_array_equal(got, np.stack([EXPECTED, EXPECTED + 1]))


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
@pytest.mark.parametrize("clustered", [False, True])
def test_the_instructions(semantics, clustered):
    made = kernel(in_cluster, cluster=2, more=[FREE]) if clustered else kernel(rows)
    (report,) = offline.compile(under(semantics, made), target="sm_100a")
    cancel = (
        "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes"
    )
    multicast = ".multicast::cluster::all" if clustered else ""
    assert report.ptx.count(f"{cancel}{multicast}.b128") == 1
    assert "clusterlaunchcontrol.query_cancel.is_canceled" in report.ptx
    assert report.resources.spill_store_bytes == 0


# --- mistakes -------------------------------------------------------------------------


def mistaken(body, **options):
    kernel(body, plgpu.InterpretParams(seed=0), **options)()


@refused_by(mistaken)
def test_an_answer_read_before_it_arrives_is_a_race(o, answers, barriers):
    plgpu.try_cluster_cancel(answers.at[0], barriers.at[0])
    plgpu.query_cluster_cancel(answers.at[0], NAMES)
    plgpu.barrier_wait(barriers.at[0])


@refused_by(lambda body: two_warpgroups(plgpu.InterpretParams(seed=0), body)())
def test_a_request_over_an_answer_that_others_read_is_a_race(
    o, answers, barriers, free
):
    def step(more):
        plgpu.try_cluster_cancel(answers.at[0], barriers.at[0], collective_axes="wg")
        plgpu.barrier_wait(barriers.at[0])
        return plgpu.query_cluster_cancel(answers.at[0], NAMES)[1]

    lax.while_loop(lambda more: more, step, True)


@refused
def test_an_arrival_for_each_warpgroup_is_needed():
    two_warpgroups(plgpu.InterpretParams(seed=0), arrivals=1)()


@refused_by(mistaken)
def test_a_request_after_an_answer_without_work_is_an_error(o, answers, barriers):
    def step(k, _):
        plgpu.try_cluster_cancel(answers.at[0], barriers.at[0])
        plgpu.barrier_wait(barriers.at[0])
        plgpu.query_cluster_cancel(answers.at[0], NAMES)
        return 0

    lax.fori_loop(0, 1000, step, 0)


@refused_by(mistaken)
def test_positions_of_no_work_are_not_used(o, answers, barriers):
    def step(state):
        plgpu.try_cluster_cancel(answers.at[0], barriers.at[0])
        plgpu.barrier_wait(barriers.at[0])
        (i, j), more = plgpu.query_cluster_cancel(answers.at[0], NAMES)
        o[i, j] = jnp.zeros((128,), jnp.int32)
        return more

    lax.while_loop(lambda more: more, step, True)


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b: plgpu.try_cluster_cancel(a, b),
        lambda a, b: plgpu.try_cluster_cancel(a.at[0, plgpu.ds(0, 8)], b.at[0]),
        lambda a, b: plgpu.try_cluster_cancel(a.at[0], b.at[0], collective_axes="i"),
        lambda a, b: plgpu.query_cluster_cancel(a.at[0], "k"),
    ],
)
@refused_by(lambda body: kernel(body)())
def test_bad_input_is_refused(o, answers, barriers, *, call):
    call(answers, barriers)


@refused_by(lambda body: kernel(body, cluster=2)())
def test_a_cluster_asks_as_a_whole(o, answers, barriers):
    plgpu.try_cluster_cancel(answers.at[0], barriers.at[0])  # HERE


@refused
def test_hopper_has_no_cluster_launch_control():
    def body(answers, barriers):
        plgpu.try_cluster_cancel(answers.at[0], barriers.at[0])  # HERE

    scratch = plgpu.TryClusterCancelResult(1), plgpu.Barrier(num_barriers=1)
    everywhere.kernel(body, (), *scratch, target="sm_90a")()()


GOOD = {
    "try_cluster_cancel": lambda e: {"result_ref": e.k, "barrier": e.b},
    "query_cluster_cancel": lambda e: {"result_ref": e.k, "grid_names": "g"},
    "TryClusterCancelResult": top(),
}
EFFECTS = {
    "try_cluster_cancel.collective_axes": "",
    "TryClusterCancelResult.num_buffers": "",
}
FEATURES = [
    Row(
        "cluster launch control",
        upstream=("primitives: try_cluster_cancel", "primitives: query_cluster_cancel"),
        operations=("try_cluster_cancel", "query_cluster_cancel"),
        runs="every_position_is_worked_on",
        offline="the_instructions",
        instruction="clusterlaunchcontrol.query_cancel.is_canceled",
        omissions={
            "wait": "an_answer_read_before_it_arrives_is_a_race",
            "commit": "(no thread stores to the answer)",
            "fence": "a_request_over_an_answer_that_another_cta_reads_is_a_race",
            "count": "an_arrival_for_each_warpgroup_is_needed",
        },
        blackwell=True,
    ),
]
