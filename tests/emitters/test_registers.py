# SPDX-License-Identifier: Apache-2.0
"""Arrays in registers, and arrays that take the layout of what they meet."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_gpu.emitters import elementwise, gmem, registers
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.layouts import Layout
from pallas_gpu.layouts.registers.placement import place
from tests.support import everywhere
from tests.support.finished import emitted, typed
from tests.support.refusal import refused_by

SHAPE = (64, 32)


@pytest.mark.gpu
def test_a_thread_regroups_its_own_elements(run_kernel, rng):
    x = rng.normal(size=SHAPE).astype(np.float32)

    def body(kb, view, out):
        value = gmem.load(view, Layout.WGMMA)
        assert value.layout.vector_length == 2
        value = registers.regroup(value, Layout.WGMMA_ACC_32BIT)
        assert value.layout.vector_length == 1
        gmem.store(out, value)

    (out,) = run_kernel(body, [x], [typed(SHAPE, x.dtype)])
    np.testing.assert_array_equal(out, x)


@refused_by(emitted, [typed((64, 64), np.float32)])
def test_regrouping_moves_nothing_between_threads(kb, view):
    value = gmem.load(view, Layout.WGMMA)
    registers.regroup(value, Layout.WGMMA_TRANSPOSED)


@refused_by(emitted, [typed((128, 32), np.float32), typed((128,), np.float32)])
def test_a_broadcast_from_other_threads_is_refused(kb, view, column):
    value = gmem.load(view, Layout.WGMMA)
    strided = gmem.load(column, Layout.WG_STRIDED((128,), vec_size=1))
    column = registers.broadcast_in_dim(strided, (128, 32), (0,))
    elementwise.apply("add", value, column)


@refused_by(emitted)
def test_only_a_splat_has_a_splat_layout(kb):
    splat = registers.splat(kb.i32(1), np.int32, (128,))
    layout = Layout.WG_SPLAT((128,))
    assert registers.regroup(splat, layout) is splat
    registers.regroup(registers.iota(np.int32, (128,), 0), layout)


@everywhere.tests(emitted)
def test_broadcasts_and_reshapes_of_deferred_arrays_stay_deferred(kb):
    iota = registers.iota(np.int32, (8, 16), 1)
    wide = registers.broadcast_in_dim(iota, (4, 8, 16), (1, 2))
    assert wide == registers.Iota(dtypes.I32, (4, 8, 16), 2)
    tall = registers.reshape(iota, (8, 1, 16))
    assert tall == registers.Iota(dtypes.I32, (8, 1, 16), 2)
    flat = registers.squeeze(registers.iota(np.int32, (1, 16), 0), (0,))
    assert isinstance(flat, registers.Splat)


@refused_by(emitted)
def test_a_register_array_needs_its_registers(kb):
    registers.RegisterArray((), place(Layout.WGMMA, SHAPE), dtypes.F32)
