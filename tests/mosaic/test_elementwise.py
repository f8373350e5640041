# SPDX-License-Identifier: Apache-2.0
"""Which layout an elementwise operation works in."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_gpu import errors
from pallas_gpu.layouts import Layout
from pallas_gpu.mosaic import elementwise, gmem, registers
from pallas_gpu.mosaic.elements import dtypes

X = (64, 16)


def test_a_deferred_operand_takes_the_layout_it_meets(build, typed):
    def body(kb, view):
        value = gmem.load(view, Layout.WGMMA)
        result = elementwise.apply("add", value, registers.iota(np.float32, X, 0))
        assert result.layout == value.layout
        assert elementwise.apply("mul", elementwise.scalar(2, np.float32), value)

    build(body, [typed(X, np.float32)])


def test_two_layouts_are_refused_by_name(build, typed):
    def body(kb, view):
        first = gmem.load(view, Layout.WGMMA)
        elementwise.apply("add", first, gmem.load(view))

    with pytest.raises(errors.LayoutError, match="different layouts") as error:
        build(body, [typed(X, np.float32)])
    text = str(error.value)
    assert "Layout.WGMMA and Layout.WG_STRIDED" in text
    assert "layout_cast" in text


def test_different_shapes_are_refused(build):
    def body(kb):
        a, b = (registers.iota(np.int32, (n,), 0) for n in (128, 256))
        elementwise.apply("add", a, b)

    with pytest.raises(errors.ShapeError, match="different shapes"):
        build(body)


def test_splats_are_computed_once(build):
    def body(kb):
        splat = registers.splat(kb.i32(3), np.int32, X)
        result = elementwise.apply("add", splat, splat)
        assert isinstance(result, registers.Splat)
        assert result.shape == X

    build(body)


def test_equal_broadcasts_are_computed_before_they_are_repeated(build, typed):
    def body(kb, view):
        row = gmem.load(view, Layout.WGMMA_ROW)
        wide = registers.broadcast_in_dim(row, X, (0,))
        result = elementwise.apply("exp", elementwise.apply("add", wide, wide))
        assert isinstance(result, registers.Broadcast)
        assert result.operand.layout == row.layout

    build(body, [typed((64,), np.float32)])


def test_other_mixes_wait_for_a_layout(build, typed):
    def body(kb, view, out):
        rows, columns = (registers.iota(np.int32, X, d) for d in (0, 1))
        mask = elementwise.apply("ge", rows, columns)
        assert isinstance(mask, registers.Mapped)
        assert mask.dtype == dtypes.BOOL
        value = gmem.load(view, Layout.WGMMA)
        zero = elementwise.scalar(0, np.float32)
        gmem.store(out, elementwise.apply("select_n", mask, zero, value))

    build(body, [typed(X, np.float32), typed(X, np.float32)])


@pytest.mark.gpu
def test_a_causal_mask(run_kernel, typed, rng):
    x = rng.normal(size=(64, 64)).astype(np.float32)

    def body(kb, view, out):
        rows, columns = (registers.iota(np.int32, x.shape, d) for d in (0, 1))
        mask = elementwise.apply("ge", rows, columns)
        value = gmem.load(view, Layout.WGMMA)
        low = elementwise.scalar(-np.inf, np.float32)
        gmem.store(out, elementwise.apply("select_n", mask, low, value))

    (out,) = run_kernel(body, [x], [typed(x.shape, x.dtype)])
    np.testing.assert_array_equal(out, np.where(np.tri(64, dtype=bool), x, -np.inf))
