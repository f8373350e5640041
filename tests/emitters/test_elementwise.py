# SPDX-License-Identifier: Apache-2.0
"""Which layout an elementwise operation works in."""

from __future__ import annotations

import numpy as np

from pallas_gpu.emitters import elementwise, gmem, registers
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.layouts import Layout
from tests.support import everywhere
from tests.support.finished import emitted, typed
from tests.support.refusal import refused_by

X = (64, 16)


@everywhere.tests(emitted, [typed(X, np.float32)])
def test_a_deferred_operand_takes_the_layout_it_meets(kb, view):
    value = gmem.load(view, Layout.WGMMA)
    result = elementwise.apply("add", value, registers.iota(np.float32, X, 0))
    assert result.layout == value.layout
    assert elementwise.apply("mul", elementwise.scalar(2, np.float32), value)


@refused_by(emitted, [typed(X, np.float32)])
def test_two_layouts_are_refused_by_name(kb, view):
    first = gmem.load(view, Layout.WGMMA)
    elementwise.apply("add", first, gmem.load(view))


@refused_by(emitted)
def test_different_shapes_are_refused(kb):
    elementwise.apply("add", *(registers.iota(np.int32, (n,), 0) for n in (128, 256)))


@everywhere.tests(emitted)
def test_splats_are_computed_once(kb):
    splat = registers.splat(kb.i32(3), np.int32, X)
    result = elementwise.apply("add", splat, splat)
    assert isinstance(result, registers.Splat)
    assert result.shape == X


@everywhere.tests(emitted, [typed((64,), np.float32)])
def test_equal_broadcasts_are_computed_before_they_are_repeated(kb, view):
    row = gmem.load(view, Layout.WGMMA_ROW)
    wide = registers.broadcast_in_dim(row, X, (0,))
    result = elementwise.apply("exp", elementwise.apply("add", wide, wide))
    assert isinstance(result, registers.Broadcast)
    assert result.operand.layout == row.layout


def test_other_mixes_wait_for_a_layout(run_kernel, rng):
    x = rng.normal(size=(64, 64)).astype(np.float32)

    def body(kb, view, out):
        rows, columns = (registers.iota(np.int32, x.shape, d) for d in (0, 1))
        mask = elementwise.apply("ge", rows, columns)
        assert isinstance(mask, registers.Mapped)
        assert mask.dtype == dtypes.BOOL
        value = gmem.load(view, Layout.WGMMA)
        low = elementwise.scalar(-np.inf, np.float32)
        gmem.store(out, elementwise.apply("select_n", mask, low, value))

    (out,) = run_kernel(body, [x], [x])
    np.testing.assert_array_equal(out, np.where(np.tri(64, dtype=bool), x, -np.inf))
