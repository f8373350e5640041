# SPDX-License-Identifier: Apache-2.0
"""What may stand between the brackets of a reference, and what a store takes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.types import resolve
from pallas_gpu.types.indexing import indexer
from tests.support.entry_kernels import TILE, f32, make, numbers, run
from tests.support.refusal import refused, refused_by

GRID = {"grid": (2,), "grid_names": ("i",)}


def entries(n: int) -> st.SearchStrategy:
    bound = st.one_of(st.none(), st.integers(-n, n))
    slices = st.builds(slice, bound, bound).filter(lambda s: len(range(n)[s]) > 0)
    return st.one_of(st.integers(-n, n - 1), slices)


@st.composite
def index_expressions(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    count = draw(st.integers(0, len(shape)))
    dots = draw(st.none() | st.integers(0, count))
    if dots is None:
        return shape, tuple(draw(entries(n)) for n in shape[:count])
    tail = len(shape) - (count - dots)
    left = [draw(entries(n)) for n in shape[:dots]]
    return shape, (*left, ..., *(draw(entries(n)) for n in shape[tail:]))


@given(index_expressions())
def test_static_indices_mean_what_numpy_means(case):
    shape, index = case
    array = np.arange(np.prod(shape)).reshape(shape)
    window = resolve(shape, [indexer(index, shape)])
    ranges = tuple(slice(low, high) for low, high in window.box())
    np.testing.assert_array_equal(
        array[ranges].reshape(window.shape), array[index].reshape(window.shape)
    )
    assert window.shape == np.shape(array[index])


@settings(max_examples=15)
@given(st.integers(-64, 63), st.integers(0, 127))
def test_negative_integers_count_from_the_end(row, column):
    window = resolve((64, 128), [indexer((row, column - 128), (64, 128))])
    assert window.starts == (row % 64, column)


@pytest.mark.parametrize("row", [64, -65])
@refused_by(run)
def test_a_static_index_lies_inside(x, o, *, row):
    o[0] = x[row]  # HERE


@refused_by(run)
def test_a_static_index_of_a_view_lies_inside_of_the_view(x, o):
    o[0] = x.at[0:8].at[8][...]  # HERE


@refused_by(run)
def test_a_static_range_of_a_read_lies_inside(x, o):
    o[0:4] = x[plgpu.ds(62, 4)]  # HERE


@refused_by(run)
def test_a_static_range_of_a_write_lies_inside(x, o):
    o[plgpu.ds(-1, 4)] = x[0:4]  # HERE


@refused_by(run)
def test_an_index_in_a_nested_body_is_checked_too(x, o):
    @plgpu.when(x[0, 0] == 0)
    def _():
        o[plgpu.ds(0, 65)] = jnp.zeros((65, 128), jnp.float32)  # HERE


@refused_by(run, **GRID)
def test_a_dynamic_index_is_checked_by_the_emulator(x, o):
    i = lax.axis_index("i")
    o[i] = x[i + 63]  # HERE


@refused_by(run, **GRID)
def test_a_dynamic_write_is_checked_by_the_emulator(x, o):
    i = lax.axis_index("i")
    o[plgpu.ds(i * 33, 32)] = x[0:32]  # HERE


@refused_by(run)
def test_there_are_not_more_indices_than_dimensions(x, o):
    o[0, 0] = x[0, 0, 0]  # HERE


@pytest.mark.parametrize("rows", [[0, 64], np.array([-65, 0])])
@refused_by(run)
def test_a_known_array_of_indices_lies_inside(x, o, *, rows):
    o[0:2] = x[rows]  # HERE


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint64])
def test_a_known_array_of_any_integers_has_indices(dtype):
    rows = np.array([0, 127 if dtype != np.int8 else -1], dtype)

    def body(x, o):
        o[...] = x.reshape(512, 16)[rows]

    x = numbers()
    expected = x.reshape(512, 16)[rows]
    out = jax.ShapeDtypeStruct((2, 16), np.float32)
    call = plgpu.kernel(body, out_type=out, interpret=plgpu.InterpretParams())
    np.testing.assert_array_equal(call(x), expected)


STATIC_OUTSIDE = {
    "a stride": np.s_[plgpu.ds(60, 4, 2)],
    "beside an array": (np.array([0, 5]), plgpu.ds(120, 9)),
    "before the start": (np.array([0, 5]), plgpu.ds(-1, 9)),
}


@pytest.mark.parametrize("index", STATIC_OUTSIDE.values(), ids=STATIC_OUTSIDE)
@pytest.mark.parametrize("access", ["read", "write", "atomic"])
@refused_by(run)
def test_static_indices_of_elements_lie_inside(x, o, *, index, access):
    match access:
        case "read":
            x.get(index)
        case "write":
            o.set(1.0, index)
        case "atomic":
            plgpu.atomic_add(o.at[index], 1.0)


def test_a_masked_static_index_may_be_outside():
    def body(x, o):
        o[...] = x[...]
        rows = lax.iota(jnp.int32, 4)[:, None] < 2
        o[0:4] = plgpu.load(x, plgpu.ds(60, 4, 2), mask=rows, other=7.0)

    x = numbers()
    got = run(body)
    np.testing.assert_array_equal(got[0:2], x[60:64:2])
    np.testing.assert_array_equal(got[2:4], np.full((2, 128), 7.0))


@refused
def test_a_large_known_array_is_an_argument():
    rows = np.random.default_rng(0).permutation(512) % 64

    def body(x, o):
        o[...] = x[rows, 0:128]  # HERE

    run(body)


@refused_by(run)
def test_a_mask_is_no_index(x, o):
    o[...] = x[x[...] > 0]  # HERE


@refused_by(run)
def test_index_arrays_have_shapes_that_broadcast(x, o):
    i = lax.iota(jnp.int32, 8)
    o[0, 0:8] = x[i, i[:4]]  # HERE


@refused_by(run)
def test_an_index_array_has_elements(x, o):
    o[0] = x[[]]  # HERE


@refused_by(run)
def test_a_part_of_what_an_index_array_selects_has_no_indices(x, o):
    o[0:8] = x.at[lax.iota(jnp.int32, 64)].at[0:8][...]  # HERE


@refused_by(run)
def test_arrays_and_new_axes_are_not_mixed(x, o):
    x[None, lax.iota(jnp.int32, 64)]  # HERE


@refused_by(run)
def test_vmap_inside_a_body_makes_no_array_index(x, o):
    def row(i):
        return x[i]  # HERE

    o[0:4] = jax.vmap(row)(lax.iota(jnp.int32, 4))


@pytest.mark.parametrize("index", [True, 1.5, "0"])
@refused_by(run)
def test_an_index_is_an_integer(x, o, *, index):
    o[0] = x[index]  # HERE


@refused_by(run)
def test_a_reference_is_no_index(x, o):
    o[0] = x[x]  # HERE


@pytest.mark.parametrize("rows", [slice(None, None, -1), slice(63, 0, -2)])
@refused_by(run)
def test_a_stride_is_positive(x, o, *, rows):
    o[0:32] = x[rows]  # HERE


@pytest.mark.parametrize(
    "part",
    [
        lambda x: x.at[::2],
        lambda x: x.at[lax.iota(jnp.int32, 64)],
    ],
    ids=["stride", "array"],
)
@refused_by(run, scratch_types=[TILE, plgpu.Barrier()])
def test_a_copy_takes_slices_of_stride_one(x, o, s, b, *, part):
    plgpu.copy_gmem_to_smem(part(x), part(s), b)  # HERE
    plgpu.barrier_wait(b)


@refused_by(run, **GRID)
def test_a_slice_has_a_static_size(x, o):
    o[...] = x[plgpu.ds(0, lax.axis_index("i"))]  # HERE


@refused_by(run, **GRID)
def test_bounds_of_a_slice_are_static(x, o):
    i = lax.axis_index("i")
    o[...] = x[i : i + 4]  # HERE


@refused_by(run)
def test_a_slice_names_elements(x, o):
    x[4:4]  # HERE


@pytest.mark.parametrize("shape", [(128, 63), (-1, -1), (0, 64), ("a",), (-1, 63)])
@refused_by(run)
def test_a_reshape_keeps_the_number_of_elements(x, o, *, shape):
    x.reshape(*shape)  # HERE


@refused_by(run)
def test_a_bitcast_keeps_whole_elements(x, o):
    x.at[:, 0:3].bitcast("int64")  # HERE


@refused_by(run)
def test_a_bitcast_is_not_of_bools(x, o):
    x.bitcast(jnp.bool_)  # HERE


@refused_by(run)
def test_a_bitcast_to_another_width_is_of_adjacent_elements(x, o):
    o[0, 0:128] = x.T.bitcast(jnp.int16)[0, 0:128].astype(jnp.float32)  # HERE


@refused_by(run)
def test_a_transpose_names_every_dimension(x, o):
    x.transpose(0, 0)  # HERE


def test_transposes_and_slices_chain():
    def body(x, o):
        o[...] = x.at[8:40].T.at[plgpu.ds(16, 64)].transpose((1, 0)).at[0:8][...]

    result = make(body, out=f32(8, 64))(numbers())
    np.testing.assert_array_equal(result, numbers()[8:16, 16:80])


@refused_by(run)
def test_a_stored_value_has_the_reference_dtype(x, o):
    o[...] = x[...].astype(jnp.float16)  # HERE


@refused_by(run)
def test_a_value_stored_to_a_view_has_the_dtype_of_the_view(x, o):
    o.bitcast(jnp.bfloat16)[...] = x[...]  # HERE


@refused_by(run)
def test_a_stored_value_has_the_reference_shape(x, o):
    o[...] = x[0:4]  # HERE


@refused_by(run)
def test_a_reference_is_not_stored(x, o):
    o[...] = x  # HERE


@pytest.mark.parametrize("size", [0, -1])
@refused_by(run)
def test_a_range_has_elements(x, o, *, size):
    o[...] = x[plgpu.ds(0, size)]  # HERE


@refused_by(run)
def test_an_input_is_not_written(x, o):
    x[...] = 0  # HERE


def test_a_python_number_fills_a_reference():
    def body(x, o):
        o[...] = 0
        o[1, 3] = 7
        o[2, 0:4] = 1.5

    expected = np.zeros((64, 128), np.float32)
    expected[1, 3], expected[2, :4] = 7, 1.5
    np.testing.assert_array_equal(run(body), expected)


def test_methods_of_a_reference_read_and_write():
    def body(x, o, tile):
        tile.set(x.get())
        old = tile.swap(x.at[1].get() * 2, 0)
        o[...] = tile.get()
        o.at[1].set(old)

    expected = numbers()
    expected[[0, 1]] = expected[1] * 2, expected[0]
    np.testing.assert_array_equal(run(body, scratch_types=[TILE]), expected)


def test_augmented_assignment_reads_and_writes():
    def body(x, o):
        o[...] = x[...]
        o[...] += 1
        o[3] *= 2

    expected = numbers() + 1
    expected[3] *= 2
    np.testing.assert_array_equal(run(body), expected)
