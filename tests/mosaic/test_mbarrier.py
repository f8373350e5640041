# SPDX-License-Identifier: Apache-2.0
"""mbarriers count warpgroups; named barriers leave number 0 to the block."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_gpu import errors
from pallas_gpu.mosaic import mbarrier


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
