# SPDX-License-Identifier: Apache-2.0
"""mbarriers count warpgroups; named barriers leave number 0 to the block."""

from __future__ import annotations

import numpy as np
import pytest
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from pallas_gpu import errors
from pallas_gpu.layouts import SmemLayout
from pallas_gpu.mosaic import elementwise, gmem, mbarrier, registers, smem


def test_one_warpgroup_meets_at_barrier_one(build):
    text = str(build(lambda kb: mbarrier.warpgroup_barrier()))
    assert "nvvm.barrier id = %c1_i32 number_of_threads = %c128_i32" in text


def test_several_warpgroups_meet_at_their_own(build):
    text = str(build(lambda kb: mbarrier.warpgroup_barrier(), threads=256))
    assert "number_of_threads = %c128_i32" in text
    assert "id = %c1_i32" not in text


def test_an_arrival_is_one_thread_after_a_barrier(build):
    text = str(build(lambda kb: mbarrier.arrive(kb.smem_pointer(8)), smem_bytes=16))
    barrier, arrive = (
        text.index("nvvm.barrier"),
        text.index("mbarrier.arrive.release.cta"),
    )
    assert barrier < text.index("scf.if") < arrive


def test_a_warp_by_itself_meets_its_lanes_and_elects_one(build):
    def body(kb):
        with kb.in_warp():
            mbarrier.arrive(kb.smem_base)
        assert kb.elected is kb.threads.elected

    text = str(build(body, smem_bytes=8))
    assert "nvvm.barrier" not in text
    barrier, arrive = (
        text.index("nvvm.bar.warp.sync"),
        text.index("mbarrier.arrive.release.cta"),
    )
    assert barrier < text.index("scf.if") < arrive


def test_a_warp_by_itself_never_waits_for_its_warpgroup(build):
    def body(kb):
        with kb.in_warp():
            mbarrier.warpgroup_barrier()

    with pytest.raises(errors.InternalError, match="in code of a single warp"):
        build(body)


def test_init_counts_arrivals_not_threads(build):
    text = str(build(lambda kb: mbarrier.init(kb.smem_base, 3), smem_bytes=8))
    assert "%c3_i32, predicate" in text


@pytest.mark.offline
def test_waiting_is_a_loop_of_try_wait(compile_kernel, typed):
    x = typed((8,), np.float32)

    def body(kb, *unused):
        mbarrier.init(kb.smem_base, 1)
        kb.sync_after_init()
        mbarrier.arrive_expect_tx(kb.smem_base, 0)
        mbarrier.wait(kb.smem_base, kb.i32(0))

    ptx = compile_kernel(body, [x], [x], smem_bytes=8).ptx
    assert "mbarrier.init.shared.b64" in ptx
    assert "fence.mbarrier_init.release.cluster" in ptx
    assert "mbarrier.try_wait.parity.shared.b64" in ptx


def test_a_producer_hands_values_to_a_consumer(run_kernel, typed):
    steps = 4

    def body(kb, out):
        full, empty = kb.smem_pointer(0), kb.smem_pointer(8)
        cell = smem.SmemView.whole(
            kb.smem_pointer(1024), SmemLayout((128,), 32), np.dtype(np.int32)
        )
        for pointer in (full, empty):
            mbarrier.init(pointer, 1)
        kb.sync_after_init()
        first = arith.cmpi(arith.CmpIPredicate.eq, kb.threads.warpgroup, kb.i32(0))
        branch = scf.IfOp(first, has_else=True)
        with ir.InsertionPoint(branch.then_block):
            for step in range(steps):
                if step:
                    mbarrier.wait(empty, kb.i32((step - 1) % 2))
                iota = registers.iota(np.int32, (128,), 0)
                value = registers.splat(kb.i32(step * 1000), np.int32, (128,))
                smem.store(cell, elementwise.apply("add", iota, value))
                mbarrier.arrive(full)
            scf.yield_([])
        with ir.InsertionPoint(branch.else_block):
            for step in range(steps):
                mbarrier.wait(full, kb.i32(step % 2))
                part = out.slice((step, 0), (None, 128))
                gmem.store(part, smem.load(cell))
                mbarrier.arrive(empty)
            scf.yield_([])

    result = typed((steps, 128), np.int32)
    (out,) = run_kernel(body, [], [result], threads=256, smem_bytes=2048)
    wanted = np.arange(steps)[:, None] * 1000 + np.arange(128)
    np.testing.assert_array_equal(out, wanted)
