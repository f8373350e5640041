# SPDX-License-Identifier: Apache-2.0
"""Direct loads and stores of global memory."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_gpu.emitters import gmem
from pallas_gpu.layouts import Layout
from tests.support.finished import emitted, typed
from tests.support.refusal import refused_by


@pytest.mark.offline
def test_aligned_rows_move_in_wide_accesses(compile_kernel):
    x = typed((64, 256), np.float32)

    def body(kb, source, out):
        layout = Layout.WG_STRIDED((64, 256), vec_size=4)
        gmem.store(out, gmem.load(source, layout))

    ptx = compile_kernel(body, [x], [x]).ptx
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx


def test_an_unknown_start_moves_single_elements(build):
    def used(kb, source, out):
        part = source.slice((0, kb.threads.lane), (None, 128))
        gmem.store(out, gmem.load(part, Layout.WG_STRIDED((128,), vec_size=1)))

    x, y = typed((64, 256), np.float32), typed((128,), np.float32)
    assert "vector<1xf32>" in str(build(used, [x], [y]))


@refused_by(emitted, [typed((4,), np.float32)])
def test_a_scalar_access_needs_one_element(kb, x):
    gmem.load_scalar(x)


def test_copies_are_stored_by_one_thread(build):
    def body(kb, x, out):
        gmem.store(out, gmem.load(x, Layout.WGMMA_ROW))

    x = typed((64,), np.float32)
    assert str(build(body, [x], [x])).count("scf.if") == 1
