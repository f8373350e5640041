# SPDX-License-Identifier: Apache-2.0
"""Accesses by elements: masks, widths of instructions, and what is refused."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.runtime import ptx_stats
from tests.support import everywhere
from tests.support.entry_kernels import run
from tests.support.everywhere import check
from tests.support.indexed_programs import (
    SWIZZLED,
    WARPGROUP,
    X,
    in_smem,
    kernel,
)
from tests.support.refusal import refused_by

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
    everywhere.run(body, [x], expected, **options[memory])


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
    everywhere.run(body, [X], np.where(X > 1000, -X, X), **options)


@everywhere.gives([np.arange(1000, dtype=np.float32)], lambda x: x + 1, grid={"i": 4})
def test_a_masked_range_may_exceed_the_array(x, o):
    start = 256 * lax.axis_index("i")
    inside = start + lax.iota(jnp.int32, 256) < 1000
    part = plgpu.load(x, plgpu.ds(start, 256), mask=inside, other=1.0)
    plgpu.store(o, plgpu.ds(start, 256), part + 1, mask=inside)


@everywhere.gives(
    [np.arange(100, dtype=np.float32)],
    lambda x: np.concatenate([x, np.full(28, -1, np.float32)]),
)
def test_a_known_masked_range_may_exceed_the_array(x, o):
    inside = lax.iota(jnp.int32, 128) < 100
    o[...] = plgpu.load(x, plgpu.ds(0, 128), mask=inside, other=-1)


@everywhere.gives(
    [X, np.arange(-64, 64, dtype=np.int32)],
    lambda x, index: np.where(index[:, None] >= 0, x[np.maximum(index, 0)], 0),
    semantics=WARPGROUP,
    executed=WARPGROUP,
)
def test_a_masked_index_may_be_out_of_bounds(x, index, o):
    i = index[...]
    o[...] = plgpu.load(x, i, mask=(i >= 0)[:, None])


@everywhere.gives(
    [X],
    lambda x: np.array([60, x[1, 61], 7, -1], np.float32),
    grid={"i": 4},
)
def test_single_elements_have_masks(x, o):
    i = lax.axis_index("i")
    value = plgpu.load(x, (i, i + 60), mask=i < 2, other=-1.0)
    plgpu.store(o, i, value, mask=i != 2)
    plgpu.store(o, i, 7.0, mask=i == 2)


@everywhere.gives([X], lambda x: x.reshape(-1)[np.arange(4) * 130] + 1)
def test_single_elements_in_a_warp(x, o):
    @plgpu.warp_map
    def _(warp):
        flat = x.reshape(-1)
        plgpu.store(o, warp, flat[warp * 130] + 1, mask=warp >= 0)


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


# --- refusals -------------------------------------------------------------------------


@refused_by(run)
def test_a_mask_has_the_shape_of_the_elements(x, o):
    o[...] = plgpu.load(x, mask=lax.iota(jnp.int32, 64) < 3)  # HERE


@refused_by(run)
def test_a_mask_of_a_store_has_the_shape_of_the_elements(x, o):
    plgpu.store(o, 0, x[0], mask=x[0:2] > 0)  # HERE


@refused_by(run)
def test_a_mask_is_bools(x, o):
    o[...] = plgpu.load(x, mask=x[...])  # HERE


@refused_by(run)
def test_other_needs_a_mask(x, o):
    o[...] = plgpu.load(x, other=0.0)  # HERE


@refused_by(run, grid=(2,), grid_names=("i",))
def test_an_index_array_is_checked_by_the_emulator(x, o):
    o[...] = x[lax.iota(jnp.int32, 64) + lax.axis_index("i")]  # HERE


@refused_by(run)
def test_a_negative_traced_index_is_out_of_bounds(x, o):
    o[lax.iota(jnp.int32, 64) - 1] = x[...]  # HERE


@refused_by(run, grid=(2,), grid_names=("i",))
def test_a_stride_beyond_the_edge_is_checked_by_the_emulator(x, o):
    o[0:32] = x[plgpu.ds(lax.axis_index("i") * 2, 32, 2)]  # HERE


@refused_by(run)
def test_one_store_has_one_value_for_an_element(x, o):
    o[...] = jnp.zeros((64, 128), jnp.float32)
    o[lax.iota(jnp.int32, 64) // 2] = x[...]  # HERE


@everywhere.gives(
    [],
    lambda: np.repeat(np.arange(64) < 32, 128).reshape(64, 128).astype(np.float32),
    semantics=WARPGROUP,
    executed=WARPGROUP,
)
def test_equal_values_may_be_stored_twice(o):
    o[...] = jnp.zeros((64, 128), jnp.float32)
    o[lax.iota(jnp.int32, 64) // 2] = jnp.ones((64, 128), jnp.float32)


@refused_by(lambda body: run(body, **in_smem()))
def test_a_read_by_elements_of_unwritten_memory_is_found(x, o, s):
    s[::2] = x[::2]
    o[...] = s.reshape(32, 256)[...].reshape(64, 128)  # HERE


@refused_by(lambda body: run(body, num_threads=2, thread_name="wg", **in_smem()))
def test_accesses_by_elements_race(x, o, s):
    wg = lax.axis_index("wg")

    @plgpu.when(wg == 0)
    def _():
        s[::2] = x[0:32]

    @plgpu.when(wg == 1)
    def _():
        s[::3] = x[0:22]


@everywhere.gives([X], X, threads={"wg": 2})
def test_interleaved_elements_do_not_race(x, o):
    wg = lax.axis_index("wg")
    o[plgpu.ds(wg, 32, 2)] = x[plgpu.ds(wg, 32, 2)]


@refused_by(lambda body: run(body, scratch_types=2 * in_smem()["scratch_types"]))
def test_poison_that_is_stored_by_elements_is_found_where_it_is_used(x, o, s, t):
    t[::2] = s[::2]  # HERE
    o[0:32] = t[::2]


def beyond(body):
    return everywhere.emulate(body, [X], X, out_of_bounds_reads="uninitialized")


def test_elements_out_of_bounds_may_be_read_as_if_uninitialized():
    def body(x, o):
        rows = lax.iota(jnp.int32, 64) + 1
        o[...] = jnp.where((rows < 64)[:, None], x[rows], 0.0)

    expected = np.concatenate([X[1:], np.zeros((1, 128), np.float32)])
    np.testing.assert_array_equal(beyond(body), expected)


@refused_by(beyond)
def test_elements_out_of_bounds_may_not_be_used(x, o):
    o[...] = x[lax.iota(jnp.int32, 64) + 1]  # HERE


@refused_by(run)
def test_an_accumulator_has_no_addresses(x, o):
    def scoped(acc):
        o[0:32] = acc[::2]  # HERE

    plgpu.run_scoped(scoped, plgpu.ACC((64, 128)))


# --- what is emitted ------------------------------------------------------------------


@pytest.mark.offline
@pytest.mark.parametrize(
    ("mask", "stores"),
    [
        ("rows < n", {}),
        ("columns < n", {".b16": 24}),
        ("columns < 63", {".b32": 8, ".b16": 8}),
        ("columns >= 1", {".b16": 8, ".b32": 8}),
        ("columns % 3 == 0", {".v2.b32": 0, ".b16": 32}),
    ],
)
def test_masked_accesses_have_no_branches_and_are_vectors(mask, stores):
    """4096 elements are 8 vectors of 4 in each thread, which are loaded as a whole."""

    def body(x, n, o):
        rows, columns = jnp.arange(64)[:, None], jnp.arange(64)
        inside = eval(mask, {"rows": rows, "columns": columns, "n": n[0]})
        part = (jnp.arange(64), plgpu.ds(0, 64))
        plgpu.store(o, part, plgpu.load(x, part, mask=inside, other=0), mask=inside)

    x = jax.ShapeDtypeStruct((128, 64), ml_dtypes.bfloat16)
    n = jax.ShapeDtypeStruct((1,), jnp.int32)
    make = kernel(body, (64, 64), x.dtype)
    (report,) = plgpu.offline.compile(make(None), x, n)
    assert ptx_stats.count(report.ptx, "bra") == 0
    found = re.findall(r"@%p\d+ (ld|st)\.global([.\w]+) ", report.ptx)
    loads = {".v2.b32": 8, ".b32": 0, ".b16": 0}
    for name, wanted in (("ld", loads), ("st", loads | stores)):
        assert {x: found.count((name, x)) for x in wanted} == wanted


@pytest.mark.offline
def test_padding_of_a_row_needs_no_branch():
    """The last register of 777 elements is partly padding."""

    def body(x, o):
        o[...] = x[...] + 1

    x = jax.ShapeDtypeStruct((777,), jnp.float32)
    (report,) = plgpu.offline.compile(kernel(body, x.shape)(None), x)
    assert ptx_stats.count(report.ptx, "bra") == 0
    for name in ("ld", "st"):
        assert len(re.findall(rf"@%p\d+ {name}\.global\.b32 ", report.ptx)) == 1
