# SPDX-License-Identifier: Apache-2.0
"""Barriers that meet with nothing in between become one."""

import re

import numpy as np
import pytest
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from pallas_gpu.emitters import gmem, mbarrier, tma
from pallas_gpu.layouts import Layout


def count(module) -> int:
    return len(re.findall(r"nvvm\.barrier\b", str(module)))


@pytest.mark.parametrize(
    ("meetings", "left"),
    [
        ([mbarrier.warpgroup_barrier] * 3, 1),
        (
            [
                mbarrier.block_barrier,
                mbarrier.warpgroup_barrier,
                mbarrier.block_barrier,
            ],
            3,
        ),
    ],
    ids=["of a warpgroup", "of the block, too"],
)
def test_equal_barriers_in_a_row_become_one(build, meetings, left):
    assert count(build(lambda kb: [meet() for meet in meetings])) == left


def test_a_fence_needs_no_barrier_before_it(build):
    def body(kb):
        mbarrier.warpgroup_barrier()
        tma.fence_proxy_async()
        mbarrier.warpgroup_barrier()

    text = str(build(body, []))
    assert count(text) == 1
    assert text.index("fence.proxy") < text.index("nvvm.barrier")


def test_an_access_between_two_barriers_keeps_both(build, typed):
    def body(kb, x):
        mbarrier.warpgroup_barrier()
        gmem.store(x, gmem.load(x, Layout.WGMMA))
        mbarrier.warpgroup_barrier()

    assert count(build(body, [typed((64, 64), np.float32)])) == 2


def test_an_access_of_an_author_keeps_both(build):
    """Inline code accesses memory by operations that no emitter has."""

    def body(kb):
        i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
        cell = memref.alloca(ir.MemRefType.get((1,), i32), [], [])
        mbarrier.warpgroup_barrier()
        word = vector.load(
            ir.VectorType.get([1], i32), cell, [arith.constant(index, 0)]
        )
        mbarrier.warpgroup_barrier()
        memref.store(vector.extract(word, [], [0]), cell, [arith.constant(index, 0)])

    assert count(build(body, [])) == 2
