# SPDX-License-Identifier: Apache-2.0
"""Barriers, semaphores and threads at the Mosaic level, in lockstep."""

from __future__ import annotations

import numpy as np
import pytest
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, memref, scf, vector

from pallas_gpu import mosaic as mgpu
from pallas_gpu.emitters import module
from tests.support import mosaic_bodies as bodies
from tests.support.refusal import refused_by

I32 = np.int32
x, y = gpu.Dimension.x, gpu.Dimension.y


def i32(n):
    return mgpu.c(n, ir.IntegerType.get_signless(32))


def index(value):
    return arith.index_cast(ir.IndexType.get(), value)


def equal(a, b):
    return arith.cmpi(arith.CmpIPredicate.eq, a, b)


def rows(out):
    """The row of `out` that the block has."""
    return mgpu.memref_slice(out, index(module.current().threads.block_id[0]))


# name: (arrivals of a phase, how they arrive)
ARRIVALS = {
    "every thread": (256, lambda b: b.arrive()),
    "one thread of each warpgroup": (
        2,
        lambda b: b.arrive(
            predicate=mgpu.single_thread_predicate(mgpu.ThreadSubset.WARPGROUP)
        ),
    ),
    "one thread for all": (
        256,
        lambda b: b.arrive(256, predicate=mgpu.single_thread_predicate()),
    ),
}


@pytest.mark.parametrize("name", ARRIVALS)
def test_each_wait_is_for_the_next_phase(name):
    count, arrive = ARRIVALS[name]

    def body(out):
        barriers = mgpu.BarrierRef.initialize(bodies.smem(0, (3,), np.int64), count)
        module.current().sync_after_init()
        held = bodies.smem(64, (1,), I32)
        for phase, chosen in enumerate([barriers[1], [*barriers][1]]):
            with mgpu.single_thread():
                memref.store(i32(phase + 5), held, [index(i32(0))])
            # The thread that has stored arrives for the others as well.
            mgpu.warpgroup_barrier()
            arrive(chosen)
            chosen.wait_parity(mgpu.c(phase % 2, ir.IntegerType.get_signless(1)))
            mgpu.warpgroup_barrier()
            value = memref.load(held, [index(i32(0))])
            gpu.barrier()
        memref.store(value, out, [index(mgpu.thread_idx())])

    bodies.check(body, [], np.full(256, 6, I32), smem_bytes=128, threads=256)


def test_phases_of_barriers_are_kept_in_loops_and_branches():
    def body(out):
        barriers = mgpu.BarrierRef.initialize(bodies.smem(0, (4,), np.int64), 1)
        module.current().sync_after_init()
        chosen = mgpu.single_thread_predicate()

        @mgpu.fori(i32(8), i32(0))
        def loop(i, total):
            barrier = barriers[arith.remui(i, i32(4))]
            barrier.arrive(predicate=chosen)
            barrier.wait()
            return arith.addi(total, i)

        late = barriers[2]
        done = late.test()
        late.arrive(predicate=chosen)
        late.wait()
        memref.store(
            arith.addi(loop.result, arith.extui(i32(0).type, done)),
            out,
            [index(mgpu.thread_idx())],
        )

    bodies.check(body, [], np.full(128, 28, I32), smem_bytes=64)


@pytest.mark.parametrize("leader", [False, True])
def test_blocks_of_a_cluster_arrive_at_each_other(leader):
    def body(out):
        barrier = mgpu.CollectiveBarrierRef.initialize(
            bodies.smem(0, (1,), np.int64), 1, [x], (2, 2, 1), leader_tracked=leader
        )[0]
        kernel = module.current()
        kernel.sync_after_init()
        mine = bodies.smem(64, (1,), I32)
        cluster_x = arith.remui(
            arith.index_cast(i32(0).type, gpu.cluster_block_id(x)), i32(2)
        )
        there = mgpu.get_cluster_ref(mine, x, index(arith.subi(i32(1), cluster_x)))
        with mgpu.single_thread():
            memref.store(arith.addi(cluster_x, i32(3)), there, [index(i32(0))])
        mgpu.warpgroup_barrier()
        barrier.arrive()
        waits = equal(cluster_x, i32(0)) if leader else None
        value = i32(0)
        if leader:
            with mgpu.when(waits):
                barrier.wait()
            kernel.sync_cluster()
        else:
            barrier.wait()
        value = memref.load(mine, [index(i32(0))])
        number = arith.addi(
            arith.muli(kernel.threads.block_id[1], i32(2)), kernel.threads.block_id[0]
        )
        row = mgpu.memref_slice(out, index(number))
        memref.store(value, row, [index(mgpu.thread_idx())])
        kernel.sync_before_exit()

    expected = np.repeat(np.array([4, 3, 4, 3], I32)[:, None], 128, 1)
    bodies.check(body, [], expected, smem_bytes=128, grid=(2, 2, 1), cluster=(2, 2, 1))


def test_a_barrier_of_another_block_gets_arrivals():
    def body(out):
        barrier = mgpu.BarrierRef.initialize(bodies.smem(0, (1,), np.int64), 1)
        kernel = module.current()
        kernel.sync_after_init()
        me = kernel.threads.block_id[0]
        other = barrier.remap_to_cluster(x, index(arith.subi(i32(1), me)))
        other.arrive(predicate=mgpu.single_thread_predicate())
        barrier.wait()
        memref.store(me, rows(out), [index(mgpu.thread_idx())])
        kernel.sync_before_exit()

    expected = np.repeat(np.arange(2, dtype=I32)[:, None], 128, 1)
    bodies.check(body, [], expected, smem_bytes=64, grid=(2, 1, 1), cluster=(2, 1, 1))


@pytest.mark.parametrize("decrement", [False, True])
def test_a_semaphore_orders_what_blocks_do(decrement):
    def body(counter, out, left):
        semaphore = mgpu.SemaphoreRef(mgpu.memref_ptr(counter))
        kernel, thread = module.current(), index(mgpu.thread_idx())
        me = kernel.threads.block_id[0]
        with mgpu.when(equal(me, i32(0))), mgpu.single_thread():
            memref.store(i32(0), counter, [index(i32(0))])
        kernel.sync_cluster()
        with mgpu.when(equal(me, i32(0))):
            memref.store(i32(7), out, [thread])
            mgpu.warpgroup_barrier()
            semaphore.signal(2, memory_scope="gpu")
        with mgpu.when(equal(me, i32(1))):
            semaphore.wait(2, decrement=decrement, memory_scope="gpu")
            held = memref.load(out, [thread])
            memref.store(arith.addi(held, i32(1)), out, [thread])
            memref.store(memref.load(counter, [index(i32(0))]), left, [thread])

    rest = 0 if decrement else 2
    expected = [np.full(1, rest, I32), np.full(128, 8, I32), np.full(128, rest, I32)]
    bodies.check(body, [], *expected, grid=(2, 1, 1), cluster=(2, 1, 1))


# name: (in which threads a value is stored, of 256 threads)
THREADS = {
    "block": (lambda: mgpu.single_thread(), [0]),
    "warpgroup": (
        lambda: mgpu.single_thread(mgpu.ThreadSubset.WARPGROUP), [0, 128]
    ),
    "warp": (
        lambda: mgpu.single_thread(mgpu.ThreadSubset.WARP), range(0, 256, 32)
    ),
    "a warp": (
        lambda: mgpu.when(equal(mgpu.warp_idx(), i32(5))), range(160, 192)
    ),
    "a warpgroup": (
        lambda: mgpu.when(equal(mgpu.warpgroup_idx(), i32(1))), range(128, 256)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", THREADS)
def test_code_of_some_threads(name):
    context, chosen = THREADS[name]

    def body(out):
        thread = index(mgpu.thread_idx())
        memref.store(i32(0), out, [thread])
        with (
            context(),
            mgpu.single_thread(mgpu.ThreadSubset.WARP)
            if (name == "block")
            else context(),
        ):
            memref.store(i32(1), out, [thread])

    expected = np.isin(np.arange(256), chosen).astype(I32)
    bodies.check(body, [], expected, threads=256)


def test_partitions_divide_what_they_should():
    def body(out):
        grid = mgpu.Partition(
            (64, 128), partition=(1, None), num_chunks=(2, 4), base_offset=(
                index(i32(1)), index(i32(2)),
            ),
        )  # fmt: skip
        assert grid.target_block_shape == (16, 128)
        half = mgpu.Partition1D(64, chunk_size=32)
        quarter = half.refine(chunk=index(i32(1)), num_chunks=2)
        assert (half.num_chunks, quarter.num_chunks) == (2, 2)
        found = [*grid.get_base(0, index(i32(3))), quarter.get_base(index(i32(1)))]
        for i, value in enumerate(found):
            memref.store(arith.index_cast(i32(0).type, value), out, [index(i32(i))])

    bodies.check(body, [], np.array([49, 2, 48], I32))


def test_what_is_divisible_is_known():
    def body():
        thread = mgpu.thread_idx()
        tile = arith.addi(arith.muli(index(thread), index(i32(64))), index(i32(16)))
        assert mgpu.is_known_divisible(tile, 16)
        assert not mgpu.is_known_divisible(tile, 32)

    bodies.run(body, [], [])


@pytest.mark.parametrize(
    ("shape", "tiling", "expected"),
    [((64, 128), (8, 64), (8, 2, 8, 64)), ((3, 16), (4,), (3, 4, 4)), ((5,), (), (5,))],
)
def test_tiled_shapes(shape, tiling, expected):
    assert mgpu.tile_shape(shape, tiling) == expected


def test_a_line_is_printed_by_the_threads_that_should(capfd):
    def body(a):
        thread = mgpu.thread_idx()
        pair = vector.from_elements(
            ir.VectorType.get([2], i32(0).type), [thread, i32(7)]
        )
        mgpu.debug_print("one {} {}", i32(3), mgpu.c(0.5, ir.F16Type.get()))
        with mgpu.when(equal(thread, i32(9))):
            mgpu.debug_print("each {}", pair, uniform=False)
            mgpu.nanosleep(i32(20))
        array = mgpu.FragmentedArray.load_untiled(
            a, layout=mgpu.TMA_INDICES_4_LAYOUT, is_signed=True, optimized=False
        )
        with mgpu.single_thread():
            array.debug_print("at {}")

    bodies.run(body, [np.arange(5, 9, dtype=I32)], [])
    # A run starts again where warps part, so lines may be there twice.
    assert set(capfd.readouterr().out.splitlines()) == {
        *(f"at [{i}]: {5 + i}" for i in range(4)), "each [9,7]", "one 3 0.500000",
    }  # fmt: skip


@pytest.mark.parametrize("grid", [(4, 1, 1), (2, 2, 2)])
def test_the_work_of_clusters_that_have_not_started_is_taken(grid):
    def body(out):
        kernel = module.current()
        barrier = mgpu.BarrierRef.initialize(bodies.smem(0, (1,), np.int64))
        answer = bodies.smem(16, (4,), I32)
        kernel.sync_after_init()
        one = mgpu.c(1, ir.IntegerType.get_signless(1))
        loop = scf.WhileOp([x.type for x in (one, *[i32(0)] * 3)],
                           [one, *kernel.threads.block_id])  # fmt: skip
        before = loop.before.blocks.append(*[x.type for x in loop.operands])
        with ir.InsertionPoint(before):
            scf.condition(before.arguments[0], list(before.arguments))
        after = loop.after.blocks.append(*[x.type for x in loop.operands])
        with ir.InsertionPoint(after):
            _, *place = after.arguments
            number = i32(0)
            for size, at in reversed(list(zip(grid, place, strict=True))):
                number = arith.addi(arith.muli(number, i32(size)), at)
            row = mgpu.memref_slice(out, index(number))
            memref.store(i32(1), row, [index(mgpu.thread_idx())])
            mgpu.warpgroup_barrier()
            with mgpu.single_thread():
                barrier.arrive_expect_tx(16)
                mgpu.try_cluster_cancel(
                    answer, barrier, mgpu.c(1, ir.IntegerType.get_signless(1))
                )
            barrier.wait()
            *place, more = mgpu.query_cluster_cancel(answer)
            mgpu.warpgroup_barrier()
            scf.yield_([more, *place])

    blocks = int(np.prod(grid))
    bodies.check(body, [], np.ones((blocks, 128), I32), grid=grid, smem_bytes=64,
                 arch=(10, 0))  # fmt: skip


# name: what is refused
REFUSED = {
    "several barriers": lambda b: b.wait(),
    "too many": lambda b: mgpu.BarrierRef.at(b.base_address, 33, 1),
    "index": lambda b: b[2],
    "scope": lambda b: b[0].test(scope=mgpu.ThreadSubset.BLOCK),
    "constant": lambda b: mgpu.c(1.5, i32(0).type),
    "loop": lambda b: mgpu.fori(i32(3), [i32(0)])(lambda i, carry: [*carry, i]),
    "print": lambda b: mgpu.debug_print(
        "", uniform=False, scope=mgpu.ThreadSubset.WARP
    ),
    "tiles": lambda b: mgpu.tile_shape((64,), (7,)),
    "partition": lambda b: mgpu.Partition1D(64, chunk_size=7),
    "width": lambda b: mgpu.bytewidth(ir.IntegerType.get_signless(4)),
    "type": lambda b: mgpu.bitwidth(ir.IndexType.get()),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
@refused_by(lambda body: bodies.run(body, [], [], smem_bytes=64))
def test_a_mistake_is_refused(*, what):
    barriers = mgpu.BarrierRef.initialize(bodies.smem(0, (2,), np.int64), 1)
    REFUSED[what](barriers)
