# SPDX-License-Identifier: Apache-2.0
"""Relayouts as they are emitted: run in lockstep, counted in PTX, run on a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_gpu import errors
from pallas_gpu.layouts import Layout
from pallas_gpu.layouts.registers.placement import place
from pallas_gpu.mosaic import gmem, registers
from pallas_gpu.mosaic.moves import relayout
from pallas_gpu.mosaic.moves.scratch import SmemScratch
from pallas_gpu.runtime.ptx_stats import instruction_counts
from tests.support.lockstep import machine as lockstep

STRIDED = Layout.WG_STRIDED((64, 64), vec_size=4)
# name: (from, to, shape, scratch)
CASES = {
    "shuffles": (Layout.WGMMA, Layout.WGMMA_TRANSPOSED, (64, 64), 0),
    "shuffles back": (Layout.WGMMA_TRANSPOSED, Layout.WGMMA, (64, 64), 0),
    "upcast": (Layout.WGMMA_UPCAST_2X, Layout.WGMMA, (64, 64), 0),
    "upcast twice": (Layout.WGMMA_UPCAST_4X, Layout.WGMMA, (64, 96), 0),
    "native": (Layout.TCGEN05, Layout.TCGEN05_TMEM_NATIVE, (128, 32), 0),
    "native in smem": (Layout.TCGEN05, Layout.TCGEN05_TMEM_NATIVE, (128, 32), 1 << 15),
    "rows": (Layout.WGMMA, STRIDED, (64, 64), 1 << 15),
    "rows in rounds": (Layout.WGMMA, STRIDED, (64, 64), 4096),
    "rows in parts": (STRIDED, Layout.WGMMA, (64, 64), 2048),
    "copies": (Layout.WGMMA_ROW, Layout.WG_STRIDED((256,), 1), (256,), 2048),
    "copies made": (Layout.WG_STRIDED((256,), 2), Layout.WGMMA_COL, (256,), 2048),
    "odd rows": (Layout.WGMMA, Layout.WG_STRIDED((64, 24), 4), (64, 24), 1 << 14),
    "odd strides": (
        Layout.WG_STRIDED((64, 100), 2), Layout.WG_STRIDED((64, 100), 1), (64, 100),
        4096,
    ),
}  # fmt: skip


def relayout_body(src, dst, scratch=0):
    def body(kb, view, out):
        x = gmem.load(view, src)
        room = SmemScratch(kb.smem_pointer(0), scratch) if scratch else None
        moved = relayout.layout_cast(x, dst, room)
        assert moved.layout == place(dst, view.shape)
        gmem.store(out, moved)

    return body


def as_bits(x: np.ndarray) -> np.ndarray:
    return x.view(f"u{x.dtype.itemsize}")


DTYPES = ("int8", "bfloat16", "float32", "int64", "bool")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_element_gets_where_it_belongs(case, dtype, sample, typed):
    src, dst, shape, scratch = CASES[case]
    # Wider elements need more.
    scratch = max(scratch, scratch and 8192) if dtype == "int64" else scratch
    x = sample(shape, dtype)
    body = relayout_body(src, dst, scratch)
    (out,) = lockstep.run(body, [x], [typed(shape, dtype)], smem_bytes=scratch)
    np.testing.assert_array_equal(as_bits(out), as_bits(x))


def test_two_relayouts_share_the_scratch(sample, typed):
    x = sample((64, 64), "float32")

    def body(kb, view, out):
        room = SmemScratch(kb.smem_pointer(0), 4096)
        value = gmem.load(view, Layout.WGMMA)
        for layout in (STRIDED, Layout.WGMMA, STRIDED):
            value = relayout.layout_cast(value, layout, room)
        gmem.store(out, value)

    (out,) = lockstep.run(body, [x], [typed(x.shape, x.dtype)], smem_bytes=4096)
    np.testing.assert_array_equal(as_bits(out), as_bits(x))


def test_the_threads_meet_before_and_after_the_stores(monkeypatch, sample, typed):
    x = sample((64, 64), "float32")
    body = relayout_body(Layout.WGMMA, STRIDED, 4096)
    monkeypatch.setattr(relayout.mbarrier, "warpgroup_barrier", lambda: None)
    with pytest.raises(AssertionError, match="before the threads have met"):
        lockstep.run(body, [x], [typed(x.shape, x.dtype)], smem_bytes=4096)


@pytest.mark.offline
@pytest.mark.parametrize(("dtype", "shuffles"), [("float32", 16), ("float16", 8)])
def test_transposed_vectors_are_exchanged_by_shuffles(
    dtype, shuffles, compile_kernel, typed
):
    x = typed((64, 64), dtype)
    body = relayout_body(Layout.WGMMA, Layout.WGMMA_TRANSPOSED)
    counts = instruction_counts(compile_kernel(body, [x], [x]).ptx)
    # One finds the thread's warp.
    assert counts["shfl"] == shuffles + 1
    assert counts.get("st.shared", 0) == counts.get("bar", 0) == 0


@pytest.mark.offline
def test_registers_of_other_names_take_no_instruction(compile_kernel, typed):
    x = typed((64, 64), "float32")
    stay = compile_kernel(relayout_body(Layout.WGMMA, Layout.WGMMA), [x], [x])
    body = relayout_body(Layout.WGMMA, Layout.WGMMA_ACC_32BIT)
    counts = instruction_counts(compile_kernel(body, [x], [x]).ptx)
    assert counts["shfl"] == instruction_counts(stay.ptx)["shfl"] == 1
    assert "ld.shared" not in counts


@pytest.mark.offline
def test_what_crosses_warps_goes_through_smem_in_wide_accesses(compile_kernel, typed):
    x = typed((64, 64), "float32")
    body = relayout_body(Layout.WGMMA, STRIDED, 1 << 14)
    counts = instruction_counts(compile_kernel(body, [x], [x], smem_bytes=1 << 14).ptx)
    # 32 elements of a thread, four at a time.
    assert counts["st.shared"] == counts["ld.shared"] == 8
    assert counts["shfl"] == 1


def test_too_little_scratch_says_how_much_is_needed(build, typed):
    x = typed((64, 64), np.float32)
    with pytest.raises(errors.OutOfResources) as info:
        build(relayout_body(Layout.WGMMA, STRIDED), [x], [x])
    text = str(info.value)
    assert "Layout.WGMMA" in text and "STRIDED" in text
    assert f"reduction_scratch_bytes={info.value.used_bytes}" in text
    enough = relayout_body(Layout.WGMMA, STRIDED, info.value.used_bytes)
    build(enough, [x], [x], smem_bytes=info.value.used_bytes)


def test_a_deferred_array_is_made_in_the_layout(build):
    def body(kb):
        iota = registers.iota(np.int32, (64, 64), 1)
        made = relayout.layout_cast(iota, Layout.WGMMA)
        assert made.layout == place(Layout.WGMMA, (64, 64))

    build(body)
