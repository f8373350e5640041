# SPDX-License-Identifier: Apache-2.0
"""Reductions over any layout, in a thread, a warp and a warpgroup."""

from __future__ import annotations

import re

import numpy as np
import pytest

from pallas_gpu.emitters import elementwise, gmem
from pallas_gpu.emitters.moves import reductions
from pallas_gpu.emitters.moves.scratch import SmemScratch
from pallas_gpu.layouts import Layout
from pallas_gpu.layouts.moves.reductions import plan_reduction
from pallas_gpu.layouts.registers.placement import place
from tests.support.finished import emitted, typed
from tests.support.movement_programs import reduction
from tests.support.refusal import refused, refused_by

LAYOUTS = {
    "WGMMA": (Layout.WGMMA, (128, 32)),
    "WGMMA_TRANSPOSED": (Layout.WGMMA_TRANSPOSED, (64, 64)),
    "WGMMA_8BIT": (Layout.WGMMA_8BIT, (64, 32)),
    "strided": (None, (64, 128)),
    "narrow": (None, (512, 8)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "int32", "int8", "bfloat16", "int64"])
@pytest.mark.parametrize("kind", ["add", "max"])
def test_reductions_agree_with_numpy(kind, dtype, name, axes, computes, rng):
    layout, shape = LAYOUTS[name]
    x = rng.integers(-4, 5, shape)
    if dtype == "bfloat16" and kind == "add":
        # bfloat16 holds integers up to 256 exactly; stay below.
        x *= rng.random(shape) < 0.02
    computes(reduction(kind, x.astype(dtype), layout, axes))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["add", "mul", "max", "min", "and", "or"])
def test_every_kind_over_everything(kind, computes, rng):
    x = rng.integers(1, 3, (128,)).astype(np.int32)
    x[:100] = 1
    computes(reduction(kind, x, None, (0,)))


@pytest.mark.gpu
def test_small_scratch_is_used_in_rounds(computes, rng):
    x = rng.integers(-9, 9, (64, 128)).astype(np.float32)
    few = plan_reduction(place(Layout.WGMMA, x.shape), (0,)).round_bytes(32)
    for scratch in (3 * few, few // 2, 32):
        computes(reduction("add", x, Layout.WGMMA, (0,), scratch=scratch))


def sum_of_wgmma(columns, axis) -> str:
    x = np.zeros((64, columns), np.float32)
    return str(reduction("add", x, Layout.WGMMA, (axis,)).module())


def test_rows_of_wgmma_take_two_shuffles_and_no_scratch():
    text = sum_of_wgmma(32, 1)
    # Two registers of row sums, two butterflies each.
    assert text.count("nvvm.shfl.sync bfly") == 4
    assert "llvm.store" in text and "!llvm.ptr<3>, f32" not in text


def test_columns_of_wgmma_cross_the_warps():
    text = sum_of_wgmma(8, 0)
    # One register of two columns, two words each, three butterflies.
    assert text.count("nvvm.shfl.sync bfly") == 6
    assert text.count("nvvm.barrier") == 2


@pytest.mark.offline
def test_a_sum_of_products_consists_of_fmas(compile_kernel):
    def body(kb, view, out):
        x = gmem.load(view)
        room = SmemScratch(kb.smem_pointer(0), 2048)
        squares = elementwise.apply("mul", x, x)
        total = reductions.reduce("add", squares, (0,), room)
        gmem.store_scalar(out, total.value)

    x, y = typed((8192,), np.float32), typed((), np.float32)
    ptx = compile_kernel(body, [x], [y], smem_bytes=2048).ptx
    # 64 elements in a thread: four products in a sum, one of which begins it.
    assert len(re.findall(r"mul(\.rn)?\.f32", ptx)) == 16
    assert ptx.count("fma.rn.f32") == 48


@refused_by(emitted, [typed((64, 8), np.float32)])
def test_missing_scratch_says_how_much_is_needed(kb, view):
    reductions.reduce("add", gmem.load(view, Layout.WGMMA), (0,))


@refused
def test_mixed_axes_are_refused():
    reduction("add", np.zeros((384, 3), np.float32), None, (0,)).module()
