# SPDX-License-Identifier: Apache-2.0
"""Direct loads and stores of global memory."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_gpu import errors
from pallas_gpu.layouts import Layout
from pallas_gpu.mosaic import elementwise, gmem

LAYOUTS = [None, Layout.WGMMA, Layout.WGMMA_TRANSPOSED, Layout.WGMMA_8BIT]


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "int64"])
def test_every_layout_reads_and_writes_the_array(
    layout, dtype, run_kernel, typed, sample
):
    x = sample((128, 64), np.dtype(dtype))

    def body(kb, source, out):
        gmem.store(out, gmem.load(source, layout))

    (out,) = run_kernel(body, [x], [typed(x.shape, x.dtype)])
    bits = f"u{x.dtype.itemsize}"
    np.testing.assert_array_equal(out.view(bits), x.view(bits))


@pytest.mark.offline
def test_aligned_rows_move_in_wide_accesses(compile_kernel, typed):
    x = typed((64, 256), np.float32)

    def body(kb, source, out):
        layout = Layout.WG_STRIDED((64, 256), vec_size=4)
        gmem.store(out, gmem.load(source, layout))

    ptx = compile_kernel(body, [x], [x]).ptx
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx


def test_an_unknown_start_moves_single_elements(build, typed):
    x, y = typed((64, 256), np.float32), typed((128,), np.float32)

    def body(kb, source, out):
        column = gmem.load_scalar(out.slice((0,), (None,)))
        index = elementwise.astype(elementwise.scalar(column, np.float32), np.int32)
        part = source.slice((0, index.value), (None, 128))
        gmem.load(part, Layout.WGMMA_COL)
        known = source.slice((0, index.value), (None, 128), multiples=(0, 8))
        gmem.load(known, Layout.WGMMA_COL)

    text = str(build(body, [x], [y]))
    assert text.count("vector<2xf32>") == 0  # nothing is used, so nothing is left

    def used(kb, source, out):
        index = kb.threads.lane
        part = source.slice((0, index), (None, 128))
        gmem.store(out, gmem.load(part, Layout.WG_STRIDED((128,), vec_size=1)))

    assert "vector<1xf32>" in str(build(used, [x], [y]))


def test_a_scalar_access_needs_one_element(build, typed):
    with pytest.raises(errors.ShapeError, match="index of one element"):
        build(lambda kb, x: gmem.load_scalar(x), [typed((4,), np.float32)])


def test_copies_are_stored_by_one_thread(build, typed):
    def body(kb, x, out):
        gmem.store(out, gmem.load(x, Layout.WGMMA_ROW))

    x = typed((64,), np.float32)
    assert str(build(body, [x], [x])).count("scf.if") == 1
