# SPDX-License-Identifier: Apache-2.0
"""The shell of a kernel: launch, ids, what is emitted once."""

from __future__ import annotations

import numpy as np
import pytest
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu

from pallas_gpu import errors
from pallas_gpu.emitters import gmem, mbarrier, module, registers
from pallas_gpu.emitters.module import KernelBuilder, LaunchSpec
from pallas_gpu.layouts.registers.placement import place
from tests.support import everywhere
from tests.support.finished import emitted, typed
from tests.support.refusal import refused


def test_the_host_function_launches_the_grid(build):
    text = str(build(lambda kb: None, grid=(4, 2, 1), threads=256, smem_bytes=512))
    assert "func.func @kernel_mosaic_gpu(%arg0: !llvm.ptr, %arg1: !llvm.ptr)" in text
    assert "llvm.emit_c_interface" in text
    assert "mosaic_gpu.arch_major = 9 : i32" in text
    assert "dynamic_shared_memory_size %c512_i32" in text
    assert "gpu.launch async" in text


def test_a_cluster_adds_its_extents(build):
    text = str(
        build(lambda kb: kb.sync_after_init(), grid=(4, 1, 1), cluster=(2, 1, 1))
    )
    assert "clusters(" in text
    assert "nvvm.cluster.arrive" in text
    assert "nvvm.barrier" not in text


@pytest.mark.parametrize(
    ("end", "meetings"),
    [
        (lambda kb: None, 1),
        (lambda kb: kb.sync_cluster(), 1),
        # Others may still arrive on this block's barriers, or see no access of it.
        (lambda kb: (kb.sync_cluster(), mbarrier.warpgroup_barrier()), 2),
        (lambda kb: kb.sync_cluster(is_relaxed=True), 2),
    ],
    ids=["no meeting", "a meeting", "and more", "relaxed"],
)
def test_a_cluster_meets_once_at_its_end(build, end, meetings):
    def body(kb):
        end(kb)
        kb.sync_before_exit()

    text = str(build(body, grid=(4, 1, 1), cluster=(2, 1, 1)))
    assert text.count("nvvm.cluster.wait") == meetings


def test_without_a_cluster_the_block_meets_after_init(build):
    text = str(build(lambda kb: kb.sync_after_init()))
    assert "nvvm.fence.mbarrier.init" in text
    assert "nvvm.barrier" in text


@everywhere.tests(emitted, [typed((1,), np.int32)])
def test_constants_are_emitted_once(kb, out):
    value = kb.i32(7)
    assert kb.i32(7) is value
    gmem.store_scalar(out.slice((0,), (None,)), arith.addi(value, kb.i32(7)))


@everywhere.tests(emitted, [typed((1,), np.int32)])
def test_hoisted_values_dominate_the_whole_body(kb, out):
    with gmem.predicated(kb.threads.elected):
        kb.hoisted("late", lambda: arith.addi(kb.threads.lane, kb.i32(41)))
    late = kb.hoisted("late", lambda: pytest.fail("emitted twice"))
    gmem.store_scalar(out.slice((0,), (None,)), late)


@everywhere.tests(emitted, grid=(8, 1, 1))
def test_grid_axes_of_one_block_need_no_id(kb):
    _, y, z = kb.threads.block_id
    assert y == z


@refused
def test_threads_come_in_whole_warpgroups():
    LaunchSpec("kernel", threads=96)


@refused
def test_the_sizes_of_a_block_multiply_to_its_threads():
    LaunchSpec("kernel", threads=128, block=(32, 2, 1))


@refused
def test_the_grid_consists_of_whole_clusters():
    LaunchSpec("kernel", grid=(2, 3, 1), cluster=(1, 2, 1))


@refused
def test_emitters_need_an_open_builder():
    module.current()


def test_a_failing_body_closes_the_builder():
    kernel = KernelBuilder(LaunchSpec("kernel"))
    with pytest.raises(ZeroDivisionError), kernel:
        _ = 1 / 0
    with pytest.raises(errors.InternalError, match="inside the kernel's"):
        kernel.finish()
    with pytest.raises(errors.InternalError):
        module.current()


def test_invalid_operations_become_compilation_errors():
    kernel = KernelBuilder(LaunchSpec("kernel"))
    with kernel:
        i32 = ir.IntegerType.get_signless(32)
        wrong = [kernel.i32(1), kernel.threads.elected]
        ir.Operation.create("arith.addi", results=[i32], operands=wrong)
    with pytest.raises(errors.CompilationError, match="rejects the module"):
        kernel.finish()


def test_threads_know_who_they_are(run_kernel):
    def body(kb, warps, groups, lanes):
        layout = place(registers.WGStridedLayout((128,), 1), (128,))
        ids = kb.threads
        pairs = ((warps, ids.warp), (groups, ids.warpgroup), (lanes, ids.lane))
        for out, value in pairs:
            part = out.slice((ids.warpgroup, 0), (None, 128))
            array = registers.splat(value, np.int32, (128,)).materialize(layout)
            gmem.store(part, array)

    result = typed((3, 128), np.int32)
    warps, groups, lanes = run_kernel(body, [], [result] * 3, threads=384)
    thread = np.arange(128)
    assert (warps == thread // 32).all()
    assert (lanes == thread % 32).all()
    assert (groups == np.arange(3)[:, None]).all()


def test_mlir_has_the_same_ids_of_blocks_and_threads_along_three_axes(run_kernel):
    names = ("grid_dim", "block_id", "cluster_block_id", "cluster_dim_blocks")

    def body(kb, threads, blocks):
        one = arith.constant(ir.IndexType.get(), 1)
        i32, ids = ir.IntegerType.get_signless(32), kb.threads
        layout = place(registers.WGStridedLayout((128,), 1), (128,))

        def write(out, value, *at):
            value = arith.index_cast(i32, arith.muli(value, one))
            array = registers.splat(value, np.int32, (128,)).materialize(layout)
            sizes = (*(None,) * len(at), 128)
            gmem.store(out.slice((*at, 0), sizes), array)

        places = (*ids.block_id, ids.warpgroup)
        first = [arith.cmpi(arith.CmpIPredicate.eq, p, kb.i32(0)) for p in places]
        with gmem.predicated(arith.andi(first[0], arith.andi(first[1], first[2]))):
            for axis, dim in enumerate(gpu.Dimension):
                write(threads, gpu.thread_id(dim), axis, ids.warpgroup)
        with gmem.predicated(first[3]):
            for i, name in enumerate(names):
                for axis, dim in enumerate(gpu.Dimension):
                    write(blocks, getattr(gpu, name)(dim), *ids.block_id, i, axis)

    results = [typed((3, 2, 128), np.int32), typed((4, 2, 6, 4, 3, 128), np.int32)]
    spec = {"grid": (4, 2, 6), "cluster": (2, 1, 3), "block": (8, 4, 8)}
    threads, blocks = run_kernel(body, [], results, threads=256, **spec)
    for axis, place_ in enumerate(np.unravel_index(np.arange(256), (8, 4, 8))[::-1]):
        np.testing.assert_array_equal(threads[axis].ravel(), place_)
    for at in np.ndindex(4, 2, 6):
        found = blocks[at][..., 0].tolist()
        rank = [at[0] % 2, 0, at[2] % 3]
        assert found == [[4, 2, 6], list(at), rank, [2, 1, 3]]


def test_one_thread_of_each_warpgroup_is_elected(run_kernel):
    def body(kb, out):
        i32 = ir.IntegerType.get_signless(32)
        layout = place(registers.WGStridedLayout((128,), 1), (128,))
        for i, flag in enumerate((kb.threads.elected, mbarrier.block_leader())):
            value = arith.extui(i32, flag)
            part = out.slice((i, kb.threads.warpgroup, 0), (None, None, 128))
            array = registers.splat(value, np.int32, (128,)).materialize(layout)
            gmem.store(part, array)

    (out,) = run_kernel(body, [], [typed((2, 2, 128), np.int32)], threads=256)
    assert out[0].sum(1).tolist() == [1, 1]
    assert out[1].sum(1).tolist() == [1, 0]
