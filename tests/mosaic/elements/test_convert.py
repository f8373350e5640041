# SPDX-License-Identifier: Apache-2.0
"""The instructions of conversions; test_programs.py has their results."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_gpu.mosaic import elementwise, gmem


@pytest.mark.offline
def test_two_neighbours_are_rounded_by_one_instruction(compile_kernel, typed):
    def body(kb, view, out):
        gmem.store(out, elementwise.astype(gmem.load(view), np.dtype("bfloat16")))

    x, y = typed((256,), np.float32), typed((256,), "bfloat16")
    assert "cvt.rn.bf16x2.f32" in compile_kernel(body, [x], [y]).ptx


@pytest.mark.offline
def test_float_to_int_is_one_instruction(compile_kernel, typed):
    def body(kb, view, out):
        gmem.store(out, elementwise.astype(gmem.load(view), np.dtype(np.int32)))

    x, y = typed((128,), np.float32), typed((128,), np.int32)
    ptx = compile_kernel(body, [x], [y]).ptx
    assert "cvt.rzi.s32.f32" in ptx
    assert "selp" not in ptx


@pytest.mark.offline
@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_bytes_become_halves_two_at_a_time(dtype, compile_kernel, typed):
    def body(kb, view, out):
        gmem.store(out, elementwise.astype(gmem.load(view), np.dtype(np.float16)))

    x, y = typed((512,), dtype), typed((512,), np.float16)
    ptx = compile_kernel(body, [x], [y]).ptx
    # Of the four elements of a thread; no conversion of one element has its throughput.
    assert ptx.count("prmt.b32") == ptx.count(".f16x2") == 2
    assert "cvt.rn.f16" not in ptx
