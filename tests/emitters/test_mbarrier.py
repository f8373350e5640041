# SPDX-License-Identifier: Apache-2.0
"""mbarriers count warpgroups; named barriers leave number 0 to the block."""

from __future__ import annotations

import contextlib

import pytest

from pallas_gpu.emitters import mbarrier
from tests.support.finished import emitted
from tests.support.refusal import refused_by


def test_each_warpgroup_meets_at_a_barrier_of_its_own(build):
    one = str(build(lambda kb: mbarrier.warpgroup_barrier()))
    assert "nvvm.barrier id = %c1_i32 number_of_threads = %c128_i32" in one
    two = str(build(lambda kb: mbarrier.warpgroup_barrier(), threads=256))
    assert "number_of_threads = %c128_i32" in two
    assert "id = %c1_i32" not in two


@pytest.mark.parametrize("in_warp", [False, True])
def test_an_arrival_is_one_thread_after_a_barrier(build, in_warp):
    def body(kb):
        with kb.in_warp() if in_warp else contextlib.nullcontext():
            mbarrier.arrive(kb.smem_base)
        assert kb.elected is kb.threads.elected

    text = str(build(body, smem_bytes=8))
    assert ("nvvm.barrier" in text) is not in_warp
    barrier = text.index("nvvm.bar.warp.sync" if in_warp else "nvvm.barrier")
    assert barrier < text.index("scf.if") < text.index("mbarrier.arrive.release.cta")


@refused_by(emitted)
def test_a_warp_by_itself_never_waits_for_its_warpgroup(kb):
    with kb.in_warp():
        mbarrier.warpgroup_barrier()


def test_init_counts_arrivals_not_threads(build):
    text = str(build(lambda kb: mbarrier.init(kb.smem_base, 3), smem_bytes=8))
    assert "%c3_i32, predicate" in text


@pytest.mark.offline
def test_waiting_is_a_loop_of_try_wait(compile_kernel):
    def body(kb):
        mbarrier.init(kb.smem_base, 1)
        kb.sync_after_init()
        mbarrier.arrive_expect_tx(kb.smem_base, 0)
        mbarrier.wait(kb.smem_base, kb.i32(0))

    ptx = compile_kernel(body, smem_bytes=8).ptx
    assert "mbarrier.init.shared.b64" in ptx
    assert "fence.mbarrier_init.release.cluster" in ptx
    assert "mbarrier.try_wait.parity.shared.b64" in ptx
