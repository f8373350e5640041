# SPDX-License-Identifier: Apache-2.0
"""Fences between threads' stores and asynchronous work: when, and by whom."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.entry_kernels import f32
from tests.support.refusal import in_each, refused_by

F32 = jnp.float32
TILE = (8, 32)
X = np.arange(256, dtype=np.float32).reshape(TILE)


def run(body, *barriers, **options):
    """Runs a kernel with two results, a tile in SMEM and some barriers."""
    scratch = plgpu.SMEM(TILE, F32), plgpu.Barrier(), *barriers
    options = {"partial_results": True, **options}
    return everywhere.emulate(body, [X], (f32(*TILE),) * 2, *scratch, **options)


def copy_in(src, tile, full):
    plgpu.copy_gmem_to_smem(src, tile, full)
    plgpu.barrier_wait(full)


def copy_out(tile, dst):
    plgpu.copy_smem_to_gmem(tile, dst)
    plgpu.wait_smem_to_gmem(0)


# --- what copies overwrite in SMEM ----------------------------------------------------


def stored(x, o, mid, tile, full):
    tile[...] = jnp.zeros(TILE, F32)


def read(x, o, mid, tile, full):
    copy_in(x, tile, full)
    o[...] = tile[...]


def read_and_copied_out(x, o, mid, tile, full):
    """The copy out reads after the threads, and is waited for."""
    read(x, o, mid, tile, full)
    copy_out(tile, mid)


def overwritten(x, o, mid, tile, full, *, use, fence=lambda: None):
    use(x, o, mid, tile, full)
    fence()
    copy_in(x, tile, full)
    mid[...] = tile[...]


BY_HAND = {"compiler_params": plgpu.CompilerParams(unsafe_no_auto_barriers=True)}
USES = [stored, read, read_and_copied_out]


@pytest.mark.parametrize("use", USES)
def test_a_copy_over_what_threads_have_accessed_is_fenced(use):
    body = functools.partial(overwritten, use=use)
    np.testing.assert_array_equal(run(body)[1], X)


@pytest.mark.parametrize("use", USES)
@refused_by(run, **BY_HAND)
def test_without_automatic_barriers_the_author_fences(x, o, mid, tile, full, *, use):
    overwritten(x, o, mid, tile, full, use=use)


@pytest.mark.parametrize("use", USES)
def test_commit_smem_is_the_authors_fence(use):
    body = functools.partial(overwritten, use=use, fence=plgpu.commit_smem)
    np.testing.assert_array_equal(run(body, **BY_HAND)[1], X)


def test_a_fence_for_copies_over_smem_is_none_for_copies_of_it():
    """Before the arrival there is one, as a copy overwrites the tile."""

    def body(x, o, mid, tile, full, ready):
        copy_in(x, tile, full)
        tile[...] = tile[...] + 1
        plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(ready)
        copy_out(tile, o)

    with pytest.raises(plgpu.errors.RaceError, match=r"reads SMEM.* not fenced"):
        run(body, plgpu.Barrier())


def refilled(x, o, mid, tile, full, free, *, reader=None, copier=None, late=None):
    """Warpgroup 0 copies twice, warpgroup 1 reads in between."""

    @plgpu.when(lax.axis_index("wg") == 0)
    def _():
        plgpu.copy_gmem_to_smem(x, tile, full)
        plgpu.barrier_wait(free)
        if copier is not None:
            copier()
        plgpu.copy_gmem_to_smem(x, tile, full)

    @plgpu.when(lax.axis_index("wg") == 1)
    def _():
        plgpu.barrier_wait(full)
        o[...] = tile[...]
        if reader is not None:
            reader()
        plgpu.barrier_arrive(free)
        if late is not None:
            late()
        plgpu.barrier_wait(full)
        mid[...] = tile[...]


@pytest.mark.parametrize("options", [{}, BY_HAND], ids=["automatic", "by-hand"])
@pytest.mark.parametrize("who", ["reader", "copier"])
def test_the_reader_fences_or_who_has_waited_for_it(who, options):
    fence = {who: plgpu.commit_smem} if options else {}
    body = functools.partial(refilled, **fence)
    got = run(body, plgpu.Barrier(), threads={"wg": 2}, **options)
    np.testing.assert_array_equal(got[1], X)


@pytest.mark.parametrize("late", [None, plgpu.commit_smem], ids=["none", "late"])
@refused_by(in_each(run, seed=range(4)), plgpu.Barrier(), threads={"wg": 2}, **BY_HAND)
def test_an_arrival_is_no_fence(x, o, mid, tile, full, free, *, late):
    refilled(x, o, mid, tile, full, free, late=late)


def multicast(x, o, mid, tile, full, free):
    at = lax.axis_index("c")

    def copy():
        plgpu.copy_gmem_to_smem(x, tile, full, collective_axes="c")
        plgpu.barrier_wait(full)

    copy()
    o[plgpu.ds(4 * at, 4)] = tile[plgpu.ds(4 * at, 4)]
    plgpu.barrier_arrive(free)
    plgpu.barrier_wait(free)
    copy()
    mid[plgpu.ds(4 * at, 4)] = tile[plgpu.ds(4 * at, 4)]


ALL_FREE = plgpu.ClusterBarrier(collective_axes="c")


def test_a_multicast_over_what_threads_of_the_cluster_have_read_is_fenced():
    got = run(multicast, ALL_FREE, cluster={"c": 2})
    np.testing.assert_array_equal(got[1], X)


@refused_by(in_each(run, seed=range(2)), ALL_FREE, cluster={"c": 2}, **BY_HAND)
def test_a_multicast_overwrites_what_is_fenced_in_all_ctas(x, o, mid, tile, full, free):
    multicast(x, o, mid, tile, full, free)


# --- what threads store for copies ----------------------------------------------------


@pytest.mark.parametrize("fence", [lambda: None, plgpu.commit_smem])
@refused_by(run)
def test_a_load_of_what_threads_stored_to_gmem_needs_commit_gmem(
    x, o, mid, tile, full, *, fence
):
    mid[...] = x[...] + 1
    fence()
    copy_in(mid, tile, full)


@refused_by(run)
def test_a_copy_out_over_what_threads_stored_needs_commit_gmem(x, o, mid, tile, full):
    copy_in(x, tile, full)
    o[...] = jnp.zeros(TILE, F32)
    copy_out(tile, o)


def test_a_fence_makes_what_threads_stored_known_to_copies():
    def body(x, o, mid, tile, full):
        tile[...] = jnp.zeros(TILE, F32)
        plgpu.commit_smem()
        copy_in(x, tile, full)
        o[...] = jnp.zeros(TILE, F32)
        mid[...] = x[...] + 1
        plgpu.commit_gmem()
        copy_out(tile, o)
        copy_in(mid, tile, full)
        mid[...] = tile[...] + o[...]

    o, mid = run(body)
    np.testing.assert_array_equal(o, X)
    np.testing.assert_array_equal(mid, 2 * X + 1)


def test_what_a_copy_stored_needs_no_commit_gmem():
    def body(x, o, mid, tile, full):
        copy_in(x, tile, full)
        copy_out(tile, mid)
        copy_in(mid, tile, full)
        o[...] = tile[...]

    np.testing.assert_array_equal(run(body)[0], X)


def handed_over(x, o, mid, tile, ready, *, writer=None, reader=None, late=None):
    """Warpgroup 0 stores and arrives, warpgroup 1 waits and copies."""

    @plgpu.when(lax.axis_index("wg") == 0)
    def _():
        tile[...] = x[...]
        if writer is not None:
            writer()
        plgpu.barrier_arrive(ready)
        if late is not None:
            late()

    @plgpu.when(lax.axis_index("wg") == 1)
    def _():
        plgpu.barrier_wait(ready)
        if reader is not None:
            reader()
        copy_out(tile, o)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("who", ["writer", "reader"])
def test_the_writer_fences_or_who_has_waited_for_it(who, seed):
    body = functools.partial(handed_over, **{who: plgpu.commit_smem})
    got = run(body, threads={"wg": 2}, seed=seed)
    np.testing.assert_array_equal(got[0], X)


@refused_by(in_each(run, seed=range(4)), threads={"wg": 2})
def test_a_fence_after_the_arrival_is_too_late(x, o, mid, tile, ready):
    """Also where the schedule runs it before the copy."""
    handed_over(x, o, mid, tile, ready, late=plgpu.commit_smem)


@refused_by(run)
def test_a_fence_before_the_store_does_not_cover_it(x, o, mid, tile, full):
    plgpu.commit_smem()
    tile[...] = x[...]
    copy_out(tile, o)


def exchanged(x, o, mid, tile, full, ready, *, fence=lambda: None):
    at = lax.axis_index("c")
    mid[plgpu.ds(4 * at, 4)] = x[plgpu.ds(4 * at, 4)] * 2
    fence()
    plgpu.barrier_arrive(ready)
    plgpu.barrier_wait(ready)
    theirs = plgpu.ds(4 * (1 - at), 4)
    copy_in(mid.at[theirs], tile.at[plgpu.ds(0, 4)], full)
    o[theirs] = tile[plgpu.ds(0, 4)]


READY = plgpu.ClusterBarrier(collective_axes="c")
CLUSTER = {"cluster": {"c": 2}}


@pytest.mark.parametrize("seed", range(3))
def test_a_cluster_hands_gmem_over_by_commit_gmem_and_a_cluster_barrier(seed):
    body = functools.partial(exchanged, fence=plgpu.commit_gmem)
    got = run(body, READY, **CLUSTER, seed=seed)
    np.testing.assert_array_equal(got[0], X * 2)


@refused_by(in_each(run, seed=range(3)), READY, **CLUSTER)
def test_a_cluster_barrier_is_no_fence(x, o, mid, tile, full, ready):
    exchanged(x, o, mid, tile, full, ready)
