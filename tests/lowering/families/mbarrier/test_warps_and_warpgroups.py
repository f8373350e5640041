# SPDX-License-Identifier: Apache-2.0
"""Barriers that warps and their warpgroup wait for, everywhere: parities stay equal."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.refusal import refused, refused_by

STEPS = 3
X = np.arange(STEPS * 256, dtype=np.float32).reshape(STEPS, 2, 128)


def alternating(inside):
    """Each step has a copy that warps wait for, and one that the warpgroup does.

    Args:
      inside: waits in the `warp_map`: takes the warp's index, the barriers, the step
        and a scalar from outside.
    """

    def body(x, o, row, barriers):
        g = lax.axis_index("g")

        @plgpu.loop(0, STEPS)
        def _(i):
            plgpu.copy_gmem_to_smem(x.at[i, 0], row, barriers.at[lax.rem(i, 2)])
            plgpu.warp_map(lambda w: inside(w, barriers, i, g))
            o[i, 0] = row[...]
            plgpu.copy_gmem_to_smem(x.at[i, 1], row, barriers.at[lax.rem(i, 2)])
            plgpu.barrier_wait(barriers.at[lax.rem(i, 2)])
            o[i, 1] = row[...]

    return everywhere.kernel(
        body,
        X,
        plgpu.SMEM((128,), jnp.float32),
        plgpu.Barrier(num_barriers=2),
        grid={"g": 1},
    )


def plain(w, barriers, i, g):
    plgpu.barrier_wait(barriers.at[lax.rem(i, 2)])


def in_a_loop(w, barriers, i, g):
    @plgpu.loop(0, 1)
    def _(j):
        plgpu.barrier_wait(barriers.at[lax.rem(i + 2 * j, 2)])


def in_a_branch(w, barriers, i, g):
    plgpu.when(g == 0)(lambda: plain(w, barriers, i, g))


def in_a_while_loop(w, barriers, i, g):
    def step(j):
        plain(w, barriers, i, g)
        return j + 1

    lax.while_loop(lambda j: j < g + 1, step, 0)


def in_a_function(w, barriers, i, g):
    jax.jit(lambda n: plain(w, barriers, n, g))(i)


@pytest.mark.parametrize(
    "inside", [plain, in_a_loop, in_a_branch, in_a_while_loop, in_a_function]
)
def test_a_wait_of_all_four_warps_is_one_of_the_warpgroup(inside):
    everywhere.check(alternating(inside), [X], X)


def of_one_warp(w, barriers, i, g):
    plgpu.when(w == 1)(lambda: plain(w, barriers, i, g))


def of_each_its_own(w, barriers, i, g):
    plgpu.barrier_wait(barriers.at[lax.rem(w, 2)])


def as_often_as_the_index(w, barriers, i, g):
    def step(j):
        plain(w, barriers, i, g)
        return j + 1

    lax.while_loop(lambda j: j < w, step, 0)


def of_a_carry(w, barriers, i, g):
    def step(j, at):
        plgpu.barrier_wait(barriers.at[at])
        return lax.rem(w, 2)

    lax.fori_loop(0, 2, step, jnp.int32(0))


def by_tests(w, barriers, i, g):
    plgpu.barrier_test(barriers.at[0])


def in_a_called_branch(w, barriers, i, g):
    jax.jit(lambda n: of_one_warp(n, barriers, i, g))(w)


UNEVEN = [
    of_one_warp, of_each_its_own, as_often_as_the_index, of_a_carry, by_tests,
    in_a_called_branch,
]  # fmt: skip


@pytest.mark.parametrize("inside", UNEVEN)
@refused
def test_waits_that_warps_may_not_all_make_are_refused(inside):
    alternating(inside)(None)(X)


@refused_by(
    everywhere.emulate,
    [X],
    X,
    plgpu.SMEM((128,), jnp.float32),
    plgpu.Barrier(),
)
def test_a_branch_on_memory_is_one_that_warps_may_not_all_take(x, o, tile, barrier):
    tile[...] = x[0, 0]

    @plgpu.warp_map
    def _(w):
        plgpu.when(tile[0] > 0)(lambda: plgpu.barrier_wait(barrier))  # HERE

    plgpu.barrier_wait(barrier)


@refused
def test_the_emulator_itself_compares_the_warps(monkeypatch):
    """It counts for each warp, whatever the check of the body knows."""
    from pallas_gpu.checks import mbarrier

    monkeypatch.setattr(mbarrier, "check_waits", lambda jaxpr: None)
    alternating(of_one_warp)(plgpu.InterpretParams())(X)
