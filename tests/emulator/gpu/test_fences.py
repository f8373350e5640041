# SPDX-License-Identifier: Apache-2.0
"""Fences between threads' stores and asynchronous work: when, and by whom."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors

F32 = jnp.float32
TILE = (8, 32)
OUT = jax.ShapeDtypeStruct(TILE, F32)
X = np.arange(256, dtype=np.float32).reshape(TILE)


def kernel(body, *barriers, **options):
    """A kernel with two results, a tile in SMEM and some barriers."""
    options.setdefault("interpret", plgpu.InterpretParams(partial_results=True))
    return plgpu.kernel(
        body,
        out_type=(OUT, OUT),
        scratch_types=[plgpu.SMEM(TILE, F32), plgpu.Barrier(), *barriers],
        **options,
    )


def unfenced(body, *barriers, match, **options):
    with pytest.raises(errors.RaceError, match=match) as caught:
        kernel(body, *barriers, **options)(X)
    text = str(caught.value)
    assert "not fenced" in text and "test_fences.py" in text
    return text


def test_a_load_over_what_threads_stored_needs_commit_smem():
    def body(x, o, mid, tile, full, fence=False):
        tile[...] = jnp.zeros(TILE, F32)
        if fence:
            plgpu.commit_smem()
        plgpu.copy_gmem_to_smem(x, tile, full)
        plgpu.barrier_wait(full)
        o[...] = tile[...]

    text = unfenced(body, match="the copy from input 0 .* overwrites SMEM")
    assert "call commit_smem()" in text
    np.testing.assert_array_equal(
        kernel(lambda *refs: body(*refs, fence=True))(X)[0], X
    )


def test_a_load_over_what_threads_have_read_needs_no_fence():
    def body(x, o, mid, tile, full):
        plgpu.copy_gmem_to_smem(x, tile, full)
        plgpu.barrier_wait(full)
        o[...] = tile[...]
        plgpu.copy_gmem_to_smem(x, tile, full)
        plgpu.barrier_wait(full)
        mid[...] = tile[...]

    np.testing.assert_array_equal(kernel(body)(X)[1], X)


def through_gmem(fence):
    def body(x, o, mid, tile, full):
        mid[...] = x[...] + 1
        fence()
        plgpu.copy_gmem_to_smem(mid, tile, full)
        plgpu.barrier_wait(full)
        o[...] = tile[...]

    return body


@pytest.mark.parametrize("fence", [lambda: None, plgpu.commit_smem])
def test_a_load_of_what_threads_stored_to_gmem_needs_commit_gmem(fence):
    text = unfenced(through_gmem(fence), match="reads output 1")
    assert "call commit_gmem()" in text


def test_commit_gmem_makes_what_threads_stored_visible_to_a_load():
    o, mid = kernel(through_gmem(plgpu.commit_gmem))(X)
    np.testing.assert_array_equal(o, X + 1)
    np.testing.assert_array_equal(mid, X + 1)


def test_a_copy_out_over_what_threads_stored_needs_commit_gmem():
    def body(x, o, mid, tile, full, fence=False):
        plgpu.copy_gmem_to_smem(x, tile, full)
        plgpu.barrier_wait(full)
        o[...] = jnp.zeros(TILE, F32)
        if fence:
            plgpu.commit_gmem()
        plgpu.copy_smem_to_gmem(tile, o)
        plgpu.wait_smem_to_gmem(0)

    unfenced(body, match="overwrites output 0")
    np.testing.assert_array_equal(
        kernel(lambda *refs: body(*refs, fence=True))(X)[0], X
    )


def test_what_a_copy_stored_needs_no_commit_gmem():
    def body(x, o, mid, tile, full):
        plgpu.copy_gmem_to_smem(x, tile, full)
        plgpu.barrier_wait(full)
        plgpu.copy_smem_to_gmem(tile, mid)
        plgpu.wait_smem_to_gmem(0)
        plgpu.copy_gmem_to_smem(mid, tile, full)
        plgpu.barrier_wait(full)
        o[...] = tile[...]

    np.testing.assert_array_equal(kernel(body)(X)[0], X)


def handed_over(by_writer, by_reader, late=None):
    """Warpgroup 0 stores and arrives, warpgroup 1 waits and copies."""

    def body(x, o, mid, tile, ready):
        @plgpu.when(lax.axis_index("wg") == 0)
        def _():
            tile[...] = x[...]
            by_writer()
            plgpu.barrier_arrive(ready)
            if late is not None:
                late()

        @plgpu.when(lax.axis_index("wg") == 1)
        def _():
            plgpu.barrier_wait(ready)
            by_reader()
            plgpu.copy_smem_to_gmem(tile, o)
            plgpu.wait_smem_to_gmem(0)

    return body


def nothing():
    pass


THREADS = {"num_threads": 2, "thread_name": "wg"}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "fences", [(plgpu.commit_smem, nothing), (nothing, plgpu.commit_smem)]
)
def test_the_writer_fences_or_who_has_waited_for_it(fences, seed):
    params = plgpu.InterpretParams(seed=seed, partial_results=True)
    run = kernel(handed_over(*fences), **THREADS, interpret=params)
    np.testing.assert_array_equal(run(X)[0], X)


@pytest.mark.parametrize("seed", range(4))
def test_a_fence_after_the_arrival_is_too_late(seed):
    """Also where the schedule runs it before the copy."""
    params = plgpu.InterpretParams(seed=seed, partial_results=True)
    body = handed_over(nothing, nothing, late=plgpu.commit_smem)
    unfenced(body, match="the copy to output 0", **THREADS, interpret=params)


def test_a_fence_before_the_store_does_not_cover_it():
    def body(x, o, mid, tile, full):
        plgpu.commit_smem()
        tile[...] = x[...]
        plgpu.copy_smem_to_gmem(tile, o)
        plgpu.wait_smem_to_gmem(0)

    unfenced(body, match="the copy to output 0 .* reads SMEM")


@pytest.mark.parametrize("seed", range(3))
def test_a_cluster_hands_gmem_over_by_commit_gmem_and_a_cluster_barrier(seed):
    def body(x, o, mid, tile, full, ready, fence=True):
        at = lax.axis_index("c")
        mid[plgpu.ds(4 * at, 4)] = x[plgpu.ds(4 * at, 4)] * 2
        if fence:
            plgpu.commit_gmem()
        plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(ready)
        theirs = plgpu.ds(4 * (1 - at), 4)
        plgpu.copy_gmem_to_smem(mid.at[theirs], tile.at[plgpu.ds(0, 4)], full)
        plgpu.barrier_wait(full)
        o[theirs] = tile[plgpu.ds(0, 4)]

    options = {
        "cluster": (2,),
        "cluster_names": ("c",),
        "interpret": plgpu.InterpretParams(seed=seed, detect_races=True),
    }
    ready = plgpu.ClusterBarrier(collective_axes="c")
    np.testing.assert_array_equal(kernel(body, ready, **options)(X)[0], X * 2)
    unfenced(
        lambda *refs: body(*refs, fence=False), ready, match="reads output 1", **options
    )
