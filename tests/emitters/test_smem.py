# SPDX-License-Identifier: Apache-2.0
"""Transfers between registers and shared memory, in every layout and tiling."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_gpu.emitters import gmem, indexed, mbarrier, registers, smem
from pallas_gpu.emitters.smem import SmemView
from pallas_gpu.layouts import Layout
from tests.support import everywhere
from tests.support.finished import emitted, smem_view
from tests.support.movement_programs import transfer
from tests.support.refusal import refused_by

# name: (layout, shape, dtype, tiling, swizzle, order of a transposed view)
CASES = {
    "f16 wgmma 128": (Layout.WGMMA, (128, 128), "float16", (8, 64), 128, None),
    "bf16 wgmma 64": (Layout.WGMMA, (64, 64), "bfloat16", (8, 32), 64, None),
    "f16 wgmma 32": (Layout.WGMMA, (64, 64), "float16", (8, 16), 32, None),
    "f32 wgmma 128": (Layout.WGMMA, (128, 64), "float32", (8, 32), 128, None),
    "f32 wgmma 64": (Layout.WGMMA, (64, 64), "float32", (8, 16), 64, None),
    "i8 wgmma": (Layout.WGMMA_8BIT, (64, 128), "int8", (8, 128), 128, None),
    "f8 wgmma": (Layout.WGMMA_8BIT, (64, 64), "float8_e4m3fn", (8, 64), 64, None),
    "f16 transposed": (Layout.WGMMA, (64, 128), "float16", (8, 64), 128, (1, 0)),
    "f16 by columns": (
        Layout.WGMMA_TRANSPOSED, (64, 128), "float16", (8, 64), 128, (1, 0)
    ),
    "strided": (None, (64, 96), "float32", None, 16, None),
    "odd strided": (None, (384, 3), "float32", None, 16, None),
    "strided i64": (None, (16, 32), "int64", None, 16, None),
    "row": (Layout.WGMMA_ROW, (128,), "float32", None, 16, None),
    "column": (Layout.WGMMA_COL, (64,), "float32", None, 16, None),
    "bool": (None, (512,), "bool", None, 16, None),
}  # fmt: skip


def view_of(kb, offset, case) -> SmemView:
    _, *of_view, order = CASES[case]
    view = smem_view(kb, offset, *of_view)
    return view.transpose(order) if order else view


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_what_is_stored_is_loaded(case, computes, sample):
    layout, shape, dtype, tiling, swizzle, order = CASES[case]
    shape = tuple(shape[i] for i in order) if order else shape
    computes(transfer(sample(shape, dtype), layout, tiling, swizzle, order))


def test_a_deferred_array_is_stored_and_loaded_in_the_default_layout(run_kernel, typed):
    def body(kb, out):
        view = smem_view(kb, 0, (128,), np.int32)
        smem.store(view, registers.iota(np.int32, (128,), 0))
        mbarrier.warpgroup_barrier()
        gmem.store(out, smem.load(view))

    (out,) = run_kernel(body, [], [typed((128,), np.int32)], smem_bytes=512)
    np.testing.assert_array_equal(out, np.arange(128))


def copy_body(case):
    def body(kb, *unused):
        layout = CASES[case][0]
        source = view_of(kb, 0, case)
        smem.store(view_of(kb, 1 << 16, case), smem.load(source, layout))

    return body


@pytest.mark.offline
@pytest.mark.parametrize(
    ("case", "load", "store"),
    [
        ("f16 wgmma 128", "ldmatrix.sync.aligned.m8n8.x4.shared", "stmatrix.sync"),
        ("f16 transposed", "ldmatrix.sync.aligned.m8n8.x4.trans", "x4.trans.shared"),
        ("i8 wgmma", "ldmatrix", "stmatrix"),
        ("f32 wgmma 128", "ld.shared.v2.b32", "st.shared.v2.b32"),
        ("strided", "ld.shared.v4.b32", "st.shared.v4.b32"),
    ],
)
def test_wide_instructions_are_used(case, load, store, compile_kernel, typed):
    x = typed((8,), np.float32)
    compiled = compile_kernel(copy_body(case), [x], [x], smem_bytes=1 << 17)
    assert load in compiled.ptx
    assert store in compiled.ptx
    assert compiled.resources.spill_store_bytes == 0


def test_a_staggered_access_selects_instead_of_conflicting(build, typed):
    def body(kb, x):
        view = view_of(kb, 0, "f32 wgmma 128")
        smem.store(view, gmem.load(x, Layout.WGMMA))

    text = str(build(body, [typed((128, 64), np.float32)], smem_bytes=1 << 17))
    assert text.count("arith.select") == 32  # one per register


def test_copies_of_a_row_are_stored_once(build):
    text = str(build(copy_body("row"), smem_bytes=1 << 17))
    assert text.count("scf.if") == 1


def test_a_single_vector_is_not_taken_apart():
    vector = object()
    assert smem.concatenate([vector]) is vector


@refused_by(emitted, smem_bytes=1 << 14)
def test_bank_conflicts_are_refused_with_the_way_out(kb):
    view = smem_view(kb, 0, (64, 64), "float32")
    smem.load(view.slice((0, 0), (64, 8)), Layout.WGMMA)


@pytest.mark.parametrize("what", ["shape", "dtype", "shape, by element"])
@refused_by(emitted, smem_bytes=1 << 14)
def test_a_store_of_another_type_is_refused(kb, *, what):
    dtype, size = (np.int32, 128) if what == "dtype" else (np.float32, 64)
    store = indexed.store_part if "element" in what else smem.store
    store(view_of(kb, 0, "row"), registers.iota(dtype, (size,), 0))


@refused_by(emitted, smem_bytes=1 << 16)
def test_one_element_of_a_tiled_reference_is_unsupported(kb):
    view = view_of(kb, 0, "f16 wgmma 128")
    smem.load_scalar(view.slice((3, 5), (None, None)))


@everywhere.tests(emitted, smem_bytes=1 << 16)
def test_slicing_a_transposed_view_counts_its_own_axes(kb):
    view = view_of(kb, 0, "f16 transposed")
    part = view.slice((64, 0), (64, 64))
    assert part.shape == (64, 64)
    assert (part.window.starts, part.window.sizes) == ((0, 64), (64, 64))
    column = view.slice((3, 0), (None, 64))
    assert column.window.axes == (0,)
