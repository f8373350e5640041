# SPDX-License-Identifier: Apache-2.0
"""Memory of the emulator: poison, masks, bounds, and parts of arrays."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.emulator.engine.memory import Memory, Region
from pallas_gpu.layouts.window import Window
from tests.support import everywhere
from tests.support.refusal import refused, refused_by

F32 = jnp.float32


def run(body, dtype=F32, **options):
    """Runs a kernel whose result is four numbers, with a tile in SMEM."""
    out, tile = np.zeros(4, dtype), plgpu.SMEM((4, 4), dtype)
    return everywhere.emulate(body, (), out, tile, **options)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32])
@refused
def test_reading_what_nobody_wrote_is_an_error(dtype):
    def body(o, tile):
        tile[0:2] = jnp.ones((2, 4), dtype)
        o[...] = tile[1] + tile[2]

    run(body, dtype)


def test_uninitialized_memory_can_be_zero():
    def body(o, tile):
        o[...] = tile[1] + 1

    got = run(body, uninitialized_memory="zero")
    np.testing.assert_array_equal(got, np.ones(4))


@refused_by(run)
def test_elements_of_a_result_that_nobody_stores_are_an_error(o, tile):
    o[0:2] = jnp.ones(2)  # HERE


def test_results_may_be_partial_on_request():
    def body(o, tile):
        tile[0, 0] = 1.0
        o[0:2] = tile[0, 0:2]

    got = run(body, partial_results=True)
    np.testing.assert_array_equal(got, [1, np.nan, np.nan, np.nan])


@refused_by(run)
def test_reading_an_output_before_it_is_written_is_an_error(o, tile):
    o[0] = o[1]


def dynamic(value):
    return lax.fori_loop(0, value, lambda _, i: i + 1, 0)


@refused_by(run)
def test_a_dynamic_index_out_of_bounds_is_an_error(o, tile):
    tile[...] = jnp.ones((4, 4))
    o[...] = tile[dynamic(4)]


@refused_by(run)
def test_a_dynamic_slice_out_of_bounds_is_an_error_when_written(o, tile):
    tile[plgpu.ds(dynamic(3), 2)] = jnp.ones((2, 4))


def test_reads_out_of_bounds_can_be_poison():
    def body(o, tile):
        tile[...] = jnp.ones((4, 4))
        o[0:2] = tile[plgpu.ds(dynamic(3), 2), 0]
        o[2:4] = jnp.ones(2)

    got = run(body, out_of_bounds_reads="uninitialized")
    np.testing.assert_array_equal(got[:2], [1, np.nan])


@settings(max_examples=40)
@given(st.data())
def test_a_region_reads_and_writes_what_numpy_indexing_does(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    starts, sizes, kept = [], [], []
    for n in shape:
        start = data.draw(st.integers(0, n - 1))
        keep = data.draw(st.booleans())
        starts.append(start)
        sizes.append(data.draw(st.integers(1, n - start)) if keep else 1)
        kept.append(keep)
    axes = [a for a, k in enumerate(kept) if k]
    order = tuple(data.draw(st.permutations(axes)))
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    memory = Memory("m", values.copy(), None)
    window = Window(shape, tuple(starts), tuple(sizes), order, (1,) * len(shape))
    region = Region(memory, window)
    index = tuple(
        slice(s, s + n) if k else s for s, n, k in zip(starts, sizes, kept, strict=True)
    )
    want = values[index]
    want = np.transpose(want, [sorted(order).index(a) for a in order])
    np.testing.assert_array_equal(region.load(), want)
    np.testing.assert_array_equal(region.load_clipped(0), want)
    region.store(want + 100)
    np.testing.assert_array_equal(region.load(), want + 100)
    assert (memory.data != values).sum() == want.size


@settings(max_examples=40)
@given(
    start=st.tuples(st.integers(-3, 6), st.integers(-3, 6)),
    size=st.tuples(st.integers(1, 6), st.integers(1, 6)),
)
def test_a_clipped_region_is_a_window_of_the_padded_array(start, size):
    values = np.arange(1, 21, dtype=np.float32).reshape(4, 5)
    memory = Memory("m", values.copy(), None)
    region = Region(memory, Window((4, 5), start, size, (0, 1), (1, 1)))
    padded = np.pad(values, 12)
    index = tuple(slice(s + 12, s + 12 + n) for s, n in zip(start, size, strict=True))
    np.testing.assert_array_equal(region.load_clipped(0), padded[index])
    np.testing.assert_array_equal(region.inside_mask(), padded[index] != 0)
    region.store_clipped(padded[index] + 100, True)
    inside = np.zeros_like(padded, bool)
    inside[index] = True
    changed = np.where(inside[12:16, 12:17], values + 100, values)
    np.testing.assert_array_equal(memory.data, changed)
