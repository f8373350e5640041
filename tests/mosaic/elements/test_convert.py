# SPDX-License-Identifier: Apache-2.0
"""Conversions give what lax gives."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
from jax import lax

from pallas_gpu.mosaic import elementwise, gmem

SIZE = 1024
DTYPES = [
    "float32",
    "float16",
    "bfloat16",
    "int32",
    "uint32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "int64",
]


@pytest.mark.gpu
@pytest.mark.parametrize(("src", "dst"), list(itertools.permutations(DTYPES, 2)))
def test_conversions_agree_with_lax(src, dst, run_kernel, typed, sample):
    x = sample((SIZE,), np.dtype(src))
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        # Under jit: of NumPy's arrays lax would convert as NumPy does.
        convert = jax.jit(lambda x: lax.convert_element_type(x, np.dtype(dst)))
        wanted = np.asarray(convert(x))

    def body(kb, view, out):
        gmem.store(out, elementwise.astype(gmem.load(view), np.dtype(dst)))

    (actual,) = run_kernel(body, [x], [typed((SIZE,), wanted.dtype)])
    # NumPy tells the NaNs of bfloat16 apart, not those of its own types.
    wide = np.float32 if dst == "bfloat16" else wanted.dtype
    np.testing.assert_array_equal(actual.astype(wide), wanted.astype(wide))


@pytest.mark.gpu
@pytest.mark.parametrize("narrow", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("wide", ["float32", "float16", "bfloat16"])
def test_float8_survives_the_way_there_and_back(narrow, wide, run_kernel, typed):
    x = np.arange(256, dtype=np.uint8).view(np.dtype(narrow))
    x = x[np.isfinite(x.astype(np.float32))]
    x = np.resize(x, SIZE)

    def body(kb, view, out, back):
        value = elementwise.astype(gmem.load(view), np.dtype(wide))
        gmem.store(out, value)
        gmem.store(back, elementwise.astype(value, np.dtype(narrow)))

    results = [typed((SIZE,), wide), typed((SIZE,), narrow)]
    out, back = run_kernel(body, [x], results)
    np.testing.assert_array_equal(out, x.astype(wide))
    np.testing.assert_array_equal(back.view(np.uint8), x.view(np.uint8))


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
