# SPDX-License-Identifier: Apache-2.0
"""Reads and writes by elements: index arrays, strides and views, as in NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.indexed_programs import (
    COLUMNS,
    ROWS,
    SWIZZLED,
    WARPGROUP,
    X,
    in_smem,
)

# --- index expressions ----------------------------------------------------------------

STATIC = {
    "stride": np.s_[::2],
    "strides": np.s_[1::3, 5:101:4],
    "stride of one row": np.s_[3, ::8],
    "ds with a stride": np.s_[0:63:7],
    "list": np.s_[[0, 5, 63, -1], :],
    "known array": (slice(None), np.arange(0, 128, 2)),
    "known arrays": (np.array([1, 2, 3, 60]), np.array([3, 2, 1, 0])),
    "known grid": (np.array([[1], [7]]), np.array([[3, 2, 64, 65]])),
    "new axes": np.s_[None, 3, :, None],
    "new axes of a stride": np.s_[::2, None],
}


@pytest.mark.parametrize("name", STATIC)
@pytest.mark.parametrize("memory", ["gmem", "smem", "tiled"])
def test_a_read_means_what_numpy_means(name, memory):
    index = STATIC[name]

    def body(x, o, *smem):
        if smem:
            smem[0][...] = x[...]
            x = smem[0]
        o[...] = x[index]

    options = {"gmem": {}, "smem": in_smem(), "tiled": in_smem(SWIZZLED)}[memory]
    if name == "new axes" and memory == "tiled":
        pytest.skip("a row of a tiled array is not whole tiles")
    expected = X[index]
    everywhere.run(body, [X], expected, **options)


@pytest.mark.parametrize("name", [n for n in STATIC if "new" not in n])
@pytest.mark.parametrize("memory", ["gmem", "smem", "tiled"])
def test_a_write_means_what_numpy_means(name, memory):
    index = STATIC[name]
    expected = np.zeros((64, 128), np.float32)
    expected[index] = X[index] + 1

    def body(x, o, *smem):
        target = smem[0] if smem else o
        target[...] = jnp.zeros((64, 128), jnp.float32)
        target[index] = x[index] + 1
        if smem:
            o[...] = target[...]

    options = {"gmem": {}, "smem": in_smem(), "tiled": in_smem(SWIZZLED)}[memory]
    everywhere.run(body, [X], expected, **options)


GATHERS = {
    "rows": (lambda r, c: (r,), np.s_[ROWS]),
    "rows and all columns": (lambda r, c: (r, slice(None)), np.s_[ROWS, :]),
    "columns": (lambda r, c: (slice(None), c), np.s_[:, COLUMNS]),
    "columns of a range": (
        lambda r, c: (slice(8, 40), c),
        np.s_[8:40, COLUMNS],
    ),
    "columns of a stride": (
        lambda r, c: (slice(0, 64, 4), c),
        np.s_[::4, COLUMNS],
    ),
    "columns of a row": (lambda r, c: (7, c), np.s_[7, COLUMNS]),
    "a grid": (
        lambda r, c: (r[:, None], c[None]),
        np.s_[ROWS[:, None], COLUMNS[None]],
    ),
    "a transposed grid": (
        lambda r, c: (r[None], c[:, None]),
        np.s_[ROWS[None], COLUMNS[:, None]],
    ),
}


@pytest.mark.parametrize("name", GATHERS)
@pytest.mark.parametrize("memory", ["gmem", "smem", "tiled"])
def test_index_arrays_gather(name, memory):
    traced, known = GATHERS[name]

    def body(x, rows, columns, o, *smem):
        if smem:
            smem[0][...] = x[...]
            x = smem[0]
        o[...] = x[traced(rows[...], columns[...])]

    options = {"gmem": {}, "smem": in_smem(), "tiled": in_smem(SWIZZLED)}[memory]
    everywhere.run(body, [X, ROWS, COLUMNS], X[known], **options)


@pytest.mark.parametrize("name", GATHERS)
def test_index_arrays_scatter(name):
    traced, known = GATHERS[name]
    expected = np.zeros_like(X)
    values = np.arange(X[known].size, dtype=np.float32).reshape(X[known].shape)
    expected[known] = values

    def body(v, rows, columns, o):
        o[...] = jnp.zeros((64, 128), jnp.float32)
        o[traced(rows[...], columns[...])] = v[...]

    everywhere.run(body, [values, ROWS, COLUMNS], expected)


@pytest.mark.parametrize("shape", [(64, 128), (13, 9)])
def test_under_lane_indices_whose_layout_nobody_has_chosen_are_converted(shape):
    rows, columns = (np.arange(3) % n for n in shape)
    mask = np.arange(shape[1]) % 2 == 0

    def body(x, rows, columns, mask, whole, grid, masked, stored, sums):
        whole[...] = x[rows[...]]
        grid[...] = x[rows[...][:, None], columns[...][None]]
        masked[...] = plgpu.load(x, rows[...], mask=mask[...], other=-x[0:3])
        stored[...] = jnp.zeros(shape, jnp.float32)
        stored[rows[...]] = x[0:3]
        sums[...] = jnp.zeros(shape, jnp.float32)
        plgpu.atomic_add(sums.at[rows[...]], x[0:3], mask=mask[...])

    x = np.random.default_rng(3).integers(1, 99, shape).astype(np.float32)
    stored = np.zeros_like(x)
    stored[rows] = x[0:3]
    expected = [
        x[rows],
        x[np.ix_(rows, columns)],
        np.where(mask, x[rows], -x[0:3]),
        stored,
        stored * mask,
    ]
    arguments = [x, rows.astype(np.int32), columns.astype(np.int16), mask]
    everywhere.run(body, arguments, expected)


@everywhere.gives([X, ROWS], X[ROWS])
def test_under_lane_index_arrays_have_the_layout_of_the_result(x, index, o):
    rows = plgpu.Layout.WGMMA.reduce(1)
    found = plgpu.load(index, layout=rows, optimized=False)
    o[...] = plgpu.load(x, (found,), layout=plgpu.Layout.WGMMA)


@pytest.mark.parametrize("axis", [0, 1])
def test_under_lane_repeated_indices_are_converted_to_a_default_layout(axis):
    layout = plgpu.Layout.WGMMA.reduce(axis)

    def body(x, rows, columns, gathered, grid, sums):
        found = plgpu.load(rows, layout=layout, optimized=False)
        gathered[...] = x[found]
        grid[...] = x[found[:, None], columns[...][None]]
        sums[...] = jnp.zeros((64, 128), jnp.float32)
        plgpu.atomic_add(sums.at[found], 1.0)

    expected = [X[ROWS], X[np.ix_(ROWS, COLUMNS)], np.ones_like(X)]
    everywhere.run(body, [X, ROWS, COLUMNS], expected)


def test_under_lane_an_index_array_of_its_own_layout_gathers():
    def body(x, index, o):
        o[...] = x.reshape(-1)[index[...]]

    index = np.random.default_rng(2).permutation(1024).astype(np.int32)
    everywhere.run(body, [X, index], X.reshape(-1)[index])


@everywhere.gives(
    [
        np.arange(4 * 16 * 64, dtype=np.float32).reshape(4, 16, 64),
        np.array([3, 1], np.int32),
    ],
    lambda x, index: x[index, :, index * 8],
    semantics=WARPGROUP,
    executed=WARPGROUP,
)
def test_arrays_and_slices_of_three_dimensions(x, index, o):
    i = index[...]
    # Arrays that a slice separates have their axes in front.
    o[...] = x[i, :, i * 8]


@everywhere.gives([X], lambda x: 2 * x)
def test_a_dynamic_start_and_a_stride(x, o):
    def step(i, _):
        o[plgpu.ds(i, 16, 4)] = 2 * x[plgpu.ds(i, 16, 4)]

    lax.fori_loop(0, 4, step, None)


@everywhere.gives(
    [X, ROWS],
    lambda x, rows: x + 1.5 * np.isin(np.arange(64), rows[:16])[:, None],
    semantics=WARPGROUP,
    executed=WARPGROUP,
    out=X,
)
def test_an_update_by_elements_adds(x, rows, o):
    o[...] = x[...]
    o[rows[0:16]] += 1.5


def test_methods_of_views_read_and_write():
    expected = X.copy()
    expected[::2] = X[::2] + X[::2]
    expected[1::2] = X[::2]

    def body(x, o, s):
        s[...] = x[...]
        s.at[::2].addupdate(x[::2])
        old = s.at[1::2].swap(x[::2])
        o[...] = s[...] + 0 * jnp.sum(old)

    everywhere.run(body, [X], expected, **in_smem())


# --- views ----------------------------------------------------------------------------

VIEWS = {
    "reshape": (lambda r: r.reshape(128, 64), lambda x: x.reshape(128, 64)),
    "reshape to more": (lambda r: r.reshape(8, 8, -1), lambda x: x.reshape(8, 8, 128)),
    "flat": (lambda r: r.reshape(-1), lambda x: x.reshape(-1)),
    "reshape of a slice": (
        lambda r: r.at[8:24].reshape(4, 512),
        lambda x: x[8:24].reshape(4, 512),
    ),
    "reshape of columns": (
        lambda r: r.at[:, 0:64].reshape(16, 4, 64),
        lambda x: x[:, :64].reshape(16, 4, 64),
    ),
    "reshape of a stride": (
        lambda r: r.at[::2].reshape(64, 64),
        lambda x: x[::2].reshape(64, 64),
    ),
    "transpose of a reshape": (
        lambda r: r.reshape(32, 256).T,
        lambda x: x.reshape(32, 256).T,
    ),
    "reshape of a transpose": (
        lambda r: r.T.reshape(64, 128),
        lambda x: x.T.reshape(64, 128),
    ),
    "slice of a reshape": (
        lambda r: r.reshape(128, 64).at[3:67:2, 5],
        lambda x: x.reshape(128, 64)[3:67:2, 5],
    ),
    "same width": (lambda r: r.bitcast(jnp.int32), lambda x: x.view(np.int32)),
    "narrower": (lambda r: r.bitcast(jnp.uint16), lambda x: x.view(np.uint16)),
    "bytes of a slice": (
        lambda r: r.at[8].bitcast(jnp.uint8),
        lambda x: x[8].view(np.uint8),
    ),
    "same width of a stride": (
        lambda r: r.at[::2].bitcast(jnp.uint32),
        lambda x: x[::2].view(np.uint32),
    ),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("memory", ["gmem", "smem"])
def test_a_view_has_the_elements_in_numpys_order(name, memory):
    of_ref, of_array = VIEWS[name]
    expected = np.ascontiguousarray(of_array(X))

    def body(x, o, *smem):
        if smem:
            smem[0][...] = x[...]
            x = smem[0]
        view = of_ref(x)
        assert view.shape == expected.shape and view.dtype == expected.dtype
        o[...] = view[...]

    options = in_smem() if memory == "smem" else {}
    everywhere.run(body, [X], expected, **options)


@everywhere.gives(
    [np.arange(64 * 128, dtype=np.int8).reshape(64, 128)], lambda x: x.view(np.int32)
)
def test_a_view_of_wider_elements(x, o):
    o[...] = x.bitcast(jnp.int32)[...]


@everywhere.gives([X], lambda x: x.astype(np.int32).view(np.float32))
def test_a_view_is_written(x, o):
    o.reshape(-1).bitcast(jnp.int32)[...] = x.reshape(64 * 128)[...].astype(jnp.int32)


def test_narrow_elements_of_wider_ones_are_written():
    def body(x, o):
        o[...] = x[...]
        o.bitcast(jnp.uint16)[:, ::2] = jnp.zeros((64, 128), jnp.uint16)

    expected = X.copy()
    expected.view(np.uint16)[:, ::2] = 0
    everywhere.run(body, [X], expected)


@pytest.mark.parametrize("transforms", [SWIZZLED, (plgpu.TilingTransform((8, 32)),)])
def test_a_tiled_array_is_reshaped_in_logical_order(transforms):
    def body(x, o, s):
        s[...] = x[...]
        o[...] = s.reshape(32, 256).T[...]

    expected = X.reshape(32, 256).T
    everywhere.run(body, [X], expected, **in_smem(transforms))
