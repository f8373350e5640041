# SPDX-License-Identifier: Apache-2.0
"""Correct kernels that hand memory over in the ways of fast kernels: no alarm."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.mutations import test_correct_kernels
from tests.support.mutations.correct import (
    BARRIER,
    F32,
    SHAPE,
    SMEM,
    Cases,
    X,
    in_warpgroup,
    load,
)
from tests.support.mutations.subjects import SUBJECTS

CASES = Cases()
case = CASES.add
ROUNDS = 4
ROWS = plgpu.BlockSpec((2, 128), lambda i: (i, 0))
STEPS = SHAPE[0] // 2


# --- warpgroups that take turns -------------------------------------------------------


@case([X], [X + 2 * ROUNDS], SMEM, plgpu.Barrier(num_barriers=2), threads={"wg": 2})
def two_warpgroups_play_ping_pong_with_one_buffer(x, o, tile, turns):
    wg = lax.axis_index("wg")

    @plgpu.loop(0, ROUNDS)
    def _(i):
        # The other one's turn comes first, except at the start.
        plgpu.when((wg == 1) | (i > 0))(lambda: plgpu.barrier_wait(turns.at[1 - wg]))
        plgpu.when((wg == 0) & (i == 0))(lambda: tile.__setitem__(..., x[...]))
        tile[...] = tile[...] + 1
        plgpu.barrier_arrive(turns.at[wg])

    @plgpu.when(wg == 0)
    def _():
        plgpu.barrier_wait(turns.at[1])
        o[...] = tile[...]


@case([X], [X], SMEM, SMEM, plgpu.Barrier(num_arrivals=2), threads={"wg": 2})
def every_warpgroup_arrives_and_waits_in_every_round(x, o, tile, other, everyone):
    wg = lax.axis_index("wg")
    half = plgpu.ds(4 * wg, 4)
    tile[half] = x[half]

    @plgpu.loop(0, ROUNDS)
    def _(i):
        plgpu.barrier_arrive(everyone)
        plgpu.barrier_wait(everyone)
        theirs = tile[plgpu.ds(4 - 4 * wg, 4)]
        plgpu.barrier_arrive(everyone)
        plgpu.barrier_wait(everyone)
        tile[half] = theirs

    o[half] = tile[half]


@case(
    [X], [X * 2 ** (3 * ROUNDS)], SMEM, plgpu.Barrier(num_barriers=3), threads={"wg": 3}
)
def a_token_goes_around_three_warpgroups(x, o, token, passed):
    wg = lax.axis_index("wg")

    @plgpu.when(wg == 2)
    def _():
        token[...] = x[...]
        plgpu.barrier_arrive(passed.at[2])

    @plgpu.loop(0, ROUNDS)
    def _(i):
        plgpu.barrier_wait(passed.at[lax.rem(wg + 2, 3)])
        token[...] = token[...] * 2
        plgpu.barrier_arrive(passed.at[wg])

    @plgpu.when(wg == 0)
    def _():
        plgpu.barrier_wait(passed.at[2])
        o[...] = token[...]


@case(
    [X],
    [X * ROUNDS],
    SMEM,
    BARRIER,
    plgpu.Barrier(initially_complete=True),
    threads={"wg": 2},
)
def a_barrier_that_is_complete_lets_the_producer_start(x, o, tile, full, empty):
    @in_warpgroup(0)
    def _():
        @plgpu.loop(0, ROUNDS)
        def _(i):
            plgpu.barrier_wait(empty)
            plgpu.copy_gmem_to_smem(x, tile, full)

    @in_warpgroup(1)
    def _():
        @plgpu.loop(0, ROUNDS, init_carry=jnp.zeros(SHAPE, F32))
        def total(i, carry):
            plgpu.barrier_wait(full)
            carry = carry + tile[...]
            plgpu.barrier_arrive(empty)
            return carry

        o[...] = total


# --- copies ---------------------------------------------------------------------------


@case([X], [X], SMEM, plgpu.Barrier(num_barriers=2))
def half_of_a_tile_is_read_while_the_other_is_copied(x, o, tile, full):
    halves = [plgpu.ds(0, 4), plgpu.ds(4, 4)]
    for i, half in enumerate(halves):
        plgpu.copy_gmem_to_smem(x.at[half], tile.at[half], full.at[i])
    for i, half in enumerate(halves):
        plgpu.barrier_wait(full.at[i])
        o[half] = tile[half]


@case([X], [X * ROUNDS], SMEM, BARRIER)
def a_copy_in_every_other_step_is_awaited_in_these_alone(x, o, tile, full):
    @plgpu.loop(0, ROUNDS, init_carry=jnp.zeros(SHAPE, F32))
    def total(i, carry):
        even = lax.rem(i, 2) == 0
        plgpu.when(even)(lambda: plgpu.copy_gmem_to_smem(x, tile, full))
        plgpu.when(even)(lambda: plgpu.barrier_wait(full))
        return carry + tile[...]

    o[...] = total


@case([X], [X * 3], plgpu.SMEM((2, 2, 128), F32))
def the_group_before_the_last_frees_its_buffer(x, o, tiles):
    for i in range(STEPS):
        rows = plgpu.ds(2 * i, 2)
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        tiles[i % 2] = x[rows] * 3
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tiles.at[i % 2], o.at[rows])
    plgpu.wait_smem_to_gmem(0)


@case([X], [X + 1, (X + 1) * 2], SMEM, BARRIER)
def what_a_copy_has_stored_is_loaded_again(x, o, p, tile, full):
    tile[...] = x[...] + 1
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, o)
    plgpu.wait_smem_to_gmem(0)
    load(o, tile, full)
    p[...] = tile[...] * 2


# --- clusters -------------------------------------------------------------------------

CLUSTER = plgpu.ClusterBarrier(collective_axes="cta")


@case([X], [X + ROUNDS], CLUSTER, cluster={"cta": 2})
def ctas_take_turns_in_gmem(x, o, turn):
    at = lax.axis_index("cta")
    plgpu.when(at == 0)(lambda: o.__setitem__(..., x[...]))
    for i in range(ROUNDS):
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)
        plgpu.when(at == i % 2)(lambda: o.__setitem__(..., o[...] + 1))


COPIED = np.stack([X, X])
COPIED[:, :4] = X[4:]
COPIED[1, 4:] = 7


@case([X], [COPIED], SMEM, BARRIER, CLUSTER, cluster={"cta": 2})
def a_multicast_starts_where_its_cta_has_finished(x, o, tile, full, free):
    at = lax.axis_index("cta")
    lower, upper = plgpu.ds(0, 4), plgpu.ds(4, 4)
    tile[...] = jnp.full(SHAPE, 7.0)
    plgpu.commit_smem()
    plgpu.when(at == 0)(lambda: plgpu.barrier_arrive(free))

    @plgpu.when(at == 1)
    def _():
        plgpu.barrier_arrive(free)
        # CTA 0 copies the lower rows, this one the upper ones.
        o[1, upper] = tile[upper]

    plgpu.barrier_wait(free)
    plgpu.copy_gmem_to_smem(x, tile, full, collective_axes="cta")
    plgpu.barrier_wait(full)
    o[at, lower] = tile[upper]
    plgpu.when(at == 0)(lambda: o.at[0].set(tile[upper], upper))


# --- pipelines ------------------------------------------------------------------------


@case(
    [X], [X.reshape(STEPS, 2, 128).cumsum(0).reshape(SHAPE)], plgpu.SMEM((2, 128), F32)
)
def the_steps_of_a_pipeline_share_scratch(x, o, last):
    last[...] = jnp.zeros((2, 128), F32)

    def step(_, x_tile, o_tile):
        o_tile[...] = x_tile[...] + last[...]
        last[...] = o_tile[...]

    plgpu.emit_pipeline(
        step, grid=(STEPS,), in_specs=[ROWS], out_specs=[ROWS],
        max_concurrent_steps=3,
    )(x, o)  # fmt: skip


@case([X], [X + 1, X + 2])
def a_pipeline_reads_what_the_one_before_has_written(x, o, p):
    def step(_, source, target):
        target[...] = source[...] + 1

    pipeline = plgpu.emit_pipeline(
        step, grid=(STEPS,), in_specs=[ROWS], out_specs=[ROWS],
        max_concurrent_steps=2,
    )  # fmt: skip
    pipeline(x, o)
    pipeline(o, p)


SWAPPED = X.reshape(STEPS, 2, 128)[:, ::-1].reshape(SHAPE).copy()
SWAPPED[:, :64] *= 2


@case([X], [SWAPPED], plgpu.Barrier(num_arrivals=2), threads={"wg": 3})
def two_warpgroups_of_a_pipeline_exchange_halves_of_a_block(x, o, everyone):
    def step(_, x_tile, o_tile):
        wg = lax.axis_index("wg")
        o_tile[wg] = x_tile[1 - wg]
        plgpu.barrier_arrive(everyone)
        plgpu.barrier_wait(everyone)
        o_tile[1 - wg, 0:64] = o_tile[1 - wg, 0:64] * 2

    plgpu.emit_pipeline_warp_specialized(
        step, grid=(STEPS,), in_specs=[ROWS], out_specs=[ROWS], wg_axis="wg",
        max_concurrent_steps=2, num_compute_wgs=2, memory_registers=40,
    )(x, o)  # fmt: skip


def test_a_sequential_axis_adds_to_the_block_that_its_steps_share():
    def body(x, o):
        first = plgpu.program_id(0) == 0
        o[...] = jnp.where(first, x[...], o[...] + x[...])

    run = plgpu.pallas_call(
        body,
        jax.ShapeDtypeStruct((2, 128), F32),
        grid=(STEPS,),
        in_specs=[ROWS],
        out_specs=plgpu.BlockSpec((2, 128), lambda i: (0, 0)),
        compiler_params=plgpu.CompilerParams(
            dimension_semantics=["arbitrary"], max_concurrent_steps=2
        ),
        interpret=plgpu.InterpretParams(schedules=9),
    )
    np.testing.assert_allclose(run(X), X.reshape(STEPS, 2, 128).sum(0), rtol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_a_handover_gives_no_alarm_and_one_result(name):
    CASES.check(name)


def test_there_are_many_correct_kernels():
    kernels = {*CASES, *test_correct_kernels.CASES, *(s.name for s in SUBJECTS)}
    assert len(kernels) >= 45
