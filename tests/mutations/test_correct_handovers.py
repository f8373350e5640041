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
    OUT,
    SHAPE,
    SMEM,
    Cases,
    X,
    in_warpgroup,
    load,
    options,
)
from tests.support.mutations.subjects import SUBJECTS

CASES = Cases()
case = CASES.add
ROUNDS = 4
ROWS = plgpu.BlockSpec((2, 128), lambda i: (i, 0))
STEPS = SHAPE[0] // 2


# --- warpgroups that take turns -------------------------------------------------------


@case
def two_warpgroups_play_ping_pong_with_one_buffer():
    def body(x, o, tile, turns):
        wg = lax.axis_index("wg")

        @plgpu.loop(0, ROUNDS)
        def _(i):
            # The other one's turn comes first, except at the start.
            plgpu.when((wg == 1) | (i > 0))(
                lambda: plgpu.barrier_wait(turns.at[1 - wg])
            )
            plgpu.when((wg == 0) & (i == 0))(lambda: tile.__setitem__(..., x[...]))
            tile[...] = tile[...] + 1
            plgpu.barrier_arrive(turns.at[wg])

        @plgpu.when(wg == 0)
        def _():
            plgpu.barrier_wait(turns.at[1])
            o[...] = tile[...]

    turns = plgpu.Barrier(num_barriers=2)
    return body, options(SMEM, turns, warpgroups=2), [X], [X + 2 * ROUNDS]


@case
def every_warpgroup_arrives_and_waits_in_every_round():
    def body(x, o, tile, other, everyone):
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

    everyone = plgpu.Barrier(num_arrivals=2)
    return body, options(SMEM, SMEM, everyone, warpgroups=2), [X], [X]


@case
def a_token_goes_around_three_warpgroups():
    def body(x, o, token, passed):
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

    passed = plgpu.Barrier(num_barriers=3)
    return body, options(SMEM, passed, warpgroups=3), [X], [X * 2 ** (3 * ROUNDS)]


@case
def a_barrier_that_is_complete_lets_the_producer_start():
    def body(x, o, tile, full, empty):
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

    empty = plgpu.Barrier(initially_complete=True)
    return body, options(SMEM, BARRIER, empty, warpgroups=2), [X], [X * ROUNDS]


# --- copies ---------------------------------------------------------------------------


@case
def half_of_a_tile_is_read_while_the_other_is_copied():
    def body(x, o, tile, full):
        halves = [plgpu.ds(0, 4), plgpu.ds(4, 4)]
        for i, half in enumerate(halves):
            plgpu.copy_gmem_to_smem(x.at[half], tile.at[half], full.at[i])
        for i, half in enumerate(halves):
            plgpu.barrier_wait(full.at[i])
            o[half] = tile[half]

    return body, options(SMEM, plgpu.Barrier(num_barriers=2)), [X], [X]


@case
def a_copy_in_every_other_step_is_awaited_in_these_alone():
    def body(x, o, tile, full):
        @plgpu.loop(0, ROUNDS, init_carry=jnp.zeros(SHAPE, F32))
        def total(i, carry):
            even = lax.rem(i, 2) == 0
            plgpu.when(even)(lambda: plgpu.copy_gmem_to_smem(x, tile, full))
            plgpu.when(even)(lambda: plgpu.barrier_wait(full))
            return carry + tile[...]

        o[...] = total

    return body, options(SMEM, BARRIER), [X], [X * ROUNDS]


@case
def the_group_before_the_last_frees_its_buffer():
    def body(x, o, tiles):
        for i in range(STEPS):
            rows = plgpu.ds(2 * i, 2)
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            tiles[i % 2] = x[rows] * 3
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tiles.at[i % 2], o.at[rows])
        plgpu.wait_smem_to_gmem(0)

    return body, options(plgpu.SMEM((2, 2, 128), F32)), [X], [X * 3]


@case
def what_a_copy_has_stored_is_loaded_again():
    def body(x, o, p, tile, full):
        tile[...] = x[...] + 1
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, o)
        plgpu.wait_smem_to_gmem(0)
        load(o, tile, full)
        p[...] = tile[...] * 2

    return body, options(SMEM, BARRIER, out=(OUT, OUT)), [X], [X + 1, (X + 1) * 2]


# --- clusters -------------------------------------------------------------------------

CLUSTER = plgpu.ClusterBarrier(collective_axes="cta")


@case
def ctas_take_turns_in_gmem():
    def body(x, o, turn):
        at = lax.axis_index("cta")
        plgpu.when(at == 0)(lambda: o.__setitem__(..., x[...]))
        for i in range(ROUNDS):
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)
            plgpu.when(at == i % 2)(lambda: o.__setitem__(..., o[...] + 1))

    return body, options(CLUSTER, ctas=2), [X], [X + ROUNDS]


@case
def a_multicast_starts_where_its_cta_has_finished():
    def body(x, o, tile, full, free):
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

    out = jax.ShapeDtypeStruct((2, *SHAPE), F32)
    sevens = np.full((4, 128), 7, np.float32)
    first = np.concatenate([X[4:], X[4:]])
    second = np.concatenate([X[4:], sevens])
    return (
        body,
        options(SMEM, BARRIER, CLUSTER, out=out, ctas=2),
        [X],
        [np.stack([first, second])],
    )


# --- pipelines ------------------------------------------------------------------------


@case
def the_steps_of_a_pipeline_share_scratch():
    def body(x, o, last):
        last[...] = jnp.zeros((2, 128), F32)

        def step(_, x_tile, o_tile):
            o_tile[...] = x_tile[...] + last[...]
            last[...] = o_tile[...]

        plgpu.emit_pipeline(
            step, grid=(STEPS,), in_specs=[ROWS], out_specs=[ROWS],
            max_concurrent_steps=3,
        )(x, o)  # fmt: skip

    sums = X.reshape(STEPS, 2, 128).cumsum(0).reshape(SHAPE)
    return body, options(plgpu.SMEM((2, 128), F32)), [X], [sums]


@case
def a_pipeline_reads_what_the_one_before_has_written():
    def body(x, o, p):
        def step(_, source, target):
            target[...] = source[...] + 1

        pipeline = plgpu.emit_pipeline(
            step, grid=(STEPS,), in_specs=[ROWS], out_specs=[ROWS],
            max_concurrent_steps=2,
        )  # fmt: skip
        pipeline(x, o)
        pipeline(o, p)

    return body, options(out=(OUT, OUT)), [X], [X + 1, X + 2]


@case
def two_warpgroups_of_a_pipeline_exchange_halves_of_a_block():
    def body(x, o, everyone):
        def step(_, x_tile, o_tile):
            wg = lax.axis_index("wg")
            o_tile[wg] = x_tile[1 - wg]
            plgpu.barrier_arrive(everyone)
            plgpu.barrier_wait(everyone)
            o_tile[1 - wg, 0:64] = o_tile[1 - wg, 0:64] * 2

        plgpu.emit_pipeline_warp_specialized(
            step, grid=(STEPS,), in_specs=[ROWS], out_specs=[ROWS],
            max_concurrent_steps=2, num_compute_wgs=2, wg_axis="wg",
            memory_registers=40,
        )(x, o)  # fmt: skip

    swapped = X.reshape(STEPS, 2, 128)[:, ::-1].reshape(SHAPE).copy()
    swapped[:, :64] *= 2
    everyone = plgpu.Barrier(num_arrivals=2)
    return body, options(everyone, warpgroups=3), [X], [swapped]


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
