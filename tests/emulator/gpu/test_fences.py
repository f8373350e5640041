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


@refused_by(run)
def test_a_load_over_what_threads_stored_needs_commit_smem(x, o, mid, tile, full):
    tile[...] = jnp.zeros(TILE, F32)
    copy_in(x, tile, full)


def test_a_load_over_what_threads_have_read_needs_no_fence():
    def body(x, o, mid, tile, full):
        copy_in(x, tile, full)
        o[...] = tile[...]
        copy_in(x, tile, full)
        mid[...] = tile[...]

    np.testing.assert_array_equal(run(body)[1], X)


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
