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
    plgpu.copy_gmem_to_smem(x, tile, barrier, collective_axes=axes)  # HERE


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


SIZES = [(17,), (3, 6), (2, 3, 3), (0,), (2.0,), (-2,), (1, 1, 1, 2)]


@pytest.mark.parametrize(
    ("cluster", "names"),
    [*((size, "abcd"[: len(size)]) for size in SIZES), ((2, 2), "c")],
)
@refused
def test_a_cluster_fits_the_target(cluster, names):
    def body(x, o):  # HERE
        pass

    run(body, cluster=cluster, cluster_names=tuple(names))


# --- collective axes ------------------------------------------------------------------

SEVEN = {"cluster": (7,), "cluster_names": ("c",)}
MULTICASTS = {
    "another axis of a cluster": ("d", PAIR),
    "no cluster": ("d", {}),
    "an axis of the grid": ("d", {"grid": (2,), "grid_names": ("d",)}),
    "an axis twice": (("c", "c"), PAIR),
    "more blocks than parts": ("c", SEVEN),
}


@pytest.mark.parametrize(("axes", "options"), MULTICASTS.values(), ids=MULTICASTS)
@refused
def test_a_multicast_has_a_part_for_every_block_along_axes_of_the_cluster(
    axes, options
):
    def body(x, o, tile, barrier):
        multicast(x.at[0:1], tile.at[0:1], barrier, axes)

    run(body, scratch_types=[TILE, plgpu.Barrier()], **options)


AXES = {
    "none for a leader": {"leader_tracked": True},
    "the same twice": {"collective_axes": ("c", "c")},
    "two for a leader": {"collective_axes": ("c", "d"), "leader_tracked": True},
    "a group for a leader": {"collective_axes": (("c",),), "leader_tracked": True},
    "two as a group": {"collective_axes": (("c", "d"),), "leader_tracked": True},
    "another one than the cluster has": {"collective_axes": ("c", "d")},
}


@pytest.mark.parametrize("options", AXES.values(), ids=AXES)
@refused_by(run, **PAIR)
def test_a_cluster_barrier_is_along_different_axes_of_the_cluster(x, o, *, options):
    plgpu.run_scoped(lambda b: None, plgpu.ClusterBarrier(**options))  # HERE


# --- arrivals: only a run knows -------------------------------------------------------


CLUSTER = plgpu.ClusterBarrier(collective_axes="c", num_arrivals=1)


@refused_by(run, out=OUT, scratch_types=[TILE, TILE, plgpu.Barrier()], **PAIR)
def test_a_barrier_has_an_arrival_for_each_multicast_on_it(
    x, o, first, second, barrier
):
    multicast(x, first, barrier)
    multicast(x, second, barrier)
    plgpu.barrier_wait(barrier)
    o[lax.axis_index("c")] = first[...] + second[...]


@refused_by(run, out=OUT, scratch_types=[CLUSTER], **PAIR)
def test_a_cluster_barrier_waits_for_all_its_blocks(x, o, ready):
    plgpu.when(lax.axis_index("c") == 0)(lambda: plgpu.barrier_arrive(ready))
    plgpu.barrier_wait(ready)


@refused_by(run, out=OUT, scratch_types=[CLUSTER], **PAIR)
def test_a_cluster_barrier_counts_no_arrival_twice(x, o, ready):
    # Four arrivals on each barrier: two phases, and only one is waited for.
    plgpu.barrier_arrive(ready)
    plgpu.barrier_arrive(ready)
    plgpu.barrier_wait(ready)
