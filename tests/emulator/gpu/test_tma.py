# SPDX-License-Identifier: Apache-2.0
"""Copies between GMEM and SMEM in the emulator: what it reports, poison, bounds."""

from __future__ import annotations

import functools

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
X = np.arange(32, dtype=np.float32).reshape(8, 4) + 1
GRID = {"i": 1}


def run(body, args=(X,), shape=(8, 4), out=None, **options):
    """Runs a kernel with one tile in SMEM and one barrier."""
    scratch = plgpu.SMEM(shape, F32), plgpu.Barrier()
    return everywhere.emulate(body, args, f32(*(out or shape)), *scratch, **options)


def waited_copy(src, tile, barrier, **options):
    plgpu.copy_gmem_to_smem(src, tile, barrier, **options)
    plgpu.barrier_wait(barrier)


def test_overwriting_after_a_read_only_wait_is_legal():
    def body(x, o, tile, barrier):
        waited_copy(x, tile, barrier)
        plgpu.copy_smem_to_gmem(tile, o)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        tile[...] = jnp.zeros((8, 4))

    np.testing.assert_array_equal(run(body, asynchrony="late"), X)


REPORTED = in_each(run, asynchrony=["eager", "late", "random"])


@refused_by(REPORTED, grid=GRID, shape=(4, 4), args=[X[:4]])
def test_a_promise_to_be_in_bounds_that_is_broken(x, o, tile, barrier):
    window = x.at[plgpu.ds(lax.axis_index("i") + 2, 4)]
    promise = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
    waited_copy(window, tile, barrier, oob_mode=promise)


@refused_by(REPORTED, grid=GRID, shape=(4, 4), args=[X[:4]])
def test_a_store_that_lies_outside_as_a_whole(x, o, tile, barrier):
    waited_copy(x, tile, barrier)
    plgpu.copy_smem_to_gmem(tile, o.at[plgpu.ds(lax.axis_index("i") + 8, 4)])  # HERE
    plgpu.wait_smem_to_gmem(0)


def stores(values, target, meanwhile=lambda x, o, tile: None, **options):
    """Each CTA copies rows of its value to a part of the result."""

    def body(x, o, tile, barrier):
        i = lax.axis_index("i")
        plgpu.when(i == 0)(lambda: waited_copy(x, tile, barrier))
        own = [jnp.full((4, 4), value, F32) for value in values]
        tile[...] = jnp.where(i == 0, *own)
        plgpu.commit_smem()
        target(i, o, tile, **options)
        meanwhile(x, o, tile)
        plgpu.wait_smem_to_gmem(0)

    return body


def whole(i, o, tile, **options):
    plgpu.copy_smem_to_gmem(tile, o, **options)


def shifted(i, o, tile, **options):
    plgpu.copy_smem_to_gmem(tile, o.at[plgpu.ds(2 * i, 4)], **options)


def reshaped(i, o, tile, **options):
    plgpu.copy_smem_to_gmem(tile, o.reshape(4, 4), **options)


EQUAL, UNEQUAL = (7.0, 7.0), (7.0, 8.0)
TWO = {"args": [X[:4]], "shape": (4, 4), "grid": {"i": 2}}


@pytest.mark.parametrize("asynchrony", ["eager", "late", "random"])
@pytest.mark.parametrize(
    ("target", "shape"), [(whole, (4, 4)), (shifted, (6, 4)), (reshaped, (2, 8))]
)
def test_copies_of_equal_values_to_the_same_elements_are_no_race(
    target, shape, asynchrony
):
    options = {**TWO, "out": shape, "asynchrony": asynchrony, "seed": 1}
    result = run(stores(EQUAL, target), **options)
    np.testing.assert_array_equal(result, np.full(shape, 7.0))


def again(x, o, tile):
    plgpu.copy_smem_to_gmem(tile, o)


def test_a_cta_may_copy_the_same_values_twice():
    result = run(stores(EQUAL, whole, again), **TWO)
    np.testing.assert_array_equal(result, np.full((4, 4), 7.0))


def stored(x, o, tile):
    o[...] = jnp.full((4, 4), 7.0)


def loaded(x, o, tile):
    tile[...] = o[...]


@pytest.mark.parametrize("asynchrony", ["eager", "late", "random"])
@pytest.mark.parametrize(
    ("body", "shape"),
    [
        (stores(UNEQUAL, whole), (4, 4)),
        (stores(UNEQUAL, shifted), (6, 4)),
        (stores(UNEQUAL, reshaped), (2, 8)),
        # Another proxy, and a read.
        (stores(EQUAL, whole, stored), (4, 4)),
        (stores(EQUAL, whole, loaded), (4, 4)),
    ],
)
def test_other_accesses_to_the_elements_of_a_copy_are_a_race(body, shape, asynchrony):
    with pytest.raises(errors.RaceError):
        run(body, **TWO | {"out": shape, "asynchrony": asynchrony})


def test_a_copy_and_a_reduction_of_equal_values_are_a_race():
    def target(i, o, tile):
        plgpu.when(i == 0)(lambda: plgpu.copy_smem_to_gmem(tile, o))
        add = functools.partial(plgpu.copy_smem_to_gmem, reduction_op="add")
        plgpu.when(i == 1)(lambda: add(tile, o))

    with pytest.raises(errors.RaceError):
        run(stores(EQUAL, target), **TWO)


@refused_by(REPORTED)
def test_a_read_before_the_wait(x, o, tile, barrier):
    plgpu.copy_gmem_to_smem(x, tile, barrier)
    o[...] = tile[...]  # HERE
    plgpu.barrier_wait(barrier)


@refused_by(REPORTED)
def test_a_source_that_is_overwritten(x, o, tile, barrier):
    waited_copy(x, tile, barrier)
    plgpu.copy_smem_to_gmem(tile, o)
    tile[0] = tile[1]  # HERE
    plgpu.wait_smem_to_gmem(0)


@refused_by(REPORTED)
def test_a_destination_read_after_a_read_only_wait(x, o, tile, barrier):
    waited_copy(x, tile, barrier)
    plgpu.copy_smem_to_gmem(tile, o)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    tile[...] = o[...]  # HERE


@refused_by(REPORTED, shape=(8, 32), args=[np.ones((8, 32), "f4")])
def test_the_source_of_the_group_that_a_wait_leaves(x, o, tile, barrier):
    waited_copy(x, tile, barrier)
    for row in range(2):
        plgpu.copy_smem_to_gmem(tile.at[row], o.at[row])
    plgpu.wait_smem_to_gmem(1)
    tile[0] = jnp.zeros(32)
    tile[1] = jnp.zeros(32)  # HERE
    plgpu.wait_smem_to_gmem(0)


@refused_by(REPORTED)
def test_a_group_that_is_not_closed(x, o, tile, barrier):
    waited_copy(x, tile, barrier)
    plgpu.copy_smem_to_gmem(tile, o, commit_group=False)  # HERE
    plgpu.wait_smem_to_gmem(0)


@refused_by(REPORTED)
def test_a_store_that_still_reads_at_the_end(x, o, tile, barrier):
    tile[...] = x[...]
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, o)  # HERE


@refused_by(REPORTED)
def test_a_load_that_nobody_waited_for(x, o, tile, barrier):
    plgpu.copy_gmem_to_smem(x, tile, barrier)  # HERE


# The start is known when the kernel runs; a GPU would report an address error.
LINE = {"grid": {"g": 2}, "shape": (32,), "args": [np.arange(32, dtype=np.float32)]}


@refused_by(REPORTED, **LINE)
def test_a_load_to_where_tma_cannot_address_smem(x, o, tile, full):
    eighth = plgpu.ds(lax.axis_index("g") * 8, 8)
    engine = plgpu.AsyncCopyImplementation.TMA
    waited_copy(x.at[eighth], tile.at[eighth], full, implementation=engine)


@refused_by(REPORTED, **LINE)
def test_a_store_from_where_tma_cannot_address_smem(x, o, tile, full):
    eighth = plgpu.ds(lax.axis_index("g") * 8, 8)
    tile[...] = x[...]
    plgpu.commit_smem()
    o[eighth] = jnp.zeros(8)
    plgpu.commit_gmem()
    # Threads would copy it; a reduction of this type is one of TMA.
    plgpu.copy_smem_to_gmem(tile.at[eighth], o.at[eighth], reduction_op="add")  # HERE
    plgpu.wait_smem_to_gmem(0)


@refused_by(REPORTED)
def test_what_nobody_wrote_copied_as_if_it_were_outside(x, o, tile, barrier):
    waited_copy(o, tile, barrier, oob_mode=plgpu.OOBFillMode.UNDEFINED)
    o[...] = tile[...]


# --- poison and bounds ----------------------------------------------------------------


@refused_by(run, ())
def test_a_store_of_unwritten_smem_is_an_error(o, tile, barrier):
    tile[0:6] = jnp.ones((6, 4))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, o)  # HERE
    plgpu.wait_smem_to_gmem(0)


@refused_by(run, ())
def test_a_load_of_what_nobody_stored_carries_poison(o, tile, barrier):
    o[0:6] = jnp.ones((6, 4))
    plgpu.commit_gmem()
    plgpu.copy_gmem_to_smem(o, tile, barrier)  # HERE
    plgpu.barrier_wait(barrier)
    o[6] = tile[0]
    o[7] = tile[7]


def over_the_edge(x, o, tile, barrier, keep=5, mode=plgpu.OOBFillMode.UNDEFINED):
    """Loads a tile half of which is outside, and stores rows that are kept."""
    part = x.at[plgpu.ds(lax.axis_index("i") + 4, 8)]
    waited_copy(part, tile, barrier, oob_mode=mode)
    row = plgpu.broadcasted_iota(jnp.int32, (8, 4), 0)
    o[...] = jnp.where(row < keep, tile[...], 0.0)


@pytest.mark.parametrize(("keep", "mode"), [(4, "UNDEFINED"), (8, "ZEROS")])
def test_a_where_removes_undefined_elements(keep, mode):
    want = np.concatenate([X[4:], np.zeros((4, 4))])
    options = {"keep": keep, "mode": plgpu.OOBFillMode[mode]}
    got = run(functools.partial(over_the_edge, **options), grid=GRID)
    np.testing.assert_array_equal(got, want)


test_undefined_elements_that_are_used = refused_by(run, grid=GRID)(over_the_edge)


def test_a_store_may_clip_undefined_elements():
    def body(x, o, tile, barrier):
        i = lax.axis_index("i")
        window, undefined = plgpu.ds(4 * i, 8), plgpu.OOBFillMode.UNDEFINED
        waited_copy(x.at[window], tile, barrier, oob_mode=undefined)
        tile[...] = tile[...] * 2
        plgpu.commit_smem()
        plgpu.when(i == 1)(lambda: plgpu.copy_smem_to_gmem(tile, o.at[window]))
        plgpu.when(i == 0)(lambda: plgpu.copy_smem_to_gmem(tile.at[0:4], o.at[0:4]))
        plgpu.wait_smem_to_gmem(0)

    np.testing.assert_array_equal(run(body, grid={"i": 2}), 2 * X)


def test_a_load_that_lies_outside_as_a_whole_is_an_error_unless_it_is_meant():
    def body(x, o, tile, barrier, **mode):
        waited_copy(x.at[plgpu.ds(lax.axis_index("i") + 8, 8)], tile, barrier, **mode)
        o[...] = tile[...]

    with pytest.raises(errors.OutOfBoundsError, match="entirely out of bounds"):
        run(body, grid=GRID)
    zeros = functools.partial(body, oob_mode=plgpu.OOBFillMode.ZEROS)
    np.testing.assert_array_equal(run(zeros, grid=GRID), 0)


@pytest.mark.parametrize("load", [True, False])
@refused_by(run, [np.zeros((3, 8, 4), np.float32)], out=(3, 8, 4), grid=GRID)
def test_an_index_of_a_copy_stays_inside(x, o, tile, barrier, *, load):
    i = lax.axis_index("i") + 3
    zeros = plgpu.OOBFillMode.ZEROS
    waited_copy(x.at[i if load else 0], tile, barrier, oob_mode=zeros)
    plgpu.copy_smem_to_gmem(tile, o.at[i])


def copy_along(x, o, tile, barrier):
    """A copy outside of the second dimension, of five or six."""
    src = x.at[(0, plgpu.ds(lax.axis_index("i") + 1, 1), *(0,) * (x.ndim - 4))]
    waited_copy(src, tile, barrier, oob_mode=plgpu.OOBFillMode.ZEROS)
    o[...] = tile[...]


def test_a_range_of_a_dimension_with_a_bound_may_be_outside():
    x = np.ones((2, 1, 1, 8, 4), np.float32)
    np.testing.assert_array_equal(run(copy_along, [x], (1, 8, 4), grid=GRID), 0)


test_a_range_of_a_dimension_without_a_bound_stays_inside = refused_by(
    run, [np.ones((2, 1, 1, 1, 8, 4), np.float32)], (1, 8, 4), grid=GRID
)(copy_along)
