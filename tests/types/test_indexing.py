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


def position(step=1):
    return lax.axis_index("i") * step


def rows(n=64):
    return lax.iota(jnp.int32, n)


def halves(ref):
    return ref.bitcast(jnp.bfloat16)


# Each is an error of the trace, or of the emulator where it depends on the position.
MISTAKES = {
    "an index outside": lambda x, o: x[64],  # HERE
    "a negative index outside": lambda x, o: x[-65],  # HERE
    "outside of a view": lambda x, o: x.at[0:8].at[8][...],  # HERE
    "a range outside": lambda x, o: o.set(x[plgpu.ds(62, 4)], np.s_[0:4]),  # HERE
    "a range to write": lambda x, o: o.set(x[0:4], plgpu.ds(-1, 4)),  # HERE
    "a dynamic index": lambda x, o: o.set(x[position() + 63], position()),  # HERE
    "a dynamic write": lambda x, o: o.set(x[0:32], plgpu.ds(position(33), 32)),  # HERE
    "a known array outside": lambda x, o: x[[0, 64]],  # HERE
    "a known NumPy array outside": lambda x, o: x[np.array([-65, 0])],  # HERE
    "more indices than dimensions": lambda x, o: x[0, 0, 0],  # HERE
    "a mask": lambda x, o: x[x[...] > 0],  # HERE
    "arrays that do not broadcast": lambda x, o: x[rows(8), rows(8)[:4]],  # HERE
    "an array without elements": lambda x, o: x[[]],  # HERE
    "a part of what an array selects": lambda x, o: x.at[rows()].at[0:8][...],  # HERE
    "an array and a new axis": lambda x, o: x[None, rows()],  # HERE
    "a bool": lambda x, o: x[True],  # HERE
    "a float": lambda x, o: x[1.5],  # HERE
    "a text": lambda x, o: x["0"],  # HERE
    "a reference": lambda x, o: x[x],  # HERE
    "a stride of -1": lambda x, o: x[::-1],  # HERE
    "a stride of -2": lambda x, o: x[63:0:-2],  # HERE
    "a dynamic size": lambda x, o: x[plgpu.ds(0, position())],  # HERE
    "dynamic bounds": lambda x, o: x[position() : position() + 4],  # HERE
    "a slice without elements": lambda x, o: x[4:4],  # HERE
    "a range of no elements": lambda x, o: x[plgpu.ds(0, 0)],  # HERE
    "a range of negative size": lambda x, o: x[plgpu.ds(0, -1)],  # HERE
    "a bitcast of half an element": lambda x, o: x.at[:, 0:3].bitcast("i8"),  # HERE
    "another memory space": lambda x, o: x.memory_space_cast(plgpu.SMEM)[0],  # HERE
    "a bitcast to bools": lambda x, o: x.bitcast(jnp.bool_),  # HERE
    "a bitcast of columns": lambda x, o: x.T.bitcast(jnp.int16)[0],  # HERE
    "a transpose to one dimension": lambda x, o: x.transpose(0, 0),  # HERE
    "a store of another dtype": lambda x, o: o.set(x[...].astype("f2")),  # HERE
    "a store of another dtype to a view": lambda x, o: halves(o).set(x[...]),  # HERE
    "a store of another shape": lambda x, o: o.set(x[0:4]),  # HERE
    "a store of a reference": lambda x, o: o.set(x),  # HERE
    "a store to an input": lambda x, o: x.set(0),  # HERE
    "a reshape to more elements": lambda x, o: x.reshape(128, 63),  # HERE
    "a reshape with two unknown sizes": lambda x, o: x.reshape(-1, -1),  # HERE
    "a reshape to no elements": lambda x, o: x.reshape(0, 64),  # HERE
    "a reshape to a text": lambda x, o: x.reshape("a"),  # HERE
    "a reshape with a remainder": lambda x, o: x.reshape(-1, 63),  # HERE
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
@refused
def test_what_does_not_fit_a_reference_is_refused(mistake):
    run(mistake, **GRID)


def test_a_reference_is_in_its_own_memory_space():
    def body(x, o):
        o[...] = x.memory_space_cast(plgpu.GMEM)[...]

    np.testing.assert_array_equal(make(body)(numbers()), numbers())


@refused_by(run)
def test_an_index_in_a_nested_body_is_checked_too(x, o):
    @plgpu.when(x[0, 0] == 0)
    def _():
        o[plgpu.ds(0, 65)] = jnp.zeros((65, 128), jnp.float32)  # HERE


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
def test_vmap_inside_a_body_makes_no_array_index(x, o):
    def row(i):
        return x[i]  # HERE

    o[0:4] = jax.vmap(row)(lax.iota(jnp.int32, 4))


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


def test_transposes_and_slices_chain():
    def body(x, o):
        o[...] = x.at[8:40].T.at[plgpu.ds(16, 64)].transpose((1, 0)).at[0:8][...]

    result = make(body, out=f32(8, 64))(numbers())
    np.testing.assert_array_equal(result, numbers()[8:16, 16:80])


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
