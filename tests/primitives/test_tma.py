# SPDX-License-Identifier: Apache-2.0
"""What the copies refuse, and what they say."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from tests.support.entry_kernels import TILE, numbers, run
from tests.support.refusal import refused, refused_by

BARRIER = plgpu.Barrier()
SCRATCH = (TILE, BARRIER)
TILED = plgpu.SMEM(
    (64, 128),
    jnp.float32,
    transforms=(plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)),
)


@refused_by(run, scratch_types=SCRATCH)
def test_a_load_takes_its_source_from_gmem(x, o, tile, barrier):
    plgpu.copy_gmem_to_smem(tile, x, barrier)  # HERE


@refused_by(run, scratch_types=SCRATCH)
def test_a_load_goes_to_smem(x, o, tile, barrier):
    plgpu.copy_gmem_to_smem(x, o, barrier)  # HERE


@refused_by(run, scratch_types=SCRATCH)
def test_a_store_takes_its_source_from_smem(x, o, tile, barrier):
    plgpu.copy_smem_to_gmem(x, o)  # HERE


@refused_by(run, scratch_types=SCRATCH)
def test_a_copy_moves_references_not_values(x, o, tile, barrier):
    plgpu.copy_gmem_to_smem(x[...], tile, barrier)  # HERE


@refused_by(run, scratch_types=SCRATCH)
def test_a_barrier_is_no_place_to_copy_to(x, o, tile, barrier):
    plgpu.copy_gmem_to_smem(x, barrier, barrier)  # HERE


@refused_by(run, scratch_types=SCRATCH)
def test_shapes_of_a_copy_agree(x, o, tile, barrier):
    plgpu.copy_gmem_to_smem(x.at[0:32], tile, barrier)  # HERE


@refused_by(run, scratch_types=(plgpu.SMEM((64, 128), jnp.int32), BARRIER))
def test_dtypes_of_a_copy_agree(x, o, tile, barrier):
    plgpu.copy_gmem_to_smem(x, tile, barrier)  # HERE


# Without it, threads carry what TMA cannot.
BY_TMA = {"implementation": plgpu.AsyncCopyImplementation.TMA}


@refused_by(run, scratch_types=(TILE,))
def test_a_load_by_tma_needs_a_barrier(x, o, tile):
    plgpu.copy_gmem_to_smem(x, tile, **BY_TMA)  # HERE


@refused_by(run, scratch_types=(TILED, BARRIER))
def test_a_copy_of_a_tiled_array_takes_whole_tiles(x, o, tile, barrier):
    plgpu.copy_gmem_to_smem(x.at[0:4], tile.at[0:4], barrier, **BY_TMA)  # HERE


@pytest.mark.parametrize("row", [4, 3])
@refused_by(run, scratch_types=(TILED, BARRIER))
def test_a_copy_starts_with_a_tile(x, o, tile, barrier, *, row):
    plgpu.copy_gmem_to_smem(  # HERE
        x.at[0:8], tile.at[row : row + 8], barrier, **BY_TMA
    )


@refused_by(run, scratch_types=(plgpu.SMEM((4, 16), jnp.float32), BARRIER))
def test_a_copy_starts_at_128_bytes_of_smem(x, o, rows, barrier):
    plgpu.copy_gmem_to_smem(x.at[0, 0:16], rows.at[1], barrier, **BY_TMA)  # HERE


@refused_by(run, scratch_types=(TILED, BARRIER))
def test_a_copy_to_smem_fills_one_piece(x, o, tile, barrier):
    plgpu.copy_gmem_to_smem(  # HERE
        x.at[:, 0:32], tile.at[:, 0:32], barrier, **BY_TMA
    )


@refused_by(run, scratch_types=SCRATCH)
def test_a_copy_stays_inside_of_smem(x, o, tile, barrier):
    part = tile.at[plgpu.ds(60, 8)]
    plgpu.copy_gmem_to_smem(x.at[0:8], part, barrier)  # HERE


def test_a_copy_may_reach_over_the_edge_of_gmem():
    def body(x, o, tile, barrier):
        plgpu.copy_gmem_to_smem(x.at[plgpu.ds(-4, 64)], tile, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(tile, o)
        plgpu.wait_smem_to_gmem(0)

    padded = np.concatenate([np.zeros((4, 128), np.float32), numbers()])
    np.testing.assert_array_equal(run(body, scratch_types=SCRATCH), padded[:64])


@refused_by(run, scratch_types=(plgpu.SMEM((128, 64), jnp.float32), BARRIER))
def test_a_copy_keeps_the_order_of_dimensions(x, o, tile, barrier):
    plgpu.copy_gmem_to_smem(x.T, tile, barrier, **BY_TMA)  # HERE


def test_threads_copy_what_tma_refuses():
    def body(x, o, tile, barrier):
        plgpu.copy_gmem_to_smem(x.T, tile.T, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_gmem_to_smem(x.at[3:6, 1:6], tile.at[3:6, 1:6], barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(tile.at[:, 0:32], o.at[:, 0:32])
        plgpu.copy_smem_to_gmem(tile.at[:, 32:], o.at[:, 32:])

    np.testing.assert_array_equal(run(body, scratch_types=(TILED, BARRIER)), numbers())


@refused_by(run, scratch_types=SCRATCH)
def test_threads_cannot_copy_a_multicast(x, o, tile, barrier):
    plgpu.copy_gmem_to_smem(  # HERE
        x, tile, barrier, collective_axes="g",
        implementation=plgpu.AsyncCopyImplementation.CP_ASYNC,
    )  # fmt: skip


@pytest.mark.parametrize("n", [-1, True, "1", 1.0])
@refused_by(run)
def test_the_number_of_copies_in_flight_is_an_integer(x, o, *, n):
    plgpu.wait_gmem_to_smem(n)  # HERE


@refused_by(run, scratch_types=SCRATCH)
def test_a_predicate_is_one_truth_value(x, o, tile, barrier):
    many = jnp.array([True, False])
    plgpu.copy_gmem_to_smem(x, tile, barrier, predicate=many)  # HERE


@pytest.mark.parametrize("n", [-1, 1.0, True, None])
@refused_by(run)
def test_a_wait_counts_groups(x, o, *, n):
    plgpu.wait_smem_to_gmem(n)  # HERE


@pytest.mark.parametrize("name", ["commit_smem", "commit_gmem"])
@refused
def test_a_fence_outside_of_a_kernel_is_refused(name):
    fence = getattr(plgpu, name)
    fence()  # HERE


@refused_by(run, scratch_types=SCRATCH)
def test_vmap_inside_a_body_does_not_reach_a_copy(x, o, tile, barrier):
    def copy(on):
        plgpu.copy_gmem_to_smem(x, tile, barrier, predicate=on)  # HERE

    jax.vmap(copy)(jnp.array([True, False]))
