# SPDX-License-Identifier: Apache-2.0
"""Cluster barriers, everywhere: whose arrivals complete a phase."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
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
