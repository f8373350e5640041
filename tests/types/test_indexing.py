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
from pallas_gpu import errors
from pallas_gpu.types import resolve
from pallas_gpu.types.indexing import indexer
from tests.support.entry_kernels import TILE, f32, make, numbers, run
from tests.support.refusal import refused

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
def test_a_static_index_lies_inside(row):
    def body(x, o):
        o[0] = x[row]  # HERE

    with refused(
        errors.OutOfBoundsError,
        "an index is out of bounds",
        expected="-64 to 63 in dimension 0 of shape (64, 128)",
        got=f"index {row}",
    ):
        run(body)


def test_a_static_index_of_a_view_lies_inside_of_the_view():
    def body(x, o):
        o[0] = x.at[0:8].at[8][...]  # HERE

    with refused(
        errors.OutOfBoundsError,
        "an index is out of bounds",
        expected="-8 to 7 in dimension 0 of shape (8, 128)",
    ):
        run(body)


def test_a_static_range_of_a_read_lies_inside():
    def body(x, o):
        o[0:4] = x[plgpu.ds(62, 4)]  # HERE

    with refused(
        errors.OutOfBoundsError,
        "a read outside the reference",
        got="62 to 66",
    ):
        run(body)


def test_a_static_range_of_a_write_lies_inside():
    def body(x, o):
        o[plgpu.ds(-1, 4)] = x[0:4]  # HERE

    with refused(errors.OutOfBoundsError, "a write outside the reference"):
        run(body)


def test_an_index_in_a_nested_body_is_checked_too():
    def body(x, o):
        @plgpu.when(x[0, 0] == 0)
        def _():
            o[plgpu.ds(0, 65)] = jnp.zeros((65, 128), jnp.float32)  # HERE

    with refused(errors.OutOfBoundsError, "a write outside the reference"):
        run(body)


def test_a_dynamic_index_is_checked_by_the_emulator():
    def body(x, o):
        i = lax.axis_index("i")
        o[i] = x[i + 63]  # HERE

    with refused(
        errors.OutOfBoundsError,
        "input 0 (GMEM float32[64, 128]) is read out of bounds",
        got="index 64 in dimension 0",
        where="in warpgroup 0 of CTA (i=1)",
    ):
        run(body, **GRID)


def test_a_dynamic_write_is_checked_by_the_emulator():
    def body(x, o):
        i = lax.axis_index("i")
        o[plgpu.ds(i * 33, 32)] = x[0:32]  # HERE

    with refused(
        errors.OutOfBoundsError,
        "output 0 (GMEM float32[64, 128]) is written out of bounds",
    ):
        run(body, **GRID)


def test_there_are_not_more_indices_than_dimensions():
    def body(x, o):
        o[0, 0] = x[0, 0, 0]  # HERE

    with refused(
        errors.OutOfBoundsError,
        "a reference has fewer dimensions than the index",
        expected="at most 2 indices",
        got="3 indices",
    ):
        run(body)


@pytest.mark.parametrize("rows", [[0, 64], np.array([-65, 0])])
def test_a_known_array_of_indices_lies_inside(rows):
    def body(x, o):
        o[0:2] = x[rows]  # HERE

    with refused(
        errors.OutOfBoundsError,
        "an index is out of bounds",
        expected="-64 to 63 in dimension 0 of shape (64, 128)",
        got="in an array",
    ):
        run(body)


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
    "a stride": (np.s_[plgpu.ds(60, 4, 2)], "indices 60 to 66"),
    "beside an array": ((np.array([0, 5]), plgpu.ds(120, 9)), "indices 120 to 128"),
    "before the start": ((np.array([0, 5]), plgpu.ds(-1, 9)), "indices -1 to 7"),
}


@pytest.mark.parametrize("name", STATIC_OUTSIDE)
@pytest.mark.parametrize("access", ["read", "write", "atomic"])
def test_static_indices_of_elements_lie_inside(name, access):
    index, got = STATIC_OUTSIDE[name]

    accesses = {
        "read": lambda x, o: x.get(index),
        "write": lambda x, o: o.set(1.0, index),
        "atomic": lambda x, o: plgpu.atomic_add(o.at[index], 1.0),
    }

    def body(x, o):
        accesses[access](x, o)

    with pytest.raises(errors.OutOfBoundsError) as found:
        run(body)
    assert found.value.what == "an access outside the reference"
    assert found.value.got == got
    assert "test_indexing.py" in str(found.value)


def test_a_masked_static_index_may_be_outside():
    def body(x, o):
        o[...] = x[...]
        rows = lax.iota(jnp.int32, 4)[:, None] < 2
        o[0:4] = plgpu.load(x, plgpu.ds(60, 4, 2), mask=rows, other=7.0)

    x = numbers()
    got = run(body)
    np.testing.assert_array_equal(got[0:2], x[60:64:2])
    np.testing.assert_array_equal(got[2:4], np.full((2, 128), 7.0))


def test_a_large_known_array_is_an_argument():
    rows = np.random.default_rng(0).permutation(512) % 64

    def body(x, o):
        o[...] = x[rows, 0:128]  # HERE

    with refused(
        errors.UnsupportedError,
        "a reference is indexed with a large array that is known",
        hint="x_ref[index_ref[...]]",
    ):
        run(body)


def test_a_mask_is_no_index():
    def body(x, o):
        o[...] = x[x[...] > 0]  # HERE

    with refused(
        errors.UnsupportedError,
        "a reference is indexed with an array of bools",
        hint="plgpu.load(ref, mask=mask, other=0)",
    ):
        run(body)


def test_index_arrays_have_shapes_that_broadcast():
    def body(x, o):
        i = lax.iota(jnp.int32, 8)
        o[0, 0:8] = x[i, i[:4]]  # HERE

    with refused(
        errors.ShapeError, "index arrays of different shapes", got="(8,), (4,)"
    ):
        run(body)


def test_an_index_array_has_elements():
    def body(x, o):
        o[0] = x[[]]  # HERE

    with refused(errors.ShapeError, "an index array is empty"):
        run(body)


def test_a_part_of_what_an_index_array_selects_has_no_indices():
    def body(x, o):
        o[0:8] = x.at[lax.iota(jnp.int32, 64)].at[0:8][...]  # HERE

    with refused(
        errors.UnsupportedError,
        "a part of what an index array selects",
        hint="ref[index[0:8]]",
    ):
        run(body)


def test_arrays_and_new_axes_are_not_mixed():
    def body(x, o):
        x[None, lax.iota(jnp.int32, 64)]  # HERE

    with refused(
        errors.UnsupportedError, "a reference is indexed with arrays and new axes"
    ):
        run(body)


def test_vmap_inside_a_body_makes_no_array_index():
    def body(x, o):
        def row(i):
            return x[i]  # HERE

        o[0:4] = jax.vmap(row)(lax.iota(jnp.int32, 4))

    with refused(errors.UnsupportedError, "a reference is indexed with an array"):
        run(body)


@pytest.mark.parametrize("index", [True, 1.5, "0"])
def test_an_index_is_an_integer(index):
    def body(x, o):
        o[0] = x[index]  # HERE

    with refused(
        errors.ArgumentTypeError,
        "invalid index of a reference",
        got=repr(index),
    ):
        run(body)


def test_a_reference_is_no_index():
    def body(x, o):
        o[0] = x[x]  # HERE

    with refused(errors.UnsupportedError, "a reference is indexed with a reference"):
        run(body)


@pytest.mark.parametrize("rows", [slice(None, None, -1), slice(63, 0, -2)])
def test_a_stride_is_positive(rows):
    def body(x, o):
        o[0:32] = x[rows]  # HERE

    with refused(
        errors.UnsupportedError,
        "a slice of a reference has a stride that is not positive",
        expected="a stride of 1 or more",
    ):
        run(body)


@pytest.mark.parametrize(
    "part",
    [
        lambda x: x.at[::2],
        lambda x: x.at[lax.iota(jnp.int32, 64)],
    ],
    ids=["stride", "array"],
)
def test_a_copy_takes_slices_of_stride_one(part):
    def body(x, o, s, b):
        plgpu.copy_gmem_to_smem(part(x), part(s), b)  # HERE
        plgpu.barrier_wait(b)

    with pytest.raises(errors.UnsupportedError, match="reads, writes and atomics"):
        run(body, scratch_types=[TILE, plgpu.Barrier()])


def test_a_slice_has_a_static_size():
    def body(x, o):
        o[...] = x[plgpu.ds(0, lax.axis_index("i"))]  # HERE

    with refused(
        errors.UnsupportedError,
        "a slice of a reference has a size that is not static",
        hint="loop over parts of a constant size",
    ):
        run(body, **GRID)


def test_bounds_of_a_slice_are_static():
    def body(x, o):
        i = lax.axis_index("i")
        o[...] = x[i : i + 4]  # HERE

    with refused(
        errors.UnsupportedError,
        "a slice of a reference has a size that is not static",
        hint="`plgpu.ds(8 * i, 8)`",
    ):
        run(body, **GRID)


def test_a_slice_names_elements():
    def body(x, o):
        x[4:4]  # HERE

    with refused(errors.ShapeError, "a slice of a reference is empty", got="4:4"):
        run(body)


@pytest.mark.parametrize("shape", [(128, 63), (-1, -1), (0, 64), ("a",), (-1, 63)])
def test_a_reshape_keeps_the_number_of_elements(shape):
    def body(x, o):
        x.reshape(*shape)  # HERE

    with refused(
        errors.ShapeError,
        "reshape of a reference to another number of elements",
        expected="the product 8192",
    ):
        run(body)


def test_a_bitcast_keeps_whole_elements():
    def body(x, o):
        x.at[:, 0:3].bitcast("int64")  # HERE

    with refused(
        errors.ShapeError,
        "bitcast of a reference: the last dimension is not whole elements",
        got="3 in shape (64, 3)",
    ):
        run(body)


def test_a_bitcast_is_not_of_bools():
    def body(x, o):
        x.bitcast(jnp.bool_)  # HERE

    with refused(
        errors.DTypeError,
        "bitcast of a reference: elements of less than a byte, or bools",
    ):
        run(body)


def test_a_bitcast_to_another_width_is_of_adjacent_elements():
    def body(x, o):
        o[0, 0:128] = x.T.bitcast(jnp.int16)[0, 0:128].astype(jnp.float32)  # HERE

    with refused(
        errors.UnsupportedError,
        "bitcast of a reference to elements of another width",
        hint="bitcast the reference first",
    ):
        run(body)


def test_a_transpose_names_every_dimension():
    def body(x, o):
        x.transpose(0, 0)  # HERE

    with refused(
        errors.ArgumentError,
        "transpose of a reference: not a permutation of its dimensions",
        got="(0, 0)",
    ):
        run(body)


def test_transposes_and_slices_chain():
    def body(x, o):
        o[...] = x.at[8:40].T.at[plgpu.ds(16, 64)].transpose((1, 0)).at[0:8][...]

    result = make(body, out=f32(8, 64))(numbers())
    np.testing.assert_array_equal(result, numbers()[8:16, 16:80])


def test_a_stored_value_has_the_reference_dtype():
    def body(x, o):
        o[...] = x[...].astype(jnp.float16)  # HERE

    with refused(
        errors.DTypeError,
        "a value is stored into a reference of another element type",
        expected="GMEM float32[64, 128]",
        got="float16[64, 128]",
        hint=".astype(jnp.float32)",
    ):
        run(body)


def test_a_value_stored_to_a_view_has_the_dtype_of_the_view():
    def body(x, o):
        o.bitcast(jnp.bfloat16)[...] = x[...]  # HERE

    with refused(
        errors.DTypeError,
        "a value is stored into a reference of another element type",
        expected="GMEM bfloat16[64, 256]",
    ):
        run(body)


def test_a_stored_value_has_the_reference_shape():
    def body(x, o):
        o[...] = x[0:4]  # HERE

    with refused(
        errors.ShapeError,
        "a value is stored into a reference of another shape",
        expected="GMEM float32[64, 128]",
        got="float32[4, 128]",
    ):
        run(body)


def test_a_reference_is_not_stored():
    def body(x, o):
        o[...] = x  # HERE

    with refused(
        errors.ArgumentTypeError,
        "a reference is stored into a reference",
        got="GMEM float32[64, 128]",
        hint="[...]",
    ):
        run(body)


@pytest.mark.parametrize("size", [0, -1])
def test_a_range_has_elements(size):
    def body(x, o):
        o[...] = x[plgpu.ds(0, size)]  # HERE

    with refused(
        errors.ShapeError, "a slice of a reference is empty", got=f"ds(start, {size})"
    ):
        run(body)


def test_an_input_is_not_written():
    def body(x, o):
        x[...] = 0  # HERE

    with refused(
        errors.KernelError,
        "input 0 (GMEM float32[64, 128]) is written, but it is an input",
    ):
        run(body)


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
