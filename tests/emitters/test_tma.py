# SPDX-License-Identifier: Apache-2.0
"""Tensor copies: descriptors, boxes, edges, groups."""

from __future__ import annotations

import re

import numpy as np
import pytest
from jaxlib.mlir.dialects import arith

from pallas_gpu.emitters import mbarrier, tma
from pallas_gpu.layouts.smem.window import contiguous_layout
from tests.support import everywhere
from tests.support.finished import emitted, smem_view, typed
from tests.support.refusal import refused_by

# name: (array, tile, dtype, tiling, swizzle)
CASES = {
    "f16 128": ((256, 256), (128, 128), "float16", (8, 64)),
    "f32 64": ((128, 96), (64, 48), "float32", (8, 16), 64),
    "edge": ((200, 72), (64, 64), "float16", (8, 64)),
    "untiled": ((100, 40), (32, 16), "float32", None, 16),
    "long row": ((4, 4096), (1, 2048), "float32", None, 16),
    "many": ((1000, 64), (1000, 64), "bool", None, 16),
    "bf16 32": ((64, 64), (64, 32), "bfloat16", (8, 16), 32),
    "i8": ((128, 256), (64, 128), "int8", (8, 128), 128),
}


def block(kb, view, tile, known=True):
    i, j, _ = kb.threads.block_id
    starts = [arith.muli(b, kb.i32(t)) for b, t in zip((i, j), tile, strict=True)]
    return view.slice(starts, tile, multiples=tile if known else None)


def copy_body(case, known=True, **store):
    _, tile, *placement = CASES[case]

    def body(kb, x, out):
        view = smem_view(kb, 1024, tile, *placement)
        barrier = kb.smem_pointer(0)
        mbarrier.init(barrier, 1)
        kb.sync_after_init()
        tma.copy_gmem_to_smem(kb, block(kb, x, tile, known), view, barrier)
        mbarrier.wait(barrier, kb.i32(0))
        tma.copy_smem_to_gmem(kb, view, block(kb, out, tile, known), **store)
        tma.wait_group(0)

    return body


def grid(case):
    array, tile = CASES[case][:2]
    return (-(-array[0] // tile[0]), -(-array[1] // tile[1]), 1)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_blocks_arrive_where_they_came_from(case, known, run_kernel, sample):
    x = sample(CASES[case][0], np.dtype(CASES[case][2]))
    result = typed(x.shape, x.dtype)
    spec = {"grid": grid(case), "smem_bytes": (1 << 16) + 1024}
    (out,) = run_kernel(copy_body(case, known), [x], [result], **spec)
    bits = f"u{x.dtype.itemsize}"
    np.testing.assert_array_equal(out.view(bits), x.view(bits))


def module_text(build, case, **more):
    array, _, dtype = CASES[case][:3]
    x = typed(array, dtype)
    spec = {"grid": grid(case), "smem_bytes": 1 << 17}
    return str(build(copy_body(case, **more), [x], [x], **spec))


def test_equal_descriptors_share_one_slot(build):
    def body(kb, x):
        view = smem_view(kb, 1024, (64, 64), "float16", (8, 64))
        for start in (0, 64):
            part = x.slice((start, 0), (64, 64))
            tma.copy_smem_to_gmem(kb, view, part)

    text = str(build(body, [typed((128, 64), np.float16)], smem_bytes=1 << 14))
    assert "!llvm.array<128 x i8>" in text
    assert text.count("call @mosaic_gpu_init_tma_desc") == 1
    assert "tensor_map" not in text


def test_each_side_has_its_own_descriptor(build):
    text = module_text(build, "f16 128")
    assert text.count("call @mosaic_gpu_init_tma_desc") == 2
    assert "!llvm.array<256 x i8>" in text


def test_the_bytes_are_announced_before_the_copy(build):
    text = module_text(build, "f16 128")
    names = re.findall(r"(mbarrier\.arrive\.expect_tx|cp\.async\.bulk\.tensor)", text)
    assert names[:2] == ["mbarrier.arrive.expect_tx", "cp.async.bulk.tensor"]
    assert f"arith.constant {128 * 128 * 2} : i32" in text


def test_many_equal_copies_become_a_loop(build):
    few = module_text(build, "f16 128")
    many = module_text(build, "f16 128", known=False)
    assert "scf.for" not in few
    assert "scf.for" in many
    assert many.count("cp.async.bulk.tensor.2d.shared") == 1


@pytest.mark.offline
def test_one_instruction_moves_a_tiled_block(compile_kernel):
    x = typed((256, 256), np.float16)
    spec = {"grid": (2, 2, 1), "smem_bytes": 1 << 16}
    ptx = compile_kernel(copy_body("f16 128"), [x], [x], **spec).ptx
    assert ptx.count("cp.async.bulk.tensor.4d.shared::cluster.global") == 1
    assert ptx.count("cp.async.bulk.tensor.4d.global.shared::cta") == 1
    assert "mbarrier.try_wait.parity" in ptx


@refused_by(emitted, [typed((64, 64), np.float16)], smem_bytes=1 << 13)
def test_a_copy_cannot_transpose(kb, x):
    view = smem_view(kb, 0, (64, 64), "float16", (8, 64))
    tma.copy_smem_to_gmem(kb, view.transpose((1, 0)), x)


@refused_by(emitted, [typed((64, 64), np.float16)], smem_bytes=1 << 14)
def test_smem_with_gaps_is_refused(kb, x):
    view = smem_view(kb, 0, (64, 128), "float16", (8, 64))
    tma.copy_smem_to_gmem(kb, view.slice((0, 64), (64, 64)), x)


@everywhere.tests(emitted, [typed((64, 64), np.float16)], smem_bytes=1 << 15)
def test_a_stage_of_a_buffer_has_no_gaps(kb, x):
    view = smem_view(kb, 0, (3, 64, 64), "float16", (8, 64))
    stage = view.slice((kb.threads.lane, 0, 0), (None, 64, 64))
    assert contiguous_layout(stage.layout, stage.window).shape == (64, 64)
    assert tma.transfer_bytes(stage) == 64 * 64 * 2
    tma.copy_smem_to_gmem(kb, stage, x)


@refused_by(emitted, [typed((64, 64), np.float32)], smem_bytes=1 << 13)
def test_the_two_sides_must_agree(kb, x):
    view = smem_view(kb, 0, (64, 64), "float16", (8, 64))
    tma.copy_smem_to_gmem(kb, view, x)


@refused_by(emitted, [typed((2048,), np.float16)], smem_bytes=1 << 13)
def test_adjacent_bytes_are_as_many_on_both_sides(kb, x):
    tma.copy_smem_to_gmem(kb, smem_view(kb, 0, (4096,), "float16"), x)


@refused_by(emitted, [typed((64, 512), np.uint8)], smem_bytes=1 << 14)
def test_the_descriptors_of_a_kernel_fit_its_parameters(kb, x):
    for height in range(1, 21):
        for width in range(16, 272, 16):
            tile = (height, width)
            view = smem_view(kb, 1024, tile, "uint8")
            tma.copy_smem_to_gmem(kb, view, x.slice((0, 0), tile))
