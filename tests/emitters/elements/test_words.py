# SPDX-License-Identifier: Apache-2.0
"""Registers as words of inline assembly and back: optimization barriers of any type."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_gpu.emitters import gmem, registers
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.tensor_cores import wgmma
from pallas_gpu.layouts import Layout


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "float16", "bfloat16", "int32", "float32", "int64"]
)
@pytest.mark.parametrize("vector", [1, 4])
def test_an_optimization_barrier_changes_nothing(
    dtype, vector, run_kernel, typed, sample
):
    x = sample((8, 128), dtype)

    def body(kb, source, out, zeros):
        layout = Layout.WG_STRIDED((8, 128), vec_size=vector)
        one = gmem.load(source, layout)
        splat = registers.splat(dtypes.constant(0, one.dtype), one.dtype, one.shape)
        indices = registers.iota(np.int32, one.shape, 0)
        same, zero, lazy = wgmma.optimization_barrier([one, splat, indices])
        assert lazy is indices
        gmem.store(out, same)
        gmem.store(zeros, zero.materialize(layout))

    results = [typed(x.shape, x.dtype)] * 2
    out, zeros = run_kernel(body, [x], results)
    np.testing.assert_array_equal(out.view(np.uint8), x.view(np.uint8))
    assert (zeros == 0).all()


@pytest.mark.offline
def test_an_optimization_barrier_takes_every_register(compile_kernel, typed):
    types = np.bool_, np.int8

    def body(kb, *out):
        for ref, dtype in zip(out, types, strict=True):
            ones = registers.splat(dtypes.constant(1, np.dtype(dtype)), dtype, (128,))
            held = registers.regroup(ones, Layout.WG_STRIDED((128,), vec_size=1))
            (same,) = wgmma.optimization_barrier([held])
            gmem.store(ref, same)

    compiled = compile_kernel(body, [], [typed((128,), dtype) for dtype in types])
    assert "begin inline asm" in compiled.ptx


def test_a_barrier_after_a_barrier_takes_the_words_of_the_first_one(build, typed):
    def body(kb, out):
        held = gmem.load(out, Layout.WG_STRIDED((256,), vec_size=2))
        for _ in range(3):
            (held,) = wgmma.optimization_barrier([held])
        gmem.store(out, held)

    text = str(build(body, [], [typed((256,), np.float32)]))
    assert text.count("llvm.inline_asm") == 3
    # The words of a loaded register are extracted, those of an assembled one are known.
    assert text.count("vector.extract ") == 2
