# SPDX-License-Identifier: Apache-2.0
"""The instructions of elementwise operations; test_programs.py has their results."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

from pallas_gpu.emitters import elementwise, gmem
from pallas_gpu.layouts import Layout
from pallas_gpu.runtime import ptx_stats

BF16 = np.dtype(ml_dtypes.bfloat16)
SIZE = 512
STRIDED = Layout.WG_STRIDED((SIZE,), vec_size=2)


def test_division_by_a_known_divisor_needs_no_guard(build, typed):
    def body(kb, view, out):
        seven = elementwise.scalar(7, np.int32)
        gmem.store(out, elementwise.apply("div", gmem.load(view), seven))

    text = str(build(body, [typed((128,), np.int32)], [typed((128,), np.int32)]))
    assert "arith.divsi" in text
    assert "arith.select" not in text


def test_bfloat16_exp_is_computed_in_float32(build, typed):
    x = typed((256,), BF16)

    def body(kb, view, out):
        gmem.store(out, elementwise.apply("exp", gmem.load(view)))

    text = str(build(body, [x], [x]))
    assert re.search(r"math.exp .*: vector<\d+xf32>", text)
    assert "arith.truncf" in text


@pytest.mark.offline
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_product_that_is_added_is_one_instruction(dtype, compile_kernel, typed):
    x = typed((SIZE,), np.dtype(dtype))

    def body(kb, left, right, out):
        a, b = (gmem.load(view, STRIDED) for view in (left, right))
        product = elementwise.apply("mul", a, b)
        gmem.store(out, elementwise.apply("add", product, a))

    found = set(ptx_stats.mnemonics(compile_kernel(body, [x, x], [x]).ptx))
    arithmetic = {m.split(".")[0] for m in found if m.endswith(("f32", "f16", "f16x2"))}
    assert arithmetic == {"fma"}
