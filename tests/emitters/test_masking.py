# SPDX-License-Identifier: Apache-2.0
"""Masked accesses, and accesses of padded layouts, in GMEM and SMEM."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from pallas_gpu.emitters import gmem, mbarrier, padding, registers, smem
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.smem import SmemView
from pallas_gpu.layouts import WGStridedLayout
from pallas_gpu.layouts.registers.placement import default_placement
from tests.support.finished import emitted, smem_view, typed
from tests.support.refusal import refused_by

# A full array, one with padding, one with copies, one whose registers are vectors.
MASKED_SHAPES = [(128,), (1001,), (11,), (64, 32), (50, 12)]


LOAD = {"gmem": gmem.load, "smem": functools.partial(smem.load, optimized=False)}
STORE = {"gmem": gmem.store, "smem": functools.partial(smem.store, optimized=False)}


def held(kb, value) -> SmemView:
    """An array in SMEM that has been stored there."""
    view = smem_view(kb, 0, value.shape, value.dtype)
    STORE["smem"](view, value)
    mbarrier.warpgroup_barrier()
    return view


@pytest.mark.parametrize("shape", MASKED_SHAPES)
@pytest.mark.parametrize("memory", ["gmem", "smem"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
def test_a_masked_load_returns_other(memory, shape, dtype, run_kernel, sample, rng):
    x, other = sample(shape, np.dtype(dtype)), sample(shape, np.dtype(dtype))
    mask = rng.integers(0, 2, shape).astype(bool)

    def body(kb, source, chosen, otherwise, first, second):
        layout = default_placement(shape, 32)
        kept = gmem.load(chosen, layout)
        rest = gmem.load(otherwise, layout)
        view = source
        if memory == "smem":
            view = held(kb, gmem.load(source, layout))
        got = LOAD[memory](view, layout, mask=kept, other=rest)
        zeros = LOAD[memory](view, layout, mask=kept)
        gmem.store(first, got)
        gmem.store(second, zeros)

    result = typed(shape, x.dtype)
    first, second = run_kernel(
        body, [x, mask, other], [result, result], smem_bytes=x.nbytes
    )
    bits = f"u{x.dtype.itemsize}"
    x, other, first, second = (a.view(bits) for a in (x, other, first, second))
    np.testing.assert_array_equal(first, np.where(mask, x, other))
    np.testing.assert_array_equal(second, np.where(mask, x, 0))


@pytest.mark.parametrize("shape", MASKED_SHAPES)
@pytest.mark.parametrize("memory", ["gmem", "smem"])
def test_a_masked_store_leaves_the_rest(memory, shape, run_kernel, rng):
    old = rng.integers(0, 99, shape).astype(np.int32)
    mask = rng.integers(0, 2, shape).astype(bool)

    def body(kb, source, chosen, out):
        layout = default_placement(shape, 32)
        kept = gmem.load(chosen, layout)
        value = gmem.load(source, layout)
        minus = registers.splat(kb.i32(-1), np.int32, shape).materialize(layout)
        if memory == "gmem":
            gmem.store(out, value)
            gmem.store(out, minus, mask=kept)
            return
        target = held(kb, value)
        STORE["smem"](target, minus, mask=kept)
        mbarrier.warpgroup_barrier()
        gmem.store(out, LOAD["smem"](target, layout))

    (out,) = run_kernel(
        body, [old, mask], [typed(shape, np.int32)], smem_bytes=old.nbytes
    )
    np.testing.assert_array_equal(out, np.where(mask, -1, old))


def test_padding_is_loaded_as_zero(run_kernel):
    """A padded register array, seen without its padding's bounds."""
    x = np.arange(1, 132, dtype=np.int32)

    def body(kb, source, out):
        held = gmem.load(source)
        whole = registers.RegisterArray(
            held.values, WGStridedLayout((256,), 1).linear(), held.dtype
        )
        gmem.store(out, whole)

    (out,) = run_kernel(body, [x], [typed((256,), np.int32)])
    np.testing.assert_array_equal(out, np.pad(x, (0, 125)))


def test_filled_replaces_padding_along_the_given_axes(run_kernel):
    x = np.zeros((4, 131), np.int32)

    def body(kb, source, out):
        held = gmem.load(source)
        minus = dtypes.constant(-1, np.dtype(np.int32))
        rows = padding.filled(held, minus, (0,))
        assert rows.values == held.values  # rows are not padded
        both = padding.filled(held, minus)
        changed = [a != b for a, b in zip(both.values, held.values, strict=True)]
        assert any(changed) and not all(changed)
        gmem.store(out, both)

    (out,) = run_kernel(body, [x], [typed(x.shape, np.int32)])
    np.testing.assert_array_equal(out, x)


@pytest.mark.parametrize("what", ["dtype", "layout", "other"])
@refused_by(emitted, [typed((256,), np.float32)])
def test_masks_of_another_type_or_layout_are_refused(kb, source, *, what):
    layout = default_placement((256,), 32)
    mask = registers.splat(dtypes.constant(True, dtypes.BOOL), dtypes.BOOL, (256,))
    other = None
    if what == "dtype":
        mask = gmem.load(source, layout)
    elif what == "other":
        other = registers.splat(kb.i32(0), np.dtype(np.int32), (256,))
    else:
        mask = mask.materialize(WGStridedLayout((256,), 1).linear())
    gmem.load(source, layout, mask=mask, other=other)
