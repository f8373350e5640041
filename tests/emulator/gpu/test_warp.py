# SPDX-License-Identifier: Apache-2.0
"""Warps by themselves in the emulator: their order, races, deadlocks, groups."""

from __future__ import annotations

import functools
import inspect

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support import everywhere
from tests.support.entry_kernels import f32
from tests.support.refusal import in_each, refused_by

F32 = jnp.float32
TILE, ROWS = plgpu.SMEM((4,), F32), plgpu.SMEM((128,), F32)
ONES, X = np.ones(4, np.float32), np.arange(128, dtype=np.float32)
BARRIER = plgpu.Barrier()


def run(body, *scratch, args=(), **options):
    """Runs a kernel whose result has the shape of its input, or four elements."""
    out = f32(*args[0].shape) if args else f32(4)
    return everywhere.emulate(body, args, out, *scratch, **options)


def in_one(body):
    """A kernel's body that is a warp_map as a whole."""

    @functools.wraps(body)
    def whole(*refs):
        plgpu.warp_map(lambda warp_id: body(warp_id, *refs))

    # The names of the references in reports.
    _, *refs = inspect.signature(body).parameters.values()
    whole.__signature__ = inspect.Signature(refs)
    return whole


def by_warp(warp_id, **work):
    """Each warp does its work: `w2=` is that of warp 2."""
    for name, function in work.items():
        plgpu.when(warp_id == int(name[1:]))(function)


# --- order ----------------------------------------------------------------------------


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


def copy_and_wait(x, tile, full):
    plgpu.copy_gmem_to_smem(x, tile, full)
    plgpu.barrier_wait(full)


def test_what_a_warp_has_waited_for_the_warpgroup_may_read():
    def body(x, o, tile, full):
        plgpu.warp_map(lambda w: by_warp(w, w3=lambda: copy_and_wait(x, tile, full)))
        o[...] = tile[...]

    got = run(body, TILE, BARRIER, args=[np.arange(4, dtype=np.float32)])
    np.testing.assert_array_equal(got, np.arange(4))


REPORTED = in_each(run, seed=range(4))


@refused_by(REPORTED, TILE)
def test_a_read_of_what_another_warp_writes(o, tile):
    tile[...] = jnp.zeros(4)
    write, read = lambda: tile.at[1].set(F32(1)), lambda: o.at[0].set(tile[1])
    plgpu.warp_map(lambda w: by_warp(w, w0=write, w3=read))


@refused_by(REPORTED, TILE, threads={"wg": 2})
def test_a_warpgroup_that_is_not_ordered_with_warps_of_another(o, tile):
    @plgpu.when(lax.axis_index("wg") == 0)
    def _():
        plgpu.warp_map(lambda w: tile.at[w].set(F32(1)))

    plgpu.when(lax.axis_index("wg") == 1)(lambda: tile.at[2].set(F32(2)))


@refused_by(REPORTED, TILE, BARRIER, args=[ONES])
@in_one
def test_a_copy_that_only_another_warp_has_waited_for(warp_id, x, o, tile, full):
    read = lambda: o.at[0].set(tile[0])  # noqa: E731
    by_warp(warp_id, w0=lambda: copy_and_wait(x, tile, full), w1=read)


@refused_by(REPORTED, TILE, BARRIER, args=[ONES])
@in_one
def test_a_copy_that_a_warp_starts_and_nobody_waits_for(warp_id, x, o, tile, full):
    by_warp(warp_id, w1=lambda: plgpu.copy_gmem_to_smem(x, tile, full))  # HERE


# --- progress -------------------------------------------------------------------------


@refused_by(REPORTED, BARRIER, BARRIER)
@in_one
def test_warps_that_wait_for_each_other(warp_id, o, first, second):
    def wait_and_arrive(one, other):
        plgpu.barrier_wait(one)  # HERE
        plgpu.barrier_arrive(other)

    by_warp(
        warp_id,
        w0=lambda: wait_and_arrive(second, first),
        w1=lambda: wait_and_arrive(first, second),
    )


@refused_by(REPORTED)
@in_one
def test_an_index_out_of_bounds_of_one_warp(warp_id, o):
    by_warp(warp_id, w2=lambda: o.at[warp_id + 2].set(F32(1)))  # HERE


@in_one
def three_arrivals(warp_id, o, ready):
    plgpu.when(warp_id < 3)(lambda: plgpu.barrier_arrive(ready))
    plgpu.barrier_wait(ready)
    o[warp_id] = F32(0)


test_arrivals_of_warps_that_are_missing = refused_by(
    REPORTED, plgpu.Barrier(num_arrivals=4)
)(three_arrivals)


def test_an_arrival_of_one_warp_counts_one():
    run(three_arrivals, plgpu.Barrier(num_arrivals=3))


def test_a_warp_that_skips_a_phase_misses_it():
    def body(o, ready):
        @plgpu.warp_map
        def _(warp_id):
            for _ in range(2):
                plgpu.barrier_arrive(ready)
                plgpu.when(warp_id != 2)(lambda: plgpu.barrier_wait(ready))

        plgpu.warp_map(lambda w: by_warp(w, w2=lambda: plgpu.barrier_wait(ready)))

    with pytest.raises(errors.BarrierError, match="missed its phase"):
        for seed in range(20):
            run(body, plgpu.Barrier(num_arrivals=4), seed=seed)


def test_a_warp_that_spins_does_not_keep_the_others_from_running():
    def body(o, flags):
        flags[...] = jnp.zeros(4)

        def spin():
            lax.while_loop(lambda go: flags[0] < 1, lambda go: go, True)

        plgpu.warp_map(
            lambda w: by_warp(w, w0=spin, w1=lambda: flags.at[0].set(F32(1)))
        )
        o[...] = flags[...]

    run(body, TILE, detect_races=False)


def test_a_seed_decides_the_order_of_warps():
    def body(o, order, lock):
        order[...] = jnp.zeros(4)

        @plgpu.warp_map
        def _(warp_id):
            plgpu.barrier_arrive(lock)
            order[0] = order[0] * 10 + warp_id.astype(F32)

        o[...] = order[...]

    def result(seed):
        barrier = plgpu.Barrier(num_arrivals=4)
        return float(run(body, TILE, barrier, seed=seed, detect_races=False)[0])

    assert result(3) == result(3)
    assert len({result(seed) for seed in range(5)}) > 1


# --- copies to GMEM -------------------------------------------------------------------


def then(work):
    """A body that fills SMEM, and then does its work."""

    @functools.wraps(work)
    def body(x, o, tile, *rest):
        tile[...] = x[...]
        plgpu.commit_smem()
        work(x, o, tile, *rest)

    return body


def rows(warp_id):
    return plgpu.ds(32 * warp_id, 32)


def copy_rows(warp_id, o, tile):
    plgpu.copy_smem_to_gmem(tile.at[rows(warp_id)], o.at[rows(warp_id)])


def wait_and_overwrite(tile, element=0):
    plgpu.wait_smem_to_gmem(0)
    tile[element] = F32(0)


def test_a_warp_waits_for_its_own_copies():
    @then
    def body(x, o, tile):
        @plgpu.warp_map
        def _(warp_id):
            copy_rows(warp_id, o, tile)
            wait_and_overwrite(tile, 32 * warp_id)

    np.testing.assert_array_equal(run(body, ROWS, args=[X]), X)


@pytest.mark.parametrize("issuer", range(4))
def test_the_warpgroups_wait_covers_the_copies_of_all_warps(issuer):
    @then
    def body(x, o, tile):
        copy = lambda: plgpu.copy_smem_to_gmem(tile, o)  # noqa: E731
        plgpu.warp_map(lambda w: by_warp(w, **{f"w{issuer}": copy}))
        plgpu.wait_smem_to_gmem(0)
        tile[...] = jnp.zeros(128)

    np.testing.assert_array_equal(run(body, ROWS, args=[X]), X)


def waiting_in(warp):
    """The warpgroup copies; a warp waits, and overwrites the source."""

    @then
    def body(x, o, tile):
        plgpu.copy_smem_to_gmem(tile, o)
        wait = lambda: wait_and_overwrite(tile)  # noqa: E731
        plgpu.warp_map(lambda w: by_warp(w, **{f"w{warp}": wait}))
        plgpu.wait_smem_to_gmem(0)

    return body


def test_the_warpgroups_copies_are_those_of_warp_0():
    run(waiting_in(0), ROWS, args=[X])
    with pytest.raises(errors.RaceError):
        run(waiting_in(1), ROWS, args=[X])


@refused_by(REPORTED, ROWS, BARRIER, args=[X])
@then
def test_a_wait_for_copies_of_another_warp(x, o, tile, copied):
    def copy():
        plgpu.copy_smem_to_gmem(tile, o)
        plgpu.barrier_arrive(copied)

    def wait():
        plgpu.barrier_wait(copied)
        wait_and_overwrite(tile)

    plgpu.warp_map(lambda w: by_warp(w, w1=copy, w2=wait))


@refused_by(REPORTED, ROWS, args=[X])
@then
def test_a_group_of_each_warp_that_may_be_under_way(x, o, tile):
    copy = lambda w: lambda: copy_rows(w, o, tile)  # noqa: E731
    plgpu.warp_map(lambda w: by_warp(w, w0=copy(w), w1=copy(w)))
    plgpu.wait_smem_to_gmem(1)
    tile[32] = F32(0)  # HERE


def fenced_by(who):
    @then
    def body(x, o, tile):
        @plgpu.warp_map
        def _(warp_id):
            def write():
                tile[5] = F32(-1)
                if who == "warp 1":
                    plgpu.commit_smem()

            by_warp(warp_id, w1=write)
            if who == "warp 0":
                by_warp(warp_id, w0=plgpu.commit_smem)

        if who == "warpgroup":
            plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, o)
        plgpu.wait_smem_to_gmem(0)

    return body


def test_what_a_warp_wrote_needs_a_fence_of_its_own_or_of_the_warpgroup():
    for who in ("warp 1", "warpgroup"):
        assert run(fenced_by(who), ROWS, args=[X])[5] == -1
    for who in ("nobody", "warp 0"):
        with pytest.raises(errors.RaceError, match="not fenced"):
            run(fenced_by(who), ROWS, args=[X])
