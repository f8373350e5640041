# SPDX-License-Identifier: Apache-2.0
"""Copies between GMEM and SMEM in the emulator: what they move, and misuse of them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.refusal import refused, refused_by

F32 = jnp.float32
ASYNCHRONY = ("eager", "late", "random")


def tile_kernel(body, shape=(8, 4), out=None, **options):
    """A kernel with one tile in SMEM and one barrier; results have the tile's shape."""
    options.setdefault("interpret", plgpu.InterpretParams(asynchrony="random"))
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(out or shape, F32),
        scratch_types=[plgpu.SMEM(shape, F32), plgpu.Barrier()],
        **options,
    )


def ramp(*shape):
    return jnp.arange(np.prod(shape), dtype=F32).reshape(shape) + 1


@pytest.mark.parametrize("asynchrony", ASYNCHRONY)
def test_a_copy_there_and_back_is_the_identity(asynchrony):
    def body(x, o, tile, barrier):
        plgpu.copy_gmem_to_smem(x, tile, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(tile, o)
        plgpu.wait_smem_to_gmem(0)

    run = tile_kernel(body, interpret=plgpu.InterpretParams(asynchrony=asynchrony))
    np.testing.assert_array_equal(run(ramp(8, 4)), ramp(8, 4))


def test_a_load_over_the_edge_reads_zeros_and_a_store_is_clipped():
    def body(x, o, tile, barrier):
        window = (plgpu.ds(4 * lax.axis_index("i"), 4), slice(None))
        plgpu.copy_gmem_to_smem(x.at[window], tile, barrier)
        plgpu.barrier_wait(barrier)
        tile[...] += 1
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, o.at[window])
        plgpu.wait_smem_to_gmem(0)

    run = tile_kernel(body, (4, 4), out=(6, 4), grid=(2,), grid_names=("i",))
    np.testing.assert_array_equal(run(ramp(6, 4)), ramp(6, 4) + 1)


def test_elements_outside_are_zero():
    def body(x, o, tile, barrier):
        i = lax.axis_index("i")
        window = (plgpu.ds(i + 2, 4), slice(None))
        plgpu.copy_gmem_to_smem(x.at[window], tile, barrier)
        plgpu.barrier_wait(barrier)
        o[...] = tile[...]

    run = tile_kernel(body, (4, 4), grid=(1,), grid_names=("i",))
    want = np.concatenate([np.asarray(ramp(3, 4))[2:], np.zeros((3, 4))])
    np.testing.assert_array_equal(run(ramp(3, 4)), want)


@refused_by(
    lambda body: tile_kernel(body, (4, 4), grid=(1,), grid_names=("i",))(ramp(4, 4))
)
def test_a_promise_to_be_in_bounds_is_checked(x, o, tile, barrier):
    window = (plgpu.ds(lax.axis_index("i") + 2, 4), slice(None))
    plgpu.copy_gmem_to_smem(
        x.at[window],
        tile,
        barrier,
        oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
    )
    plgpu.barrier_wait(barrier)


@refused_by(
    lambda body: tile_kernel(body, (4, 4), grid=(1,), grid_names=("i",))(ramp(4, 4))
)
def test_a_store_that_lies_outside_as_a_whole_is_an_error(x, o, tile, barrier):
    plgpu.copy_gmem_to_smem(x, tile, barrier)
    plgpu.barrier_wait(barrier)
    window = (plgpu.ds(lax.axis_index("i") + 8, 4), slice(None))
    plgpu.copy_smem_to_gmem(tile, o.at[window])
    plgpu.wait_smem_to_gmem(0)


@pytest.mark.parametrize("asynchrony", ASYNCHRONY)
@refused
def test_reading_before_the_wait_is_a_race_however_quick_the_copy(asynchrony):
    def body(x, o, tile, barrier):
        plgpu.copy_gmem_to_smem(x, tile, barrier)
        o[...] = tile[...]
        plgpu.barrier_wait(barrier)

    run = tile_kernel(body, interpret=plgpu.InterpretParams(asynchrony=asynchrony))
    run(ramp(8, 4))


@pytest.mark.parametrize("asynchrony", ASYNCHRONY)
def test_overwriting_the_source_of_a_copy_is_a_race(asynchrony):
    def body(x, o, tile, barrier):
        plgpu.copy_gmem_to_smem(x, tile, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(tile, o)
        tile[0] = tile[1]
        plgpu.wait_smem_to_gmem(0)

    run = tile_kernel(body, interpret=plgpu.InterpretParams(asynchrony=asynchrony))
    with pytest.raises(errors.RaceError, match="written while the copy to output 0"):
        run(ramp(8, 4))


def test_overwriting_after_a_read_only_wait_is_legal():
    def body(x, o, tile, barrier):
        plgpu.copy_gmem_to_smem(x, tile, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(tile, o)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        tile[...] = jnp.zeros((8, 4))

    run = tile_kernel(body, interpret=plgpu.InterpretParams(asynchrony="late"))
    np.testing.assert_array_equal(run(ramp(8, 4)), ramp(8, 4))


@refused_by(lambda body: tile_kernel(body)(ramp(8, 4)))
def test_reading_the_destination_after_a_read_only_wait_is_a_race(x, o, tile, barrier):
    plgpu.copy_gmem_to_smem(x, tile, barrier)
    plgpu.barrier_wait(barrier)
    plgpu.copy_smem_to_gmem(tile, o)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    tile[...] = o[...]


@refused_by(lambda body: tile_kernel(body, (8, 32))(ramp(8, 32)))
def test_a_wait_for_all_but_one_group_frees_the_older_source_only(x, o, tile, barrier):
    plgpu.copy_gmem_to_smem(x, tile, barrier)
    plgpu.barrier_wait(barrier)
    for row in range(2):
        plgpu.copy_smem_to_gmem(tile.at[row], o.at[row])
    plgpu.wait_smem_to_gmem(1)
    tile[0] = jnp.zeros(32)
    tile[1] = jnp.zeros(32)
    plgpu.wait_smem_to_gmem(0)


@refused_by(lambda body: tile_kernel(body)(ramp(8, 4)))
def test_a_group_that_is_not_closed_is_not_waited_for(x, o, tile, barrier):
    plgpu.copy_gmem_to_smem(x, tile, barrier)
    plgpu.barrier_wait(barrier)
    plgpu.copy_smem_to_gmem(tile, o, commit_group=False)
    plgpu.wait_smem_to_gmem(0)


@refused_by(lambda body: tile_kernel(body)(ramp(8, 4)))
def test_a_store_needs_commit_smem_after_a_write(x, o, tile, barrier):
    tile[...] = x[...]
    plgpu.copy_smem_to_gmem(tile, o)
    plgpu.wait_smem_to_gmem(0)


@refused_by(lambda body: tile_kernel(body)(ramp(8, 4)))
def test_a_kernel_may_not_end_with_a_store_that_still_reads(x, o, tile, barrier):
    tile[...] = x[...]
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, o)


@refused_by(lambda body: tile_kernel(body)(ramp(8, 4)))
def test_a_kernel_may_not_end_with_a_load_nobody_waited_for(x, o, tile, barrier):
    plgpu.copy_gmem_to_smem(x, tile, barrier)


def test_a_false_predicate_leaves_the_arrival_of_a_copy():
    def body(x, o, tile, barrier):
        i = lax.axis_index("i")
        tile[...] = jnp.full((8, 4), -1.0)
        plgpu.commit_smem()
        plgpu.copy_gmem_to_smem(x, tile, barrier, predicate=i > 0)
        plgpu.barrier_wait(barrier)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, o.at[plgpu.ds(8 * i, 8)])
        plgpu.wait_smem_to_gmem(0)

    run = tile_kernel(body, out=(16, 4), grid=(2,), grid_names=("i",))
    want = np.concatenate([np.full((8, 4), -1.0), ramp(8, 4)])
    np.testing.assert_array_equal(run(ramp(8, 4)), want)


def test_an_integer_index_of_gmem_is_squeezed():
    def body(x, o, tile, barrier):
        plgpu.copy_gmem_to_smem(x.at[lax.axis_index("i")], tile, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(tile, o.at[lax.axis_index("i")])
        plgpu.wait_smem_to_gmem(0)

    run = tile_kernel(body, out=(3, 8, 4), grid=(3,), grid_names=("i",))
    np.testing.assert_array_equal(run(ramp(3, 8, 4)), ramp(3, 8, 4))


@pytest.mark.parametrize("to_smem", [True, False])
@refused
def test_a_copy_starts_where_tma_can_address_smem(to_smem):
    """The start is known when the kernel runs; a GPU would report an address error."""

    def body(x, o, tile, full):
        eighth = lax.axis_index("g") * 8
        if to_smem:
            plgpu.copy_gmem_to_smem(x.at[pl_ds(eighth)], tile.at[pl_ds(eighth)], full)
            plgpu.barrier_wait(full)
        else:
            tile[...] = x[...]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile.at[pl_ds(eighth)], o.at[pl_ds(eighth)])
            plgpu.wait_smem_to_gmem(0)

    def pl_ds(start):
        return plgpu.ds(start, 8)

    x = np.arange(32, dtype=np.float32)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((32,), np.float32),
        grid=(2,),
        grid_names=("g",),
        scratch_types=[plgpu.SMEM((32,), np.float32), plgpu.Barrier()],
        interpret=True,
    )
    kernel(x)


# --- poison and bounds ----------------------------------------------------------------


def waited_copy(src, tile, barrier, **options):
    plgpu.copy_gmem_to_smem(src, tile, barrier, **options)
    plgpu.barrier_wait(barrier)


@refused_by(lambda body: tile_kernel(body)())
def test_a_store_of_unwritten_smem_is_an_error(o, tile, barrier):
    tile[0:6] = jnp.ones((6, 4))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, o)  # HERE
    plgpu.wait_smem_to_gmem(0)


@refused_by(lambda body: tile_kernel(body)())
def test_a_load_of_what_nobody_stored_carries_poison(o, tile, barrier):
    o[0:6] = jnp.ones((6, 4))
    plgpu.commit_gmem()
    plgpu.copy_gmem_to_smem(o, tile, barrier)  # HERE
    plgpu.barrier_wait(barrier)
    o[6] = tile[0]
    o[7] = tile[7]


def over_the_edge(keep, mode=plgpu.OOBFillMode.UNDEFINED):
    """Loads a tile half of which is outside, and stores rows that are kept."""

    def body(x, o, tile, barrier):
        waited_copy(x.at[plgpu.ds(lax.axis_index("i") + 4, 8)], tile, barrier,
                    oob_mode=mode)  # fmt: skip
        row = plgpu.broadcasted_iota(jnp.int32, (8, 4), 0)
        o[...] = jnp.where(row < keep, tile[...], 0.0)

    return tile_kernel(body, grid=(1,), grid_names=("i",))


def test_a_where_removes_undefined_elements():
    want = np.concatenate([ramp(8, 4)[4:], np.zeros((4, 4))])
    np.testing.assert_array_equal(over_the_edge(4)(ramp(8, 4)), want)
    run = over_the_edge(8, plgpu.OOBFillMode.ZEROS)
    np.testing.assert_array_equal(run(ramp(8, 4)), want)


def test_undefined_elements_that_are_used_are_an_error():
    with pytest.raises(errors.UninitializedReadError, match="undefined") as caught:
        over_the_edge(5)(ramp(8, 4))
    assert "waited_copy" in str(caught.value)


@refused_by(lambda body: tile_kernel(body)(ramp(8, 4)))
def test_what_nobody_wrote_is_not_taken_for_what_is_outside(x, o, tile, barrier):
    waited_copy(o, tile, barrier, oob_mode=plgpu.OOBFillMode.UNDEFINED)
    o[...] = tile[...]


def test_a_store_may_clip_undefined_elements():
    def body(x, o, tile, barrier):
        window = plgpu.ds(4 * lax.axis_index("i"), 8)
        waited_copy(x.at[window], tile, barrier,
                    oob_mode=plgpu.OOBFillMode.UNDEFINED)  # fmt: skip
        tile[...] = tile[...] * 2
        plgpu.commit_smem()

        @plgpu.when(lax.axis_index("i") == 1)
        def _():
            plgpu.copy_smem_to_gmem(tile, o.at[window])
            plgpu.wait_smem_to_gmem(0)

        @plgpu.when(lax.axis_index("i") == 0)
        def _():
            plgpu.copy_smem_to_gmem(tile.at[0:4], o.at[0:4])
            plgpu.wait_smem_to_gmem(0)

    run = tile_kernel(body, grid=(2,), grid_names=("i",))
    np.testing.assert_array_equal(run(ramp(8, 4)), 2 * ramp(8, 4))


def test_a_load_that_lies_outside_as_a_whole_is_an_error_unless_it_is_meant():
    def body(x, o, tile, barrier, **mode):
        i = lax.axis_index("i")
        plgpu.copy_gmem_to_smem(x.at[plgpu.ds(i + 8, 8)], tile, barrier, **mode)
        plgpu.barrier_wait(barrier)
        o[...] = tile[...]

    grid = {"grid": (1,), "grid_names": ("i",)}
    with pytest.raises(errors.OutOfBoundsError, match="entirely out of bounds"):
        tile_kernel(body, **grid)(ramp(8, 4))
    zeros = functools.partial(body, oob_mode=plgpu.OOBFillMode.ZEROS)
    np.testing.assert_array_equal(tile_kernel(zeros, **grid)(ramp(8, 4)), 0)


@pytest.mark.parametrize("load", [True, False])
def test_an_index_of_a_copy_stays_inside(load):
    def body(x, o, tile, barrier):
        i = lax.axis_index("i") + 3
        if load:
            waited_copy(x.at[i], tile, barrier, oob_mode=plgpu.OOBFillMode.ZEROS)
        else:
            waited_copy(x.at[0], tile, barrier)
            plgpu.copy_smem_to_gmem(tile, o.at[i])

    run = tile_kernel(body, out=(3, 8, 4), grid=(1,), grid_names=("i",))
    with pytest.raises(errors.OutOfBoundsError, match=r"cop(ied|y) out of bounds"):
        run(jnp.zeros((3, 8, 4)))


@pytest.mark.parametrize("rank", [5, 6])
def test_a_range_of_a_dimension_without_a_bound_stays_inside(rank):
    shape = (2, *(1,) * (rank - 3), 8, 4)
    gone = (0,) * (rank - 4)

    def body(x, o, tile, barrier):
        i = lax.axis_index("i") + 1
        src = x.at[(0, plgpu.ds(i, 1), *gone)]
        plgpu.copy_gmem_to_smem(src, tile, barrier, oob_mode=plgpu.OOBFillMode.ZEROS)
        plgpu.barrier_wait(barrier)
        o[...] = tile[...]

    run = tile_kernel(body, (1, 8, 4), grid=(1,), grid_names=("i",))
    if rank == 5:
        np.testing.assert_array_equal(run(jnp.ones(shape)), 0)
        return
    with pytest.raises(errors.OutOfBoundsError) as caught:
        run(jnp.ones(shape))
    assert "too many dimensions share a tensor map" in str(caught.value)
