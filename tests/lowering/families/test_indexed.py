# SPDX-License-Identifier: Apache-2.0
"""Reads and writes by elements: index arrays, strides, views and masks, as in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.entry_kernels import run
from tests.support.everywhere import check
from tests.support.refusal import refused

WARPGROUP = (plgpu.LoweringSemantics.Warpgroup,)
SWIZZLED = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
X = np.arange(64 * 128, dtype=np.float32).reshape(64, 128)
ROWS = np.random.default_rng(0).permutation(64).astype(np.int32)
COLUMNS = np.random.default_rng(1).permutation(128).astype(np.int32)


def kernel(body, shape, dtype=np.float32, **options):
    """Returns `make` for a kernel with one result."""
    out = jax.ShapeDtypeStruct(shape, dtype)
    return lambda interpret: plgpu.kernel(
        body, out_type=out, interpret=interpret, **options
    )


def in_smem(transforms=(), dtype=jnp.float32, shape=(64, 128)):
    return {"scratch_types": [plgpu.SMEM(shape, dtype, transforms=transforms)]}


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
    check(kernel(body, expected.shape, **options), [X], expected)


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
    check(kernel(body, (64, 128), **options), [X], expected)


GATHERS = {
    "rows": (lambda r, c: (r,), lambda: np.s_[ROWS]),
    "rows and all columns": (lambda r, c: (r, slice(None)), lambda: np.s_[ROWS, :]),
    "columns": (lambda r, c: (slice(None), c), lambda: np.s_[:, COLUMNS]),
    "columns of a range": (
        lambda r, c: (slice(8, 40), c),
        lambda: np.s_[8:40, COLUMNS],
    ),
    "columns of a stride": (
        lambda r, c: (slice(0, 64, 4), c),
        lambda: np.s_[::4, COLUMNS],
    ),
    "columns of a row": (lambda r, c: (7, c), lambda: np.s_[7, COLUMNS]),
    "a grid": (
        lambda r, c: (r[:, None], c[None]),
        lambda: np.s_[ROWS[:, None], COLUMNS[None]],
    ),
    "a transposed grid": (
        lambda r, c: (r[None], c[:, None]),
        lambda: np.s_[ROWS[None], COLUMNS[:, None]],
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
    expected = X[known()]
    make = kernel(body, expected.shape, **options)
    check(make, [X, ROWS, COLUMNS], expected, semantics=WARPGROUP, executed=WARPGROUP)


@pytest.mark.parametrize("name", GATHERS)
def test_index_arrays_scatter(name):
    traced, known = GATHERS[name]
    expected = np.zeros_like(X)
    values = np.arange(X[known()].size, dtype=np.float32).reshape(X[known()].shape)
    expected[known()] = values

    def body(v, rows, columns, o):
        o[...] = jnp.zeros((64, 128), jnp.float32)
        o[traced(rows[...], columns[...])] = v[...]

    make = kernel(body, (64, 128))
    arguments = [values, ROWS, COLUMNS]
    check(make, arguments, expected, semantics=WARPGROUP, executed=WARPGROUP)


def test_under_lane_index_arrays_have_the_layout_of_the_result():
    rows = plgpu.Layout.WGMMA.reduce(1)

    def body(x, index, o):
        found = plgpu.load(index, layout=rows, optimized=False)
        o[...] = plgpu.load(x, (found,), layout=plgpu.Layout.WGMMA)

    check(kernel(body, (64, 128)), [X, ROWS], X[ROWS])


def test_under_lane_an_index_array_of_its_own_layout_gathers():
    def body(x, index, o):
        o[...] = x.reshape(-1)[index[...]]

    index = np.random.default_rng(2).permutation(1024).astype(np.int32)
    check(kernel(body, (1024,)), [X, index], X.reshape(-1)[index])


def test_arrays_and_slices_of_three_dimensions():
    x = np.arange(4 * 16 * 64, dtype=np.float32).reshape(4, 16, 64)
    index = np.array([3, 1], np.int32)

    def body(x, index, o):
        i = index[...]
        # Arrays that a slice separates have their axes in front.
        o[...] = x[i, :, i * 8]

    make = kernel(body, (2, 16))
    expected = x[index, :, index * 8]
    check(make, [x, index], expected, semantics=WARPGROUP, executed=WARPGROUP)


def test_a_dynamic_start_and_a_stride():
    def body(x, o):
        def step(i, _):
            o[plgpu.ds(i, 16, 4)] = 2 * x[plgpu.ds(i, 16, 4)]

        lax.fori_loop(0, 4, step, None)

    check(kernel(body, (64, 128)), [X], 2 * X)


def test_an_update_by_elements_adds():
    expected = X.copy()
    expected[ROWS[:16]] += 1.5

    def body(x, rows, o):
        o[...] = x[...]
        o[rows[0:16]] += 1.5

    make = kernel(body, (64, 128))
    check(make, [X, ROWS], expected, semantics=WARPGROUP, executed=WARPGROUP)


def test_methods_of_views_read_and_write():
    expected = X.copy()
    expected[::2] = X[::2] + X[::2]
    expected[1::2] = X[::2]

    def body(x, o, s):
        s[...] = x[...]
        s.at[::2].addupdate(x[::2])
        old = s.at[1::2].swap(x[::2])
        o[...] = s[...] + 0 * jnp.sum(old)

    check(kernel(body, (64, 128), **in_smem()), [X], expected)


# --- adjacent elements ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "elements"),
    [
        (np.s_[::2], 4),
        (np.s_[::2, 4:68], 4),
        (np.s_[::2, 2:66], 2),
        (np.s_[::2, 1:65], 1),
        (np.s_[:, ::2], 1),
        ([3, 1, 2, 0], 4),
    ],
    ids=str,
)
def test_adjacent_elements_are_loaded_together(index, elements):
    expected = X[index]

    def body(x, o):
        o[...] = plgpu.load(
            x, index, layout=plgpu.Layout.WG_STRIDED(expected.shape, vec_size=4)
        )

    make = kernel(body, expected.shape)
    check(make, [X], expected)
    (report,) = plgpu.offline.lower(make(None), X)
    loads = [
        line
        for line in report.mlir.splitlines()
        if "llvm.load" in line and "vector<" in line
    ]
    assert loads and all(f"vector<{elements}xf32>" in line for line in loads)


def test_adjacent_elements_are_stored_together():
    def body(x, o):
        value = plgpu.load(x, layout=plgpu.Layout.WG_STRIDED((64, 128), vec_size=4))
        o.reshape(2, 64, 128)[1] = value

    expected = np.zeros((128, 128), np.float32)
    expected[64:] = X
    params = plgpu.InterpretParams(partial_results=True)
    got = np.asarray(kernel(body, (128, 128))(params)(X))
    np.testing.assert_array_equal(got[64:], X)
    (report,) = plgpu.offline.lower(kernel(body, (128, 128))(None), X)
    stores = [line for line in report.mlir.splitlines() if "llvm.store" in line]
    assert stores and all("vector<4xf32>" in line for line in stores)


@pytest.mark.parametrize("semantics", [*WARPGROUP, plgpu.LoweringSemantics.Lane])
def test_dynamic_starts_are_not_taken_for_aligned(semantics):
    def body(x, o):
        def step(i, _):
            o[i] = x[plgpu.ds(i, 8, 2), plgpu.ds(i, 64)]

        lax.fori_loop(0, 8, step, None)

    expected = np.stack([X[i : i + 15 : 2, i : i + 64] for i in range(8)])
    make = kernel(body, (8, 8, 64))
    check(make, [X], expected, semantics=(semantics,), executed=(semantics,))


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
    check(kernel(body, expected.shape, expected.dtype, **options), [X], expected)


def test_a_view_of_wider_elements():
    x = np.arange(64 * 128, dtype=np.int8).reshape(64, 128)

    def body(x, o):
        o[...] = x.bitcast(jnp.int32)[...]

    check(kernel(body, (64, 32), np.int32), [x], x.view(np.int32))


def test_a_view_is_written():
    def body(x, o):
        o.reshape(-1).bitcast(jnp.int32)[...] = x.reshape(64 * 128)[...].astype(
            jnp.int32
        )

    check(kernel(body, (64, 128)), [X], X.astype(np.int32).view(np.float32))


def test_narrow_elements_of_wider_ones_are_written():
    def body(x, o):
        o[...] = x[...]
        o.bitcast(jnp.uint16)[:, ::2] = jnp.zeros((64, 128), jnp.uint16)

    expected = X.copy()
    expected.view(np.uint16)[:, ::2] = 0
    check(kernel(body, (64, 128)), [X], expected)


@pytest.mark.parametrize("transforms", [SWIZZLED, (plgpu.TilingTransform((8, 32)),)])
def test_a_tiled_array_is_reshaped_in_logical_order(transforms):
    def body(x, o, s):
        s[...] = x[...]
        o[...] = s.reshape(32, 256).T[...]

    expected = X.reshape(32, 256).T
    check(kernel(body, (256, 32), **in_smem(transforms)), [X], expected)


# --- masks ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [np.float32, ml_dtypes.bfloat16, np.int8, np.bool_, ml_dtypes.float8_e4m3fn],
)
@pytest.mark.parametrize("memory", ["gmem", "smem", "tiled"])
def test_a_masked_load_has_the_other_elements(dtype, memory):
    x = (np.arange(64 * 128).reshape(64, 128) % 3).astype(dtype)

    def body(x, o, *smem):
        if smem:
            smem[0][...] = x[...]
            x = smem[0]
        columns = plgpu.broadcasted_iota(jnp.int32, (64, 128), 1)
        o[...] = plgpu.load(x, mask=columns < 77, other=jnp.ones((), dtype))

    n = 128 // np.dtype(dtype).itemsize
    tiles = (plgpu.TilingTransform((8, min(n, 128))), plgpu.SwizzleTransform(128))
    options = {"gmem": {}, "smem": in_smem((), dtype), "tiled": in_smem(tiles, dtype)}
    expected = x.copy()
    expected[:, 77:] = 1
    check(kernel(body, (64, 128), dtype, **options[memory]), [x], expected)


def test_a_masked_load_has_zeros_by_default():
    def body(x, o):
        rows = plgpu.broadcasted_iota(jnp.int32, (64, 1), 0)
        o[...] = plgpu.load(x, mask=rows < 5)

    check(kernel(body, (64, 128)), [X], np.where(np.arange(64)[:, None] < 5, X, 0))


@pytest.mark.parametrize("memory", ["gmem", "smem", "tiled"])
def test_a_masked_store_leaves_the_other_elements(memory):
    def body(x, o, *smem):
        target = smem[0] if smem else o
        target[...] = x[...]
        value = x[...]
        plgpu.store(target, (), -value, mask=value > 1000)
        if smem:
            o[...] = target[...]

    options = {"gmem": {}, "smem": in_smem(), "tiled": in_smem(SWIZZLED)}[memory]
    check(kernel(body, (64, 128), **options), [X], np.where(X > 1000, -X, X))


def test_a_masked_range_may_exceed_the_array():
    n = 1000
    x = np.arange(n, dtype=np.float32)

    def body(x, o):
        i = lax.axis_index("i")
        position = i * 256 + lax.iota(jnp.int32, 256)
        inside = position < n
        part = plgpu.load(x, plgpu.ds(i * 256, 256), mask=inside, other=1.0)
        plgpu.store(o, plgpu.ds(i * 256, 256), part + 1, mask=inside)

    check(kernel(body, (n,), grid=(4,), grid_names=("i",)), [x], x + 1)


def test_a_known_masked_range_may_exceed_the_array():
    x = np.arange(100, dtype=np.float32)

    def body(x, o):
        inside = lax.iota(jnp.int32, 128) < 100
        o[...] = plgpu.load(x, plgpu.ds(0, 128), mask=inside, other=-1)

    expected = np.full(128, -1, np.float32)
    expected[:100] = x
    check(kernel(body, (128,)), [x], expected)


def test_a_masked_index_may_be_out_of_bounds():
    index = np.arange(-64, 64, dtype=np.int32)
    expected = np.where(index[:, None] >= 0, X[np.maximum(index, 0)], 0)

    def body(x, index, o):
        i = index[...]
        o[...] = plgpu.load(x, i, mask=(i >= 0)[:, None])

    make = kernel(body, (128, 128))
    check(make, [X, index], expected, semantics=WARPGROUP, executed=WARPGROUP)


def test_single_elements_have_masks():
    def body(x, o):
        i = lax.axis_index("i")
        value = plgpu.load(x, (i, i + 60), mask=i < 2, other=-1.0)
        plgpu.store(o, i, value, mask=i != 2)
        plgpu.store(o, i, 7.0, mask=i == 2)

    expected = np.array([60, X[1, 61], 7, -1], np.float32)
    check(kernel(body, (4,), grid=(4,), grid_names=("i",)), [X], expected)


def test_single_elements_in_a_warp():
    def body(x, o):
        @plgpu.warp_map
        def _(warp):
            flat = x.reshape(-1)
            plgpu.store(o, warp, flat[warp * 130] + 1, mask=warp >= 0)

    check(kernel(body, (4,)), [X], X.reshape(-1)[np.arange(4) * 130] + 1)


def test_masked_elements_are_not_read_and_not_poisoned():
    def body(x, o, s):
        left = plgpu.broadcasted_iota(jnp.int32, (64, 128), 1) < 64
        plgpu.store(s, (), x[...], mask=left)
        o[...] = plgpu.load(s, mask=left, other=0.0)

    expected = np.where(np.arange(128) < 64, X, 0)
    check(kernel(body, (64, 128), **in_smem()), [X], expected)


# --- refusals -------------------------------------------------------------------------


def test_a_mask_has_the_shape_of_the_elements():
    def body(x, o):
        o[...] = plgpu.load(x, mask=lax.iota(jnp.int32, 64) < 3)  # HERE

    with refused(
        errors.ShapeError,
        "load: the mask has another shape than the elements",
        expected="broadcasts to (64, 128)",
        got="(64,)",
    ):
        run(body)


def test_a_mask_of_a_store_has_the_shape_of_the_elements():
    def body(x, o):
        plgpu.store(o, 0, x[0], mask=x[0:2] > 0)  # HERE

    with refused(
        errors.ShapeError,
        "store: the mask has another shape than the elements",
        got="(2, 128)",
    ):
        run(body)


def test_a_mask_is_bools():
    def body(x, o):
        o[...] = plgpu.load(x, mask=x[...])  # HERE

    with refused(errors.DTypeError, "load: the mask is not an array of bools"):
        run(body)


def test_other_needs_a_mask():
    def body(x, o):
        o[...] = plgpu.load(x, other=0.0)  # HERE

    with refused(errors.ArgumentError, "load: `other` without a mask"):
        run(body)


def test_an_index_array_is_checked_by_the_emulator():
    def body(x, o):
        o[...] = x[lax.iota(jnp.int32, 64) + lax.axis_index("i")]  # HERE

    with refused(
        errors.OutOfBoundsError,
        "input 0 (GMEM float32[64, 128]) is read out of bounds",
        got="index 64 in dimension 0, for element [63, 0] of the access",
        where="in warpgroup 0 of CTA (i=1)",
    ):
        run(body, grid=(2,), grid_names=("i",))


def test_a_negative_traced_index_is_out_of_bounds():
    def body(x, o):
        o[lax.iota(jnp.int32, 64) - 1] = x[...]  # HERE

    with refused(
        errors.OutOfBoundsError,
        "output 0 (GMEM float32[64, 128]) is written out of bounds",
        got="index -1",
    ):
        run(body)


def test_a_stride_beyond_the_edge_is_checked_by_the_emulator():
    def body(x, o):
        o[0:32] = x[plgpu.ds(lax.axis_index("i") * 2, 32, 2)]  # HERE

    with refused(
        errors.OutOfBoundsError,
        "input 0 (GMEM float32[64, 128]) is read out of bounds",
        got="index 64",
    ):
        run(body, grid=(2,), grid_names=("i",))


def test_one_store_has_one_value_for_an_element():
    def body(x, o):
        o[...] = jnp.zeros((64, 128), jnp.float32)
        o[lax.iota(jnp.int32, 64) // 2] = x[...]  # HERE

    with refused(
        errors.RaceError,
        "output 0 (GMEM float32[64, 128]) is written with different values at one "
        "element",
        hint="atomic addition",
    ):
        run(body)


def test_equal_values_may_be_stored_twice():
    def body(o):
        o[...] = jnp.zeros((64, 128), jnp.float32)
        o[lax.iota(jnp.int32, 64) // 2] = jnp.ones((64, 128), jnp.float32)

    expected = np.repeat(np.arange(64) < 32, 128).reshape(64, 128)
    make = kernel(body, (64, 128))
    check(make, [], expected, semantics=WARPGROUP, executed=WARPGROUP)


def test_a_read_by_elements_of_unwritten_memory_is_found():
    def body(x, o, s):
        s[::2] = x[::2]
        o[...] = s.reshape(32, 256)[...].reshape(64, 128)  # HERE

    with refused(
        errors.UninitializedReadError,
        "SMEM float32[64, 128] (s) is read where nothing has been written",
        got="element [1, 0]",
    ):
        run(body, **in_smem())


def test_accesses_by_elements_race():
    def body(x, o, s):
        wg = lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def _():
            s[::2] = x[0:32]

        @plgpu.when(wg == 1)
        def _():
            s[::3] = x[0:22]

    with pytest.raises(errors.RaceError, match="without an order between"):
        run(body, num_threads=2, thread_name="wg", **in_smem())


def test_interleaved_elements_do_not_race():
    def body(x, o):
        wg = lax.axis_index("wg")
        o[plgpu.ds(wg, 32, 2)] = x[plgpu.ds(wg, 32, 2)]

    make = kernel(body, (64, 128), num_threads=2, thread_name="wg")
    check(make, [X], X)
