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


@pytest.mark.parametrize("rows", [np.arange(64), jnp.arange(64)])
def test_an_array_is_no_index(rows):
    def body(x, o):
        o[...] = x[rows]  # HERE

    with refused(
        errors.UnsupportedError,
        "a reference is indexed with an array",
        got="shape (64,)",
        hint="`x_ref[index_ref[i]]` in a loop",
    ):
        run(body)


def test_a_traced_array_is_no_index():
    def body(x, o):
        o[...] = x[lax.iota(jnp.int32, 64) + lax.axis_index("i")]  # HERE

    with refused(errors.UnsupportedError, "a reference is indexed with an array"):
        run(body, **GRID)


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


def test_an_index_makes_no_new_axis():
    def body(x, o):
        x[:, None]  # HERE

    with refused(
        errors.UnsupportedError, "a reference is indexed with a new axis", hint="load"
    ):
        run(body)


@pytest.mark.parametrize("rows", [slice(None, None, 2), plgpu.ds(0, 32, 2)])
def test_a_slice_has_no_stride(rows):
    def body(x, o):
        o[0:32] = x[rows]  # HERE

    with refused(
        errors.UnsupportedError,
        "a slice of a reference has a stride",
        expected="stride 1",
        got="stride 2",
    ):
        run(body)


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


def test_a_reference_is_not_reshaped():
    def body(x, o):
        o[...] = x.reshape(128, 64)[...].reshape(64, 128)  # HERE

    with refused(
        errors.UnsupportedError,
        "reshape of a reference is not supported",
        hint="read the reference and reshape the value",
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
