# SPDX-License-Identifier: Apache-2.0
"""Copies between GMEM and SMEM by threads: any slice of any array."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.errors import PtxError
from tests.support import everywhere
from tests.support.features.row import Row
from tests.support.host import counted as array
from tests.support.lockstep import faults
from tests.support.refusal import refused
from tests.support.semantics import BOTH, under

TILED = (plgpu.TilingTransform((8, 16)), plgpu.SwizzleTransform(32))
CP_ASYNC = plgpu.AsyncCopyImplementation.CP_ASYNC


def round_trip(shape, part, dtype, transforms=(), *, barrier=True, **options):
    """A part of an array goes to SMEM and from there to the middle of zeros."""
    x = array(shape, dtype)
    expected = np.pad(x[part], 1)
    inner = tuple(plgpu.ds(1, n) for n in x[part].shape)

    def body(x, o, tile, full):
        o[...] = jnp.zeros(expected.shape, dtype)
        plgpu.commit_gmem()
        if barrier:
            plgpu.copy_gmem_to_smem(x.at[part], tile, full, **options)
            plgpu.barrier_wait(full)
        else:
            plgpu.copy_gmem_to_smem(x.at[part], tile, **options)
            plgpu.wait_gmem_to_smem(0)
        plgpu.copy_smem_to_gmem(tile, o.at[inner])
        plgpu.wait_smem_to_gmem(0)

    tile = plgpu.SMEM(x[part].shape, dtype, transforms=transforms)
    return everywhere.kernel(body, expected, tile, plgpu.Barrier()), [x], expected


F32, BF16, F8 = jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn
CASES = {
    "rows of 12 bytes": ((50, 3), np.s_[4:36], F32),
    "an odd start": ((20, 77), np.s_[3:19, 5:38], F32),
    "two bytes, an odd row": ((20, 77), np.s_[3:19, 5:38], BF16),
    "two bytes, an even start": ((20, 78), np.s_[3:19, 6:38], BF16),
    "one byte": ((20, 77), np.s_[3:19, 5:38], jnp.int8),
    "bools": ((20, 77), np.s_[3:19, 5:38], jnp.bool_),
    "eight bytes": ((20, 7), np.s_[3:19, 1:4], jnp.int32),
    "three axes, one indexed": ((5, 6, 9), np.s_[2, 1:4, 1:8], F32),
    "one axis": ((1001,), np.s_[7:900], BF16),
    "one element": ((9, 9), np.s_[3:4, 5:6], F32),
}


@pytest.mark.parametrize("name", CASES)
def test_any_slice_of_any_array_is_copied(name):
    everywhere.check(*round_trip(*CASES[name]))


@pytest.mark.parametrize("barrier", [True, False], ids=["barrier", "group"])
def test_the_array_in_smem_may_be_tiled_and_swizzled(barrier):
    case = (24, 75), np.s_[3:19, 5:37], BF16, TILED
    everywhere.check(*round_trip(*case, barrier=barrier))


def over_the_edge(x, n, o, tile, full):
    o[...] = jnp.zeros(o.shape, F32)
    plgpu.commit_gmem()
    part = (plgpu.ds(n[0] * 5, 5), plgpu.ds(3, 6))
    plgpu.copy_gmem_to_smem(x.at[part], tile, full)  # HERE
    plgpu.barrier_wait(full)
    tile[...] = tile[...] + 1
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, o.at[plgpu.ds(10, 5), plgpu.ds(0, 6)])
    plgpu.wait_smem_to_gmem(0)


PART = plgpu.SMEM((5, 6), F32), plgpu.Barrier()


@pytest.mark.parametrize("row", [0, 1, 2])
def test_elements_outside_of_the_array_are_zeros_and_are_not_stored(row):
    x = array((13, 7), F32)
    expected = np.zeros((13, 5), F32)
    expected[10:] = np.pad(x, ((0, 2), (0, 2)))[row * 5 :, 3:8][:3] + 1
    everywhere.run(over_the_edge, [x, np.array([row], np.int32)], expected, *PART)


@refused
def test_a_part_entirely_outside_of_the_array_is_an_error():
    args = array((13, 7), F32), np.array([3], np.int32)
    everywhere.emulate(over_the_edge, args, jax.ShapeDtypeStruct((13, 5), F32), *PART)


def test_stores_of_two_ctas_to_one_place_race():
    def body(x, o, tile):
        tile[...] = x[...] + lax.axis_index("i").astype(F32)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, o.at[:, 1:])  # not of 16 bytes: by threads
        plgpu.wait_smem_to_gmem(0)

    x, out = array((8, 32), F32), array((8, 33), F32)
    grid = {"grid": (2,), "grid_names": ("i",)}
    with pytest.raises(plgpu.errors.RaceError, match="written by one CTA"):
        everywhere.emulate(body, [x], out, plgpu.SMEM(x.shape, F32), **grid)


@everywhere.gives(
    [array((1003,), F8)],
    lambda x: np.concatenate([x[992:], np.zeros(13, x.dtype)]),
    plgpu.SMEM((24,), F8),
    plgpu.Barrier(),
)
def test_a_line_over_the_edge_is_clipped_inside_of_a_chunk(x, o, tile, full):
    plgpu.copy_gmem_to_smem(x.at[plgpu.ds(992, 24)], tile, full)
    plgpu.barrier_wait(full)
    o[...] = tile[...]


HALF = plgpu.SMEM((8, 32), BF16), plgpu.Barrier()


@pytest.mark.parametrize("column", [3, 4])
def test_a_start_that_may_lie_anywhere_is_copied_by_threads(column):
    """TMA stops the launch where it cannot address a start."""
    x, at = array((16, 64), BF16), np.array([5, column], np.int32)

    def body(x, at, o, tile, full):
        o[...] = jnp.zeros((8, 64), BF16)
        plgpu.commit_gmem()
        part = plgpu.ds(at[0], 8), plgpu.ds(at[1] * 3 - 8, 32)
        plgpu.copy_gmem_to_smem(x.at[part], tile, full)
        plgpu.barrier_wait(full)
        plgpu.copy_smem_to_gmem(tile, o.at[:, plgpu.ds(at[1], 32)])
        plgpu.wait_smem_to_gmem(0)

    part = x[5:13, column * 3 - 8 :][:, :32]
    expected = np.pad(part, ((0, 0), (column, 32 - column)))
    everywhere.run(body, [x, at], expected, *HALF)


@pytest.mark.parametrize(
    ("start", "by_tma"),
    [
        (lambda i: i * 8, True),
        (lambda i: plgpu.multiple_of(i, 8), True),
        (lambda i: i // 64 * 64 + 8, True),
        (lambda i: i * 4, False),
        (lambda i: i, False),
    ],
)
def test_tma_carries_what_is_known_to_start_at_16_bytes(start, by_tma):
    def body(x, at, o, tile, full):
        part = plgpu.ds(start(at[0]), 32)
        plgpu.copy_gmem_to_smem(x.at[:, part], tile, full)
        plgpu.barrier_wait(full)
        plgpu.copy_smem_to_gmem(tile, o.at[:, part])
        plgpu.wait_smem_to_gmem(0)

    x = array((8, 64), BF16)
    make = everywhere.kernel(body, x, *HALF)
    text = str(jax.make_jaxpr(make())(x, np.zeros(1, np.int32)))
    assert ("copy_gmem_to_smem[" in text) == by_tma
    assert ("copy_smem_to_gmem[" in text) == by_tma


@everywhere.gives(
    [array((16, 24), F32)], lambda x: x, plgpu.SMEM((24, 16), F32), plgpu.Barrier()
)
def test_a_transposed_reference_is_copied(x, o, tile, full):
    plgpu.copy_gmem_to_smem(x.T, tile, full)
    plgpu.barrier_wait(full)
    plgpu.copy_smem_to_gmem(tile.T, o)


@pytest.mark.parametrize("wanted", [True, False])
def test_a_predicate_skips_the_copy_and_not_the_arrival(wanted):
    x, n = array((9, 7), F32), np.array([wanted], np.int32)

    def body(x, n, o, tile, full):
        tile[...] = jnp.zeros((9, 7), F32)
        plgpu.copy_gmem_to_smem(x, tile, full, predicate=n[0] > 0)
        plgpu.barrier_wait(full)
        o[...] = jnp.full((9, 7), 5.0)
        plgpu.commit_gmem()
        plgpu.copy_smem_to_gmem(tile, o, predicate=n[0] > 0)
        plgpu.wait_smem_to_gmem(0)

    expected = x if wanted else np.full_like(x, 5)
    everywhere.run(body, [x, n], expected, plgpu.SMEM((9, 7), F32), plgpu.Barrier())


@everywhere.gives(
    [array((8, 9), F32)],
    lambda x: x,
    plgpu.SMEM((8, 9), F32),
    plgpu.Barrier(num_arrivals=4),
)
def test_each_warp_copies_rows_of_its_own(x, o, tile, full):
    @plgpu.warp_map
    def _(warp):
        rows = plgpu.ds(warp * 2, 2)
        plgpu.copy_gmem_to_smem(x.at[rows], tile.at[rows], full)
        plgpu.barrier_wait(full)
        plgpu.copy_smem_to_gmem(tile.at[rows], o.at[rows])


@everywhere.gives([array((4, 8, 9), F32)], lambda x: x, plgpu.SMEM((4, 8, 9), F32))
def test_groups_complete_in_order(x, o, tiles):
    for i in range(4):
        plgpu.copy_gmem_to_smem(x.at[i], tiles.at[i])
    for i in range(4):
        plgpu.wait_gmem_to_smem(3 - i)
        o[i] = tiles[i]


def product(x, w, o, a, b, full, acc):
    """The rows of x are 140 bytes: threads copy them, and the tensor core reads."""
    plgpu.copy_gmem_to_smem(x.at[:, plgpu.ds(3, 64)], a, full)
    plgpu.copy_gmem_to_smem(w, b, full)
    plgpu.barrier_wait(full)
    plgpu.wgmma(acc, a, b)
    plgpu.wgmma_wait(0)
    o[...] = acc[...]


OPERAND = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
X, W = array((64, 70), BF16) % 7, array((64, 64), BF16) % 5
XW = X[:, 3:67].astype(F32) @ W.astype(F32)
make_product = everywhere.kernel(
    product,
    XW,
    plgpu.SMEM((64, 64), BF16, transforms=OPERAND),
    plgpu.SMEM((64, 64), BF16, transforms=OPERAND),
    plgpu.Barrier(num_arrivals=2),
    plgpu.ACC((64, 64), F32),
)


def test_the_tensor_core_reads_what_threads_have_copied():
    everywhere.check(make_product, [X, W], XW)


@pytest.mark.parametrize("semantics", BOTH)
def test_without_the_fence_of_the_wait_the_tensor_core_would_not_see_it(semantics):
    with pytest.raises(PtxError, match=r"without fence\.proxy\.async"):
        fault = faults.drop("nvvm.fence.proxy")
        faults.run(under(semantics, make_product()), [X, W], fault)


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
def test_the_instructions_of_a_copy(semantics):
    make, x, _ = round_trip(*CASES["rows of 12 bytes"], implementation=CP_ASYNC)
    (report,) = plgpu.offline.compile(under(semantics, make()), *x)
    assert "cp.async.cg.shared.global" in report.ptx
    assert "cp.async.mbarrier.arrive.shared::cta.b64" in report.ptx
    assert "fence.proxy.async.shared::cta" in report.ptx
    assert report.resources.spill_store_bytes == 0
    make, x, _ = round_trip(*CASES["an odd start"], barrier=False)
    (report,) = plgpu.offline.compile(under(semantics, make()), *x)
    for name in ("ca.shared.global", "commit_group", "wait_group 0"):
        assert f"cp.async.{name}" in report.ptx


def test_tma_copies_between_references_that_are_transposed_alike():
    x = array((16, 32), F32)

    def body(x, o, tile, full):
        plgpu.copy_gmem_to_smem(x.T, tile.T, full)
        plgpu.barrier_wait(full)
        plgpu.copy_smem_to_gmem(tile.at[8:].T, o.T.at[:, 8:])
        plgpu.copy_smem_to_gmem(tile.at[:8].T, o.T.at[:, :8])
        plgpu.wait_smem_to_gmem(0)

    make = everywhere.kernel(body, x, plgpu.SMEM((16, 32), F32), plgpu.Barrier())
    everywhere.check(make, [x], x)
    (report,) = plgpu.offline.lower(make(), x)
    assert "cp_async" not in report.jaxpr


@pytest.mark.parametrize("semantics", BOTH)
def test_a_copy_through_registers_is_a_warning_and_others_are_not(semantics):
    make, x, _ = round_trip(*CASES["two bytes, an odd row"])
    slow = plgpu.errors.PerformanceWarning
    with pytest.warns(slow, match="2 bytes at a time") as got:
        plgpu.offline.lower(under(semantics, make()), *x)
    assert "test_cp_async.py" in str(got[0].message)
    make, x, _ = round_trip(*CASES["an odd start"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", slow)
        plgpu.offline.lower(under(semantics, make()), *x)


GOOD = {"wait_gmem_to_smem": lambda e: {"n": 0}}
FEATURES = [
    Row(
        "copies by threads: any part of any array, in groups or on a barrier",
        upstream=(
            "copy: cp.async, tiled and untiled",
            "copy: rows of any stride",
            "copy: rows of any size",
            "copy: await cp.async",
        ),
        operations=("cp_async", "wait_gmem_to_smem", "copy_smem_to_gmem_by_threads"),
        runs="any_slice_of_any_array_is_copied",
        offline="the_instructions_of_a_copy",
        instruction="cp.async.cg.shared.global",
        omissions={
            "wait": "load threads: wait",
            "count": "load threads: count",
            "commit": "(threads copy what threads have stored)",
            "fence": "(threads copy what threads have stored)",
        },
    ),
]
