# SPDX-License-Identifier: Apache-2.0
"""Cluster barriers, everywhere: whose arrivals complete a phase."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support import everywhere
from tests.support.refusal import refused

CLUSTER = {"x": 2, "y": 4}
ONES = np.ones((2, 4, 128), np.float32)


def rounds(axes, n):
    """A kernel whose CTAs wait for each other a few times; two warpgroups arrive."""

    def body(o, barrier):
        @plgpu.loop(0, n)
        def _(i):
            plgpu.barrier_arrive(barrier)
            plgpu.barrier_wait(barrier)

        @plgpu.when(lax.axis_index("wg") == 0)
        def _():
            position = lax.axis_index("x"), lax.axis_index("y")
            o[position] = jnp.ones(128)

    barrier = plgpu.ClusterBarrier(collective_axes=axes, num_arrivals=2)
    return everywhere.kernel(body, ONES, barrier, threads={"wg": 2}, cluster=CLUSTER)


@pytest.mark.parametrize(
    ("axes", "n"),
    [
        *(("x", 3), ((("x", "y"),), 3), ((("y", "x"),), 3), (("x", "y"), 1)),
        *(((("x",), ("y",)), 1), ((), 3), (((),), 3), (("x", ()), 3)),
    ],
    ids=str,
)
def test_a_phase_has_the_arrivals_of_all_ctas_along_the_axes(axes, n):
    everywhere.check(rounds(axes, n), [], ONES)


@refused
def test_rows_and_columns_alone_do_not_keep_the_ctas_in_step():
    """A CTA of the row may arrive for the next phase before one of the column has for
    the current one."""
    rounds(("x", "y"), 3)(plgpu.InterpretParams(seed=1))()


def leaders(waits_everywhere=False):
    """A kernel in which leaders wait for the CTAs along "y"; all others go on."""

    def body(o, barrier):
        x, y = lax.axis_index("x"), lax.axis_index("y")
        o[x, y] = jnp.full(128, 10.0 * x.astype(jnp.float32) + 1)
        plgpu.barrier_arrive(barrier)

        @plgpu.when((y == 0) | waits_everywhere)
        def _():
            plgpu.barrier_wait(barrier)  # HERE
            for other in range(1, 4):
                o[x, other] = o[x, other] + 1

    barrier = plgpu.ClusterBarrier(collective_axes="y", leader_tracked=True)
    return everywhere.kernel(body, ONES, barrier, cluster=CLUSTER)


def test_arrivals_on_a_leader_tracked_barrier_count_in_the_leader_of_each_line():
    expected = np.repeat([[[2.0], [12.0]]], 128, -1).reshape(2, 1, 128) * ONES
    expected[:, 0] -= 1
    everywhere.check(leaders(), [], expected)


@refused
def test_no_phase_completes_in_the_others():
    leaders(waits_everywhere=True)(plgpu.InterpretParams())()


# --- arrivals in one other CTA --------------------------------------------------------

STEPS, PAIR = 5, {"c": 2}
SENT = np.arange(STEPS * 128, dtype=np.float32).reshape(STEPS, 128)
INBOX = plgpu.SMEM((128,), jnp.float32)


def sender(waits=True, releases=True, free=plgpu.Barrier):
    """CTA 0 sends rows to CTA 1, which arrives at CTA 0 when it has stored one."""

    def body(x, o, inbox, full, free):
        cta = lax.axis_index("c")

        @plgpu.loop(0, STEPS)
        def _(i):
            @plgpu.when(cta == 0)
            def _():
                if waits:
                    plgpu.barrier_wait(free)
                there = {"cluster_idx": 1, "cluster_dim": "c"}
                plgpu.async_store_smem(x[i], inbox, full, **there)

            @plgpu.when(cta == 1)
            def _():
                plgpu.barrier_wait(full)
                o[i] = inbox[...]
                if releases:
                    one = plgpu.cluster_ref(free, {"c": 1 - cta})
                    plgpu.barrier_arrive(one)

    free = free(initially_complete=True)
    return everywhere.kernel(body, SENT, INBOX, plgpu.Barrier(), free, cluster=PAIR)


@pytest.mark.parametrize("free", [plgpu.Barrier, plgpu.ClusterBarrier])
def test_an_arrival_in_one_other_cta_hands_memory_back(free):
    everywhere.check(sender(free=free), [SENT], SENT)
    (report,) = plgpu.offline.compile(sender(free=free)(), SENT)
    assert "mbarrier.arrive.release.cluster.shared::cluster.b64" in report.ptx
    # One meeting at the start; at the end, too: a CTA may still arrive in another one.
    assert report.ptx.count("barrier.cluster.wait.aligned") == 2


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"waits": False}, (errors.RaceError, errors.BarrierError)),
        ({"releases": False}, errors.DeadlockError),
    ],
)
def test_what_the_arrival_is_for_is_not_left_out(wrong, error):
    for seed in range(4):
        with pytest.raises(error):
            sender(**wrong)(plgpu.InterpretParams(seed=seed))(SENT)


def arrives(barrier, position, use=plgpu.barrier_arrive):
    """A kernel that uses a barrier of another CTA."""

    def body(o, one):
        use(plgpu.cluster_ref(one, position()))  # HERE

    return everywhere.emulate(body, [], ONES, barrier, cluster=PAIR)


@pytest.mark.parametrize(
    ("barrier", "position", "use"),
    [
        (plgpu.Barrier(), {"c": 2}, plgpu.barrier_arrive),
        (plgpu.Barrier(), {"d": 0}, plgpu.barrier_arrive),
        (plgpu.Barrier(), {"c": 0}, plgpu.barrier_wait),
        (plgpu.Barrier(num_barriers=2), {"c": 0}, plgpu.barrier_arrive),
    ],
    ids=["outside", "no axis", "wait", "several"],
)
@refused
def test_a_barrier_of_another_cta_is_one_to_arrive_on(barrier, position, use):
    arrives(barrier, lambda: position, use)


@refused
def test_a_cta_to_arrive_in_is_one_of_the_cluster():
    arrives(plgpu.Barrier(), lambda: {"c": lax.axis_index("c") + 1})
