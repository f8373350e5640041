# SPDX-License-Identifier: Apache-2.0
"""Accesses under a predicate: what is transferred, and that there are no branches."""

from __future__ import annotations

import re

import numpy as np
import pytest
from jaxlib.mlir.dialects import arith

from pallas_gpu.emitters import addressing, gmem, mbarrier, registers, smem
from pallas_gpu.emitters.elements import dtypes, predication
from pallas_gpu.layouts import WGStridedLayout
from pallas_gpu.layouts.registers.placement import default_placement
from pallas_gpu.runtime import ptx_stats
from tests.support import everywhere
from tests.support.finished import emitted, smem_view, typed

# Registers of 1, 2, 4, 8 and 16 bytes.
VECTORS = [
    ("int8", 1), ("int8", 2), ("int8", 16), ("bfloat16", 1), ("bfloat16", 4),
    ("float16", 8), ("float32", 1), ("float32", 2), ("int32", 4), ("int64", 1),
    ("float64", 2),
]  # fmt: skip


def by_predicate(length, memory):
    """Threads whose index is odd load, and store in even places of the result."""

    def body(kb, source, instead, out):
        layout = WGStridedLayout(source.shape, length).linear()
        odd, low = addressing.thread_bit(0), addressing.thread_bits_clear((1,))
        base, target = gmem.slice_pointer(source), gmem.slice_pointer(out)
        if memory == "smem":
            held = smem_view(kb, 0, source.shape, source.dtype)
            smem.store(held, gmem.load(source, layout), optimized=False)
            mbarrier.warpgroup_barrier()
            base = target = smem.slice_pointer(held)
        size = length * source.dtype.itemsize
        step = addressing.thread_sum([size << b for b in range(7)])
        (rest,) = gmem.load(instead, layout).values
        pointer = addressing.offset_pointer(base, step)
        loaded = predication.load(rest.type, pointer, odd, rest)
        gmem.store(out, registers.RegisterArray((rest,), layout, source.dtype))
        if memory == "smem":
            mbarrier.warpgroup_barrier()
        predication.store(loaded, addressing.offset_pointer(target, step), low)
        if memory == "smem":
            mbarrier.warpgroup_barrier()
            gmem.store(out, smem.load(held, layout, optimized=False))

    return body


@pytest.mark.parametrize(("dtype", "length"), VECTORS)
@pytest.mark.parametrize("memory", ["gmem", "smem"])
def test_registers_go_through_memory_where_the_predicate_holds(
    memory, dtype, length, run_kernel, sample
):
    shape = (128 * length,)
    x, rest = sample(shape, np.dtype(dtype)), sample(shape, np.dtype(dtype))
    (out,) = run_kernel(
        by_predicate(length, memory),
        [x, rest],
        [typed(shape, x.dtype)],
        smem_bytes=x.nbytes,
    )
    thread = np.arange(shape[0]) // length
    bits = f"u{x.dtype.itemsize}"
    x, rest, out = (a.view(bits) for a in (x, rest, out))
    loaded = np.where(thread % 2 == 1, x, rest)
    before = x if memory == "smem" else rest
    np.testing.assert_array_equal(out, np.where(thread & 2, before, loaded))


@pytest.mark.offline
@pytest.mark.parametrize(("dtype", "length"), VECTORS)
@pytest.mark.parametrize("memory", ["gmem", "smem"])
def test_an_access_is_one_predicated_instruction(memory, dtype, length, compile_kernel):
    array = typed((128 * length,), np.dtype(dtype))
    size = length * np.dtype(dtype).itemsize
    body = by_predicate(length, memory)
    ptx = compile_kernel(body, [array] * 2, [array], smem_bytes=128 * size).ptx
    space = "global" if memory == "gmem" else r"shared::cta"
    word = max(8 * np.dtype(dtype).itemsize, min(8 * size, 32))
    parts = "" if word == 8 * size else rf"\.v{8 * size // word}"
    for name in ("ld", "st"):
        found = re.findall(rf"@%p\d+ {name}\.{space}{parts}\.b{word} ", ptx)
        assert len(found) == 1, ptx
    assert ptx_stats.count(ptx, "bra") == 0


@everywhere.tests(emitted, [typed((4,), np.int32)])
def test_conditions_of_equal_lanes_are_one_value(kb, source):
    """A mask that is broadcast along a vector, compared for all of it at once."""
    layout = WGStridedLayout((512,), 4).linear()
    thread = dtypes.splat(addressing.thread_sum([1] * 7), 4)
    bound = dtypes.constant(64, dtypes.I32, thread)
    lanes = dtypes.pack([kb.i32(i) for i in range(4)])
    for other, count in ((thread, 1), (arith.addi(thread, lanes), 4)):
        below = arith.cmpi(arith.CmpIPredicate.slt, other, bound)
        mask = registers.RegisterArray((below,), layout, dtypes.BOOL)
        slots = [(0, lane) for lane in range(4)]
        assert len(set(gmem.masking.conditions(layout, slots, mask))) == count


@pytest.mark.offline
@pytest.mark.parametrize("shape", [(1001,), (50, 12), (64, 32)])
def test_masked_arrays_need_no_branch(shape, compile_kernel):
    def body(kb, source, chosen, out):
        layout = default_placement(shape, 32)
        mask = gmem.load(chosen, layout)
        gmem.store(out, gmem.load(source, layout, mask=mask), mask=mask)

    array = typed(shape, np.float32)
    ptx = compile_kernel(body, [array, typed(shape, np.bool_)], [array]).ptx
    assert ptx_stats.count(ptx, "bra") == 0
    layout = default_placement(shape, 32)
    each = layout.num_registers * layout.vector_length
    assert len(re.findall(r"@%p\d+ ld\.global\.b32 ", ptx)) == each
    assert len(re.findall(r"@%p\d+ st\.global\.b32 ", ptx)) == each
