# SPDX-License-Identifier: Apache-2.0
"""The instructions of conversions; test_programs.py has their results."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_gpu.emitters import elementwise, gmem


@pytest.fixture
def ptx_of(compile_kernel, typed):
    """The PTX of a conversion of four elements of each thread."""

    def compiled(src, dst):
        def body(kb, view, out):
            gmem.store(out, elementwise.astype(gmem.load(view), np.dtype(dst)))

        return compile_kernel(body, [typed((512,), src)], [typed((512,), dst)]).ptx

    return compiled


@pytest.mark.offline
def test_two_neighbours_are_rounded_by_one_instruction(ptx_of):
    assert "cvt.rn.bf16x2.f32" in ptx_of(np.float32, "bfloat16")


@pytest.mark.offline
def test_float_to_int_is_one_instruction(ptx_of):
    ptx = ptx_of(np.float32, np.int32)
    assert "cvt.rzi.s32.f32" in ptx
    assert "selp" not in ptx


@pytest.mark.offline
@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_bytes_become_halves_two_at_a_time(dtype, ptx_of):
    ptx = ptx_of(dtype, np.float16)
    # No conversion of one element has its throughput.
    assert ptx.count("prmt.b32") == ptx.count(".f16x2") == 2
    assert "cvt.rn.f16" not in ptx


@pytest.mark.offline
@pytest.mark.parametrize(("dtype", "steps"), [(np.int8, 1), (np.uint8, 2)])
def test_bytes_become_bfloat16_two_at_a_time(dtype, steps, ptx_of):
    ptx = ptx_of(dtype, "bfloat16")
    assert ptx.count("prmt.b32") == 2
    assert ptx.count(".bf16x2") == 2 * steps
    assert "cvt.rn" not in ptx
