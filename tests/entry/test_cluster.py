# SPDX-License-Identifier: Apache-2.0
"""Clusters: their size, their axes, and what copies and barriers along them need."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support.entry_kernels import TILE, f32, make, numbers, run
from tests.support.refusal import refused, refused_by

PAIR = {"cluster": (2,), "cluster_names": ("c",)}
OUT = f32(2, 64, 128)


def multicast(x, tile, barrier, axes="c"):
    plgpu.copy_gmem_to_smem(x, tile, barrier, collective_axes=axes)


@pytest.mark.parametrize("dtype", [np.float32, np.int8])
def test_a_multicast_gives_every_block_all_of_it(dtype):
    """In pieces: of a tile of 8-bit values they are half its rows."""

    def body(x, o, tile, barrier):
        multicast(x, tile, barrier)
        plgpu.barrier_wait(barrier)
        o[lax.axis_index("c")] = tile[...].astype(jnp.float32)

    x = numbers().astype(dtype)
    scratch = [plgpu.SMEM(x.shape, dtype), plgpu.Barrier()]
    got = make(body, OUT, scratch_types=scratch, **PAIR)(x)
    np.testing.assert_array_equal(got, np.stack([x, x]).astype(np.float32))


# --- sizes and names ------------------------------------------------------------------


@pytest.mark.parametrize("cluster", [(17,), (3, 6), (2, 3, 3)])
@refused
def test_a_cluster_fits_the_target(cluster):
    def body(x, o):  # HERE
        pass

    names = "abc"[: len(cluster)]
    run(body, cluster=cluster, cluster_names=tuple(names))


def test_the_largest_cluster_runs():
    def body(x, o):
        o[lax.axis_index("a"), lax.axis_index("b")] = x[0]

    got = make(body, f32(2, 4, 128), cluster=(2, 4), cluster_names=("a", "b"))(
        numbers()
    )
    np.testing.assert_array_equal(got, np.broadcast_to(numbers()[0], (2, 4, 128)))


@pytest.mark.parametrize("cluster", [(0,), (2.0,), (-2,)])
@refused
def test_sizes_are_positive_numbers(cluster):
    def body(x, o):  # HERE
        pass

    run(body, cluster=cluster, cluster_names=("c",))


@refused
def test_a_cluster_has_three_axes_at_most():
    def body(x, o):  # HERE
        pass

    run(body, cluster=(1, 1, 1, 2), cluster_names=tuple("abcd"))


@refused
def test_every_axis_has_a_name():
    def body(x, o):  # HERE
        pass

    run(body, cluster=(2, 2), cluster_names=("c",))


# --- collective axes ------------------------------------------------------------------


@pytest.mark.parametrize("options", [PAIR, {}, {"grid": (2,), "grid_names": ("d",)}])
@refused
def test_a_multicast_names_axes_of_the_cluster(options):
    def body(x, o, tile, barrier):
        plgpu.copy_gmem_to_smem(x, tile, barrier, collective_axes="d")  # HERE

    run(body, scratch_types=[TILE, plgpu.Barrier()], **options)


@refused_by(run, scratch_types=[TILE, plgpu.Barrier()], **PAIR)
def test_a_multicast_names_an_axis_once(x, o, tile, barrier):
    plgpu.copy_gmem_to_smem(x, tile, barrier, collective_axes=("c", "c"))  # HERE


@refused_by(
    run, scratch_types=[TILE, plgpu.Barrier()], cluster=(7,), cluster_names=("c",)
)
def test_a_multicast_has_a_part_for_every_block(x, o, tile, barrier):
    plgpu.copy_gmem_to_smem(x.at[0:1], tile.at[0:1], barrier, collective_axes="c")


@refused_by(run, **PAIR)
def test_a_cluster_barrier_names_axes_of_the_cluster(x, o):
    plgpu.run_scoped(lambda b: None, plgpu.ClusterBarrier(collective_axes=("c", "d")))


@pytest.mark.parametrize("axes", [(), ("c", "c")])
@refused
def test_a_cluster_barrier_has_different_axes(axes):
    plgpu.ClusterBarrier(collective_axes=axes)  # HERE


@pytest.mark.parametrize("axes", [("c", "d"), (("c",),), (("c", "d"),)])
@refused
def test_a_leader_is_one_along_a_single_axis(axes):
    plgpu.ClusterBarrier(collective_axes=axes, leader_tracked=True)  # HERE


# --- arrivals: only a run knows -------------------------------------------------------


@refused
def test_a_barrier_has_an_arrival_for_each_multicast_on_it():
    def body(x, o, first, second, barrier):
        multicast(x, first, barrier)
        multicast(x, second, barrier)
        plgpu.barrier_wait(barrier)
        o[lax.axis_index("c")] = first[...] + second[...]

    scratch = [TILE, TILE, plgpu.Barrier(num_arrivals=1)]
    make(body, OUT, scratch_types=scratch, **PAIR)(numbers())


@refused
def test_a_cluster_barrier_waits_for_all_its_blocks():
    def body(x, o, ready):
        @plgpu.when(lax.axis_index("c") == 0)
        def _():
            plgpu.barrier_arrive(ready)

        plgpu.barrier_wait(ready)

    scratch = [plgpu.ClusterBarrier(collective_axes="c")]
    make(body, OUT, scratch_types=scratch, **PAIR)(numbers())


@refused
def test_a_cluster_barrier_counts_no_arrival_twice():
    def body(x, o, ready):
        plgpu.barrier_arrive(ready)
        plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(ready)

    # Four arrivals on each barrier: two phases, and only one is waited for.
    scratch = [plgpu.ClusterBarrier(collective_axes="c", num_arrivals=1)]
    make(body, OUT, scratch_types=scratch, **PAIR)(numbers())
