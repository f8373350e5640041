# SPDX-License-Identifier: Apache-2.0
"""Relayouts as they are emitted: run in lockstep, counted in PTX, run on a GPU."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pallas_gpu import errors
from pallas_gpu.emitters import gmem, registers
from pallas_gpu.emitters.moves import relayout
from pallas_gpu.emitters.moves.scratch import SmemScratch
from pallas_gpu.layouts import Layout
from pallas_gpu.layouts.registers.placement import place
from pallas_gpu.runtime.ptx_stats import instruction_counts
from tests.support import everywhere
from tests.support.finished import emitted
from tests.support.movement_programs import relayout_of
from tests.support.programs import Program

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
    "rows, a few at a time": (STRIDED, Layout.WGMMA, (64, 64), 48),
    "odd rows, a few at a time": (
        Layout.WGMMA, Layout.WG_STRIDED((64, 24), 4), (64, 24), 16,
    ),
    "copies": (Layout.WGMMA_ROW, Layout.WG_STRIDED((256,), 1), (256,), 2048),
    "copies made": (Layout.WG_STRIDED((256,), 2), Layout.WGMMA_COL, (256,), 2048),
    "odd rows": (Layout.WGMMA, Layout.WG_STRIDED((64, 24), 4), (64, 24), 1 << 14),
    "odd strides": (
        Layout.WG_STRIDED((64, 100), 2), Layout.WG_STRIDED((64, 100), 1), (64, 100),
        4096,
    ),
}  # fmt: skip


DTYPES = ("int8", "bfloat16", "float32", "int64", "bool")


@pytest.mark.parametrize(
    ("dtype", "case"), [*itertools.product(DTYPES, CASES), ("int4", "odd rows")]
)
def test_every_element_gets_where_it_belongs(case, dtype, computes, sample):
    src, dst, shape, scratch = CASES[case]
    computes(relayout_of(sample(shape, dtype), src, dst, scratch))


def test_two_relayouts_share_the_scratch(computes, sample):
    x = sample((64, 64), "float32")

    def body(kb, view, out):
        room = SmemScratch(kb.smem_pointer(0), 4096)
        value = gmem.load(view, Layout.WGMMA)
        for layout in (STRIDED, Layout.WGMMA, STRIDED):
            value = relayout.layout_cast(value, layout, room)
        gmem.store(out, value)

    computes(Program(body, [x], [x], smem_bytes=4096))


def test_the_threads_meet_before_and_after_the_stores(monkeypatch, computes, sample):
    program = relayout_of(sample((64, 64), "float32"), Layout.WGMMA, STRIDED, 4096)
    monkeypatch.setattr(relayout.mbarrier, "warpgroup_barrier", lambda: None)
    with pytest.raises(AssertionError, match="before the threads have met"):
        program.results(program.module())


@pytest.fixture
def counts(compile_kernel):
    """How often a relayout has each instruction."""

    def count(dtype, src, dst, scratch=0):
        x = np.zeros((64, 64), dtype)
        emit = relayout_of(x, src, dst, scratch).emit
        ptx = compile_kernel(emit, [x], [x], smem_bytes=scratch).ptx
        return instruction_counts(ptx)

    return count


@pytest.mark.offline
@pytest.mark.parametrize(("dtype", "shuffles"), [("float32", 16), ("float16", 8)])
def test_transposed_vectors_are_exchanged_by_shuffles(dtype, shuffles, counts):
    found = counts(dtype, Layout.WGMMA, Layout.WGMMA_TRANSPOSED)
    # One finds the thread's warp.
    assert found["shfl"] == shuffles + 1
    assert found.get("st.shared", 0) == found.get("bar", 0) == 0


@pytest.mark.offline
def test_registers_of_other_names_take_no_instruction(counts):
    for layout in (Layout.WGMMA, Layout.WGMMA_ACC_32BIT):
        found = counts("float32", Layout.WGMMA, layout)
        assert found["shfl"] == 1
        assert "ld.shared" not in found


@pytest.mark.offline
def test_what_crosses_warps_goes_through_smem_in_wide_accesses(counts):
    found = counts("float32", Layout.WGMMA, STRIDED, 1 << 14)
    # 32 elements of a thread, four at a time.
    assert found["st.shared"] == found["ld.shared"] == 8
    assert found["shfl"] == 1


def test_too_little_scratch_says_how_much_is_needed():
    x = np.zeros((64, 64), np.float32)
    with pytest.raises(errors.OutOfResources) as info:
        relayout_of(x, Layout.WGMMA, STRIDED).module()
    text = str(info.value)
    assert "Layout.WGMMA" in text and "STRIDED" in text
    assert f"reduction_scratch_bytes={info.value.used_bytes}" in text
    relayout_of(x, Layout.WGMMA, STRIDED, info.value.used_bytes).module()


@everywhere.tests(emitted)
def test_a_deferred_array_is_made_in_the_layout(kb):
    iota = registers.iota(np.int32, (64, 64), 1)
    made = relayout.layout_cast(iota, Layout.WGMMA)
    assert made.layout == place(Layout.WGMMA, (64, 64))
