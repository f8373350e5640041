# SPDX-License-Identifier: Apache-2.0
"""What the copies refuse, and what they say."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.entry_kernels import TILE, numbers, run
from tests.support.refusal import refused

BARRIER = plgpu.Barrier()
SCRATCH = (TILE, BARRIER)
TILED = plgpu.SMEM(
    (64, 128),
    jnp.float32,
    transforms=(plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)),
)


def test_a_load_takes_its_source_from_gmem():
    def body(x, o, tile, barrier):
        plgpu.copy_gmem_to_smem(tile, x, barrier)  # HERE

    with refused(
        errors.MemorySpaceError,
        "copy_gmem_to_smem: the source is in the wrong memory space",
        expected="GMEM",
        got="SMEM float32[64, 128]",
        hint="swap the operands",
    ):
        run(body, scratch_types=SCRATCH)


def test_a_load_goes_to_smem():
    def body(x, o, tile, barrier):
        plgpu.copy_gmem_to_smem(x, o, barrier)  # HERE

    with refused(
        errors.MemorySpaceError,
        "copy_gmem_to_smem: the destination is in the wrong memory space",
        got="GMEM float32[64, 128]",
        hint="plgpu.SMEM(shape, dtype)",
    ):
        run(body, scratch_types=SCRATCH)


def test_a_store_takes_its_source_from_smem():
    def body(x, o, tile, barrier):
        plgpu.copy_smem_to_gmem(x, o)  # HERE

    with refused(
        errors.MemorySpaceError,
        "copy_smem_to_gmem: the source is in the wrong memory space",
        expected="SMEM",
    ):
        run(body, scratch_types=SCRATCH)


def test_a_copy_moves_references_not_values():
    def body(x, o, tile, barrier):
        plgpu.copy_gmem_to_smem(x[...], tile, barrier)  # HERE

    with refused(
        errors.ArgumentTypeError,
        "copy_gmem_to_smem: the source is not a reference",
        hint=".at[...]",
    ):
        run(body, scratch_types=SCRATCH)


def test_a_barrier_is_no_place_to_copy_to():
    def body(x, o, tile, barrier):
        plgpu.copy_gmem_to_smem(x, barrier, barrier)  # HERE

    with refused(
        errors.MemorySpaceError,
        "copy_gmem_to_smem: the destination is in the wrong memory space",
        got="a barrier of shape ()",
    ):
        run(body, scratch_types=SCRATCH)


def test_shapes_of_a_copy_agree():
    def body(x, o, tile, barrier):
        plgpu.copy_gmem_to_smem(x.at[0:32], tile, barrier)  # HERE

    with refused(
        errors.ShapeError,
        "copy_gmem_to_smem: source and destination have different shapes",
        expected="SMEM float32[64, 128] (the destination)",
        got="GMEM float32[32, 128] (the source)",
    ):
        run(body, scratch_types=SCRATCH)


def test_dtypes_of_a_copy_agree():
    def body(x, o, tile, barrier):
        plgpu.copy_gmem_to_smem(x, tile, barrier)  # HERE

    with refused(
        errors.DTypeError,
        "copy_gmem_to_smem: source and destination have different element types",
        expected="SMEM int32[64, 128] (the destination)",
        got="GMEM float32[64, 128] (the source)",
        hint="astype",
    ):
        run(body, scratch_types=(plgpu.SMEM((64, 128), jnp.int32), BARRIER))


# Without it, threads carry what TMA cannot.
BY_TMA = {"implementation": plgpu.AsyncCopyImplementation.TMA}


def test_a_load_by_tma_needs_a_barrier():
    def body(x, o, tile):
        plgpu.copy_gmem_to_smem(x, tile, **BY_TMA)  # HERE

    with refused(
        errors.MemorySpaceError,
        "copy_gmem_to_smem: the barrier is missing",
        hint="plgpu.Barrier()",
    ):
        run(body, scratch_types=(TILE,))


def test_a_copy_of_a_tiled_array_takes_whole_tiles():
    def body(x, o, tile, barrier):
        plgpu.copy_gmem_to_smem(x.at[0:4], tile.at[0:4], barrier, **BY_TMA)  # HERE

    with refused(
        errors.LayoutError,
        "a part of a tiled SMEM array cuts through its tiles",
        expected="multiples of the tiling (8, 32)",
        got="a part of sizes (4, 128)",
    ):
        run(body, scratch_types=(TILED, BARRIER))


@pytest.mark.parametrize("row", [4, 3])
def test_a_copy_starts_with_a_tile(row):
    def body(x, o, tile, barrier):
        plgpu.copy_gmem_to_smem(  # HERE
            x.at[0:8], tile.at[row : row + 8], barrier, **BY_TMA
        )

    with refused(
        errors.LayoutError,
        "a part of a tiled SMEM array cuts through its tiles",
        got=f"starts ({row}, 0)",
    ):
        run(body, scratch_types=(TILED, BARRIER))


def test_a_copy_starts_at_128_bytes_of_smem():
    def body(x, o, rows, barrier):
        plgpu.copy_gmem_to_smem(x.at[0, 0:16], rows.at[1], barrier, **BY_TMA)  # HERE

    with refused(
        errors.LayoutError,
        "the SMEM part of a copy does not start where TMA can address SMEM",
        expected="a multiple of 128 bytes",
        got="64 bytes, the element (1, 0)",
    ):
        run(body, scratch_types=(plgpu.SMEM((4, 16), jnp.float32), BARRIER))


def test_a_copy_to_smem_fills_one_piece():
    def body(x, o, tile, barrier):
        plgpu.copy_gmem_to_smem(  # HERE
            x.at[:, 0:32], tile.at[:, 0:32], barrier, **BY_TMA
        )

    with refused(
        errors.LayoutError,
        "a part of an SMEM array is not contiguous",
        got="sizes (64, 32) of an array of shape (64, 128)",
    ):
        run(body, scratch_types=(TILED, BARRIER))


def test_a_copy_stays_inside_of_smem():
    def body(x, o, tile, barrier):
        part = tile.at[plgpu.ds(60, 8)]
        plgpu.copy_gmem_to_smem(x.at[0:8], part, barrier)  # HERE

    with refused(
        errors.OutOfBoundsError,
        "copy_gmem_to_smem outside the reference",
        got="60 to 68",
    ):
        run(body, scratch_types=SCRATCH)


def test_a_copy_may_reach_over_the_edge_of_gmem():
    def body(x, o, tile, barrier):
        plgpu.copy_gmem_to_smem(x.at[plgpu.ds(-4, 64)], tile, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(tile, o)
        plgpu.wait_smem_to_gmem(0)

    padded = np.concatenate([np.zeros((4, 128), np.float32), numbers()])
    np.testing.assert_array_equal(run(body, scratch_types=SCRATCH), padded[:64])


def test_a_copy_keeps_the_order_of_dimensions():
    def body(x, o, tile, barrier):
        plgpu.copy_gmem_to_smem(x.T, tile, barrier, **BY_TMA)  # HERE

    with refused(
        errors.UnsupportedError,
        "a copy by TMA cannot transpose",
        got="(1, 0)",
    ):
        run(body, scratch_types=(plgpu.SMEM((128, 64), jnp.float32), BARRIER))


def test_threads_copy_what_tma_refuses():
    def body(x, o, tile, barrier):
        plgpu.copy_gmem_to_smem(x.T, tile.T, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_gmem_to_smem(x.at[3:6, 1:6], tile.at[3:6, 1:6], barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(tile.at[:, 0:32], o.at[:, 0:32])
        plgpu.copy_smem_to_gmem(tile.at[:, 32:], o.at[:, 32:])

    np.testing.assert_array_equal(run(body, scratch_types=(TILED, BARRIER)), numbers())


def test_threads_cannot_copy_a_multicast():
    def body(x, o, tile, barrier):
        plgpu.copy_gmem_to_smem(  # HERE
            x, tile, barrier, collective_axes="g",
            implementation=plgpu.AsyncCopyImplementation.CP_ASYNC,
        )  # fmt: skip

    with refused(
        errors.UnsupportedError,
        "copy_gmem_to_smem: cp.async has no multicast",
        got="implementation=CP_ASYNC",
    ):
        run(body, scratch_types=SCRATCH)


@pytest.mark.parametrize("n", [-1, True, "1", 1.0])
def test_the_number_of_copies_in_flight_is_an_integer(n):
    def body(x, o):
        plgpu.wait_gmem_to_smem(n)  # HERE

    with refused(errors.ArgumentError, "wait_gmem_to_smem: invalid number of copies"):
        run(body)


def test_a_predicate_is_one_truth_value():
    def body(x, o, tile, barrier):
        many = jnp.array([True, False])
        plgpu.copy_gmem_to_smem(x, tile, barrier, predicate=many)  # HERE

    with refused(
        errors.ShapeError,
        "copy_gmem_to_smem: the predicate is not a scalar bool",
        got="bool[2]",
    ):
        run(body, scratch_types=SCRATCH)


@pytest.mark.parametrize("n", [-1, 1.0, True, None])
def test_a_wait_counts_groups(n):
    def body(x, o):
        plgpu.wait_smem_to_gmem(n)  # HERE

    with refused(
        errors.ArgumentError, "wait_smem_to_gmem: invalid number of groups", got=repr(n)
    ):
        run(body)


@pytest.mark.parametrize("name", ["commit_smem", "commit_gmem"])
def test_a_fence_outside_of_a_kernel_is_refused(name):
    fence = getattr(plgpu, name)
    with refused(errors.KernelError, f"{name} is called outside a kernel"):
        fence()  # HERE


def test_vmap_inside_a_body_does_not_reach_a_copy():
    def body(x, o, tile, barrier):
        def copy(on):
            plgpu.copy_gmem_to_smem(x, tile, barrier, predicate=on)  # HERE

        jax.vmap(copy)(jnp.array([True, False]))

    with refused(
        errors.UnsupportedError,
        "jax.vmap inside a kernel reached copy_gmem_to_smem",
        hint="vmap the whole kernel",
    ):
        run(body, scratch_types=SCRATCH)
