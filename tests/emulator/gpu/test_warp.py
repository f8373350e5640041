# SPDX-License-Identifier: Apache-2.0
"""Warps by themselves in the emulator: their order, races, deadlocks, groups."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.refusal import refused, refused_by

F32 = jnp.float32
TILE = plgpu.SMEM((4,), F32)


def run(body, *scratch, seed=0, num_threads=1, args=(), shape=(4,), races=True):
    threads = {}
    if num_threads > 1:
        threads = {"num_threads": num_threads, "thread_name": "wg"}
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, F32),
        scratch_types=list(scratch),
        interpret=plgpu.InterpretParams(seed=seed, detect_races=races),
        **threads,
    )(*args)


def in_one(body):
    """A kernel's body that is a warp_map as a whole."""

    def whole(*refs):
        plgpu.warp_map(lambda warp_id: body(warp_id, *refs))

    return whole


# --- order ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@refused
def test_two_warps_that_write_one_element_race(seed):
    def body(warp_id, o, tile):
        tile[0] = warp_id.astype(F32)

    run(in_one(body), TILE, seed=seed)


@pytest.mark.parametrize("seed", range(4))
def test_a_read_of_what_another_warp_writes_is_a_race(seed):
    def body(o, tile):
        tile[...] = jnp.zeros(4)

        @plgpu.warp_map
        def _(warp_id):
            @plgpu.when(warp_id == 0)
            def _():
                tile[1] = F32(1)

            @plgpu.when(warp_id == 3)
            def _():
                o[0] = tile[1]

    with pytest.raises(errors.RaceError):
        run(body, TILE, seed=seed)


@pytest.mark.parametrize("seed", range(4))
def test_a_barrier_orders_two_warps(seed):
    def body(warp_id, o, tile, ready):
        @plgpu.when(warp_id == 2)
        def _():
            tile[1] = F32(5)
            plgpu.barrier_arrive(ready)

        @plgpu.when(warp_id == 0)
        def _():
            plgpu.barrier_wait(ready)
            for i in range(4):
                o[i] = tile[1]

    assert run(in_one(body), TILE, plgpu.Barrier(), seed=seed)[0] == 5


def test_the_region_is_ordered_with_what_surrounds_it():
    def body(o, tile):
        tile[...] = jnp.arange(4.0)

        @plgpu.warp_map
        def _(warp_id):
            tile[warp_id] = tile[warp_id] * 2

        tile[...] = tile[...] + 1

        @plgpu.warp_map
        def _(warp_id):
            o[3 - warp_id] = tile[warp_id]

    np.testing.assert_array_equal(run(body, TILE), [7, 5, 3, 1])


@refused_by(run, TILE, num_threads=2)
def test_another_warpgroup_is_not_ordered_with_warps(o, tile):
    @plgpu.when(lax.axis_index("wg") == 0)
    def _():
        @plgpu.warp_map
        def _(warp_id):
            tile[warp_id] = F32(1)

    @plgpu.when(lax.axis_index("wg") == 1)
    def _():
        tile[2] = F32(2)


def test_a_copy_that_only_another_warp_has_waited_for_is_a_race():
    def body(warp_id, x, o, tile, full):
        @plgpu.when(warp_id == 0)
        def _():
            plgpu.copy_gmem_to_smem(x, tile, full)
            plgpu.barrier_wait(full)

        @plgpu.when(warp_id == 1)
        def _():
            o[0] = tile[0]

    errors_of = (errors.RaceError, errors.UninitializedReadError)
    for seed in range(4):
        with pytest.raises(errors_of):
            run(in_one(body), TILE, plgpu.Barrier(), args=[jnp.ones(4)], seed=seed)


def test_what_a_warp_has_waited_for_the_warpgroup_may_read():
    def body(x, o, tile, full):
        @plgpu.warp_map
        def _(warp_id):
            @plgpu.when(warp_id == 3)
            def _():
                plgpu.copy_gmem_to_smem(x, tile, full)
                plgpu.barrier_wait(full)

        o[...] = tile[...]

    got = run(body, TILE, plgpu.Barrier(), args=[jnp.arange(4.0)])
    np.testing.assert_array_equal(got, np.arange(4))


def test_a_copy_that_a_warp_starts_and_nobody_waits_for_is_reported():
    def body(warp_id, x, o, tile, full):
        @plgpu.when(warp_id == 1)
        def _():
            plgpu.copy_gmem_to_smem(x, tile, full)

    with pytest.raises(errors.BarrierError, match="it has not been waited for"):
        run(in_one(body), TILE, plgpu.Barrier(), args=[jnp.ones(4)])


# --- progress -------------------------------------------------------------------------


@refused_by(lambda body: run(in_one(body), plgpu.Barrier(), plgpu.Barrier()))
def test_warps_that_wait_for_each_other_are_a_deadlock(warp_id, o, first, second):
    @plgpu.when(warp_id == 0)
    def _():
        plgpu.barrier_wait(second)
        plgpu.barrier_arrive(first)

    @plgpu.when(warp_id == 1)
    def _():
        plgpu.barrier_wait(first)
        plgpu.barrier_arrive(second)


def test_an_arrival_of_one_warp_counts_one():
    def body(warp_id, o, ready):
        @plgpu.when(warp_id < 3)
        def _():
            plgpu.barrier_arrive(ready)

        plgpu.barrier_wait(ready)
        o[warp_id] = F32(0)

    with pytest.raises(errors.DeadlockError, match="3 of 4 arrivals"):
        run(in_one(body), plgpu.Barrier(num_arrivals=4))
    run(in_one(body), plgpu.Barrier(num_arrivals=3))


def test_a_warp_that_skips_a_phase_misses_it():
    def body(o, ready):
        @plgpu.warp_map
        def _(warp_id):
            for _ in range(2):
                plgpu.barrier_arrive(ready)

                @plgpu.when(warp_id != 2)
                def _():
                    plgpu.barrier_wait(ready)

        @plgpu.warp_map
        def _(warp_id):
            @plgpu.when(warp_id == 2)
            def _():
                plgpu.barrier_wait(ready)

    with pytest.raises(errors.BarrierError, match="missed its phase"):
        for seed in range(20):
            run(body, plgpu.Barrier(num_arrivals=4), seed=seed)


def test_a_warp_that_spins_does_not_keep_the_others_from_running():
    def body(warp_id, o, flags):
        @plgpu.when(warp_id == 0)
        def _():
            lax.while_loop(lambda go: flags[0] < 1, lambda go: go, True)

        @plgpu.when(warp_id == 1)
        def _():
            flags[0] = F32(1)

    def whole(o, flags):
        flags[...] = jnp.zeros(4)
        plgpu.warp_map(lambda warp_id: body(warp_id, o, flags))
        o[...] = flags[...]

    run(whole, TILE, races=False)


@refused_by(lambda body: run(in_one(body)))
def test_an_error_names_the_warp_and_its_line(warp_id, o):
    @plgpu.when(warp_id == 2)
    def _():
        o[warp_id + 2] = F32(1)


def test_a_seed_decides_the_order_of_warps():
    def body(warp_id, o, order, lock):
        plgpu.barrier_arrive(lock)
        order[0] = order[0] * 10 + warp_id.astype(F32)

    def whole(o, order, lock):
        order[...] = jnp.zeros(4)
        plgpu.warp_map(lambda warp_id: body(warp_id, o, order, lock))
        o[...] = order[...]

    def result(seed):
        barrier = plgpu.Barrier(num_arrivals=4)
        return float(run(whole, TILE, barrier, seed=seed, races=False)[0])

    assert result(3) == result(3)
    assert len({result(seed) for seed in range(5)}) > 1


# --- copies to GMEM -------------------------------------------------------------------


def rows(warp_id):
    return plgpu.ds(32 * warp_id, 32)


ROWS = plgpu.SMEM((128,), F32)


def test_a_warp_waits_for_its_own_copies():
    """What another warp has copied is not covered by its wait."""

    def body(x, o, tile):
        tile[...] = x[...]
        plgpu.commit_smem()

        @plgpu.warp_map
        def _(warp_id):
            plgpu.copy_smem_to_gmem(tile.at[rows(warp_id)], o.at[rows(warp_id)])
            plgpu.wait_smem_to_gmem(0)
            tile[32 * warp_id] = F32(0)

    def wrong(x, o, tile, copied):
        tile[...] = x[...]
        plgpu.commit_smem()

        @plgpu.warp_map
        def _(warp_id):
            @plgpu.when(warp_id == 1)
            def _():
                plgpu.copy_smem_to_gmem(tile, o)
                plgpu.barrier_arrive(copied)

            @plgpu.when(warp_id == 2)
            def _():
                plgpu.barrier_wait(copied)
                plgpu.wait_smem_to_gmem(0)
                tile[0] = F32(0)

    x = jnp.arange(128.0)
    np.testing.assert_array_equal(run(body, ROWS, args=[x], shape=(128,)), x)
    with pytest.raises(errors.RaceError, match="in the warp that started the copy"):
        run(wrong, ROWS, plgpu.Barrier(), args=[x], shape=(128,))


@pytest.mark.parametrize("issuer", range(4))
def test_the_warpgroups_wait_covers_the_copies_of_all_warps(issuer):
    def body(x, o, tile):
        tile[...] = x[...]
        plgpu.commit_smem()

        @plgpu.warp_map
        def _(warp_id):
            @plgpu.when(warp_id == issuer)
            def _():
                plgpu.copy_smem_to_gmem(tile, o)

        plgpu.wait_smem_to_gmem(0)
        tile[...] = jnp.zeros(128)

    x = jnp.arange(128.0)
    np.testing.assert_array_equal(run(body, ROWS, args=[x], shape=(128,)), x)


@pytest.mark.parametrize(("issuer", "covered"), [(0, True), (1, False)])
def test_the_warpgroups_copies_are_those_of_warp_0(issuer, covered):
    def body(x, o, tile):
        tile[...] = x[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, o)

        @plgpu.warp_map
        def _(warp_id):
            @plgpu.when(warp_id == issuer)
            def _():
                plgpu.wait_smem_to_gmem(0)
                tile[0] = F32(0)

        plgpu.wait_smem_to_gmem(0)

    args = {"args": [jnp.arange(128.0)], "shape": (128,)}
    if covered:
        run(body, ROWS, **args)
        return
    with pytest.raises(errors.RaceError):
        run(body, ROWS, **args)


@refused_by(lambda body: run(body, ROWS, args=[jnp.arange(128.0)], shape=(128,)))
def test_n_counts_the_groups_of_each_warp(x, o, tile):
    """One group of each warp may be under way: also that of warp 1."""

    tile[...] = x[...]
    plgpu.commit_smem()

    @plgpu.warp_map
    def _(warp_id):
        @plgpu.when(warp_id < 2)
        def _():
            plgpu.copy_smem_to_gmem(tile.at[rows(warp_id)], o.at[rows(warp_id)])

    plgpu.wait_smem_to_gmem(1)
    tile[32] = F32(0)


def test_what_a_warp_wrote_needs_a_fence_of_its_own_or_of_the_warpgroup():
    def writes(who_fences):
        def body(x, o, tile):
            tile[...] = x[...]
            plgpu.commit_smem()

            @plgpu.warp_map
            def _(warp_id):
                @plgpu.when(warp_id == 1)
                def _():
                    tile[5] = F32(-1)
                    if who_fences == "warp 1":
                        plgpu.commit_smem()

                if who_fences == "warp 0":
                    plgpu.when(warp_id == 0)(plgpu.commit_smem)

            if who_fences == "warpgroup":
                plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, o)
            plgpu.wait_smem_to_gmem(0)

        return body

    args = {"args": [jnp.arange(128.0)], "shape": (128,)}
    for who in ("warp 1", "warpgroup"):
        assert run(writes(who), ROWS, **args)[5] == -1
    for who in ("nobody", "warp 0"):
        with pytest.raises(errors.RaceError, match="not fenced"):
            run(writes(who), ROWS, **args)
