# SPDX-License-Identifier: Apache-2.0
"""Reductions over any layout, in a thread, a warp and a warpgroup."""

from __future__ import annotations

import re

import numpy as np
import pytest

from pallas_gpu import errors
from pallas_gpu.layouts import Layout
from pallas_gpu.layouts.moves.reductions import plan_reduction
from pallas_gpu.layouts.registers.placement import place
from pallas_gpu.mosaic import elementwise, gmem, registers
from pallas_gpu.mosaic.moves import reductions
from pallas_gpu.mosaic.moves.scratch import SmemScratch

FOLD = {
    "add": np.add,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}
LAYOUTS = {
    "WGMMA": (Layout.WGMMA, (128, 32)),
    "WGMMA_TRANSPOSED": (Layout.WGMMA_TRANSPOSED, (64, 64)),
    "WGMMA_8BIT": (Layout.WGMMA_8BIT, (64, 32)),
    "strided": (None, (64, 128)),
    "narrow": (None, (512, 8)),
}


def reduce_body(kind, layout, axes, scratch=2048):
    def body(kb, view, out):
        x = gmem.load(view, layout)
        result = reductions.reduce(
            kind, x, axes, SmemScratch(kb.smem_pointer(0), scratch)
        )
        if isinstance(result, registers.Splat):
            gmem.store_scalar(out, result.value)
        else:
            gmem.store(out, result)

    return body


@pytest.mark.gpu
@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "int32", "int8", "bfloat16", "int64"])
@pytest.mark.parametrize("kind", ["add", "max"])
def test_reductions_agree_with_numpy(kind, dtype, name, axes, run_kernel, typed, rng):
    layout, shape = LAYOUTS[name]
    x = rng.integers(-4, 5, shape).astype(dtype)
    wide = x.astype(np.int64)
    wanted = FOLD[kind].reduce(wide, axis=axes)
    if dtype == "bfloat16" and kind == "add":
        # bfloat16 holds integers up to 256 exactly; stay below.
        x = (x.astype(np.float32) * (rng.random(shape) < 0.02)).astype(dtype)
        wanted = x.astype(np.float32).sum(axis=axes)
    body = reduce_body(kind, layout, axes)
    (actual,) = run_kernel(body, [x], [typed(wanted.shape, dtype)], smem_bytes=2048)
    np.testing.assert_array_equal(actual, wanted.astype(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["add", "mul", "max", "min", "and", "or"])
def test_every_kind_over_everything(kind, run_kernel, typed, rng):
    x = rng.integers(1, 3, (128,)).astype(np.int32)
    x[:100] = 1
    body = reduce_body(kind, None, (0,))
    (actual,) = run_kernel(body, [x], [typed((), np.int32)], smem_bytes=2048)
    assert actual == FOLD[kind].reduce(x)


@pytest.mark.gpu
def test_small_scratch_is_used_in_rounds(run_kernel, typed, rng):
    x = rng.integers(-9, 9, (64, 128)).astype(np.float32)
    layout = Layout.WGMMA
    linear = place(layout, x.shape)
    few = plan_reduction(linear, (0,)).round_bytes(32)
    body = reduce_body("add", layout, (0,), scratch=3 * few)
    (actual,) = run_kernel(body, [x], [typed((128,), np.float32)], smem_bytes=2048)
    np.testing.assert_array_equal(actual, x.sum(0))


def test_rows_of_wgmma_take_two_shuffles_and_no_scratch(build, typed):
    x, y = typed((64, 32), np.float32), typed((64,), np.float32)
    text = str(build(reduce_body("add", Layout.WGMMA, (1,)), [x], [y]))
    # Two registers of row sums, two butterflies each.
    assert text.count("nvvm.shfl.sync bfly") == 4
    assert "llvm.store" in text and "!llvm.ptr<3>, f32" not in text


def test_columns_of_wgmma_cross_the_warps(build, typed):
    x, y = typed((64, 8), np.float32), typed((8,), np.float32)
    text = str(build(reduce_body("add", Layout.WGMMA, (0,)), [x], [y], smem_bytes=2048))
    # One register of two columns, two words each, three butterflies.
    assert text.count("nvvm.shfl.sync bfly") == 6
    assert text.count("nvvm.barrier") == 2


@pytest.mark.offline
def test_a_sum_of_products_consists_of_fmas(compile_kernel, typed):
    x, y = typed((8192,), np.float32), typed((), np.float32)

    def body(kb, view, out):
        x = gmem.load(view)
        squares = elementwise.apply("mul", x, x)
        total = reductions.reduce(
            "add", squares, (0,), SmemScratch(kb.smem_pointer(0), 2048)
        )
        gmem.store_scalar(out, total.value)

    ptx = compile_kernel(body, [x], [y], smem_bytes=2048).ptx
    # 64 elements in a thread: four products in a sum, one of which begins it.
    assert len(re.findall(r"mul(\.rn)?\.f32", ptx)) == 16
    assert ptx.count("fma.rn.f32") == 48


def test_missing_scratch_says_how_much_is_needed(build, typed):
    def body(kb, view, out):
        reductions.reduce("add", gmem.load(view, Layout.WGMMA), (0,))

    x, y = typed((64, 8), np.float32), typed((8,), np.float32)
    with pytest.raises(errors.OutOfResources, match="at least 128 bytes"):
        build(body, [x], [y])


def test_mixed_axes_are_refused(build, typed):
    x, y = typed((384, 3), np.float32), typed((3,), np.float32)
    with pytest.raises(errors.LayoutError, match="no linear form"):
        build(reduce_body("add", None, (0,)), [x], [y])
