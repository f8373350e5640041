# SPDX-License-Identifier: Apache-2.0
"""Copies of the Mosaic level: slices, transforms, who issues them, what they count."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, nvvm

import pallas_gpu as plgpu
from pallas_gpu import mosaic as mgpu
from pallas_gpu.mosaic.transforms import Rounding
from tests.support.mosaic_kernels import check, kernel, run, smem, typed
from tests.support.refusal import refused

F16, F32, I8, I32 = np.float16, np.float32, np.int8, np.int32
I4 = ml_dtypes.int4
X, Y = gpu.Dimension.x, gpu.Dimension.y
Tile, Transpose = mgpu.TileTransform, mgpu.TransposeTransform


def sample(shape, dtype=F16, seed=0):
    x = np.random.default_rng(seed).normal(size=shape) * 8
    return (np.clip(x, -8, 7) if dtype is I4 else x).astype(dtype)


def index(value):
    return mgpu.c(value, ir.IndexType.get())


def at(block, size):
    """A slice of a dimension: that of this block."""
    return mgpu.ds(arith.muli(gpu.block_id(block), index(size)), size)


def tiled(x, *tile):
    """Tiles of the last dimensions, in NumPy."""
    lead = x.ndim - len(tile)
    split = [(n // t, t) for n, t in zip(x.shape[lead:], tile, strict=True)]
    flat = x.reshape(*x.shape[:lead], *(n for pair in split for n in pair))
    outer = range(lead, flat.ndim, 2)
    return flat.transpose(*range(lead), *outer, *(i + 1 for i in outer))


# name: (shape of the array, its dtype, the slice, transforms, the slice in NumPy)
FORMS = {
    "whole": ((64, 64), F16, lambda: (), (), lambda x: x),
    "rows": ((8, 64), F32, lambda: (slice(2, 6),), (), lambda x: x[2:6]),
    "one row": ((8, 64), F32, lambda: (3,), (), lambda x: x[3]),
    "last row": ((8, 64), F32, lambda: (-1,), (), lambda x: x[-1]),
    "index value": ((8, 64), F32, lambda: (index(5),), (), lambda x: x[5]),
    "ds": (
        (64, 96), F16, lambda: (mgpu.ds(index(8), 16), mgpu.ds(32, 64)), (),
        lambda x: x[8:24, 32:96],
    ),
    "a middle index": (
        (4, 6, 64), F32, lambda: (slice(1, 3), 2), (), lambda x: x[1:3, 2]
    ),
    "tiles": (
        (64, 192), F16, lambda: (slice(16, 48), mgpu.ds(index(64), 128)),
        (Tile((8, 64)),),
        lambda x: tiled(x[16:48, 64:192], 8, 64),
    ),
    "tiles behind an index": (
        (3, 64, 128), F16, lambda: (index(2),), (Tile((8, 64)),),
        lambda x: tiled(x[2], 8, 64),
    ),
    "tiles of one dimension": (
        (32, 128), F32, lambda: (), (Tile((32,)),),
        lambda x: tiled(x, 32),
    ),
    "tiles in another order": (
        (64, 128), F16, lambda: (), (Tile((8, 64)), Transpose((1, 0, 2, 3))),
        lambda x: tiled(x, 8, 64).transpose(1, 0, 2, 3),
    ),
    "transposed rows": (
        (4, 8, 64), F32, lambda: (), Transpose((1, 0, 2)),
        lambda x: x.transpose(1, 0, 2),
    ),
    "long": ((2, 1024), F16, lambda: (), (), lambda x: x),
    "bytes": ((64, 256), I8, lambda: (), (Tile((8, 128)),), lambda x: tiled(x, 8, 128)),
    "halves of bytes": (
        (64, 256), I4, lambda: (mgpu.ds(8, 32), mgpu.ds(128, 128)), (Tile((8, 64)),),
        lambda x: tiled(x[8:40, 128:], 8, 64),
    ),
    "rounded down": (
        (70, 128), F16, lambda: (), (Tile((16, 64), Rounding.DOWN),),
        lambda x: tiled(x[:64], 16, 64),
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_smem_has_the_slice_after_its_transforms(form):
    shape, dtype, gmem_slice, transforms, expected = FORMS[form]
    x = sample(shape, dtype)

    def body(ctx, x_ref, o_ref, scratch):
        tile, barrier = scratch
        ctx.async_copy(
            src_ref=x_ref, dst_ref=tile, gmem_slice=gmem_slice(),
            gmem_transform=transforms, barrier=barrier,
        )  # fmt: skip
        barrier.wait()
        ctx.async_copy(src_ref=tile, dst_ref=o_ref)
        ctx.await_async_copy(0)

    wanted = np.ascontiguousarray(expected(x))
    scratch = (smem(wanted.shape, dtype), mgpu.TMABarrier())
    check(body, [x], wanted, scratch=scratch)


# name: (tile, its size in bytes, dtype)
SWIZZLES = {
    "128": ((8, 64), 128, F16),
    "64": ((8, 16), 64, F32),
    "32": ((8, 32), 32, I8),
    "none": ((8, 64), None, F16),
}


@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_blocks_of_a_ragged_array_come_back(swizzle):
    tile, size, dtype = SWIZZLES[swizzle]
    x = sample((100, 320), dtype)
    rows, columns = 32, 128

    def body(ctx, x_ref, o_ref, scratch):
        smem_ref, barrier = scratch
        both = {
            "gmem_slice": (at(Y, rows), at(X, columns)),
            "gmem_transform": Tile(tile),
            "swizzle": size,
        }
        ctx.async_copy(src_ref=x_ref, dst_ref=smem_ref, barrier=barrier, **both)
        barrier.wait()
        ctx.async_copy(src_ref=smem_ref, dst_ref=o_ref, **both)
        ctx.await_async_copy(0)

    shape = Tile(tile).transform_shape((rows, columns))
    scratch = [smem(shape, dtype), mgpu.TMABarrier()]
    check(body, [x], x, scratch=scratch, grid=(3, 4, 1))


def copying(*, shape=(64, 64), dtype=F16, count=1, store=None, **load):
    """A body that loads an array by some arguments, and stores what SMEM has."""

    def body(ctx, x_ref, o_ref, scratch):
        tile, barrier = scratch
        made = {k: v() if callable(v) else v for k, v in load.items()}
        ctx.async_copy(src_ref=x_ref, dst_ref=tile, barrier=barrier, **made)
        barrier.wait()
        ctx.async_copy(src_ref=tile, dst_ref=o_ref, **(store or {}))
        ctx.await_async_copy(0)

    return body, (smem(shape, dtype), mgpu.Barrier(count))


@pytest.mark.parametrize("predicate", ["elected", "chosen", "caller"])
def test_one_thread_issues_a_copy(predicate):
    x = sample((64, 64))

    def body(ctx, x_ref, o_ref, scratch):
        tile, barrier = scratch
        i32 = ir.IntegerType.get_signless(32)
        both = {"src_ref": x_ref, "dst_ref": tile, "barrier": barrier}
        if predicate == "elected":
            ctx.async_copy(**both)
        elif predicate == "chosen":
            seventh = arith.CmpIPredicate.eq
            chosen = arith.cmpi(seventh, mgpu.thread_idx(), mgpu.c(7, i32))
            ctx.async_copy(**both, predicate=chosen)
        else:
            with mgpu.single_thread(mgpu.ThreadSubset.WARPGROUP):
                ctx.async_copy(**both, predicate=None)
        barrier.wait()
        first = arith.CmpIPredicate.ult
        with mgpu.when(arith.cmpi(first, mgpu.thread_idx(), mgpu.c(32, i32))):
            warp = mgpu.ThreadSubset.WARP
            issuer = mgpu.single_thread_predicate(warp)
            ctx.async_copy(src_ref=tile, dst_ref=o_ref, predicate=issuer)
            ctx.await_async_copy(0, scope=warp)

    scratch = (smem((64, 64), F16), mgpu.TMABarrier())
    check(body, [x], x, scratch=scratch)


def test_the_author_may_count_the_bytes():
    x = sample((2, 64, 64))

    def body(ctx, x_ref, o_ref, scratch):
        tile, barrier = scratch
        with mgpu.single_thread():
            barrier.arrive_expect_tx(2 * 64 * 64 * 2)
        for i in range(2):
            ctx.async_copy(
                src_ref=x_ref, dst_ref=mgpu.memref_slice(tile, i), gmem_slice=i,
                barrier=barrier, arrive=False,
            )  # fmt: skip
        barrier.wait()
        for i in range(2):
            ctx.async_copy(
                src_ref=mgpu.memref_slice(tile, i), dst_ref=o_ref, gmem_slice=i,
                arrive=i == 1,
            )  # fmt: skip
        ctx.await_async_copy(0)

    check(body, [x], x, scratch=(smem((2, 64, 64), F16), mgpu.Barrier(1)))


def test_a_ring_of_slices_of_smem_is_filled_in_a_loop():
    x = sample((6, 8, 64), F32)

    def body(ctx, x_ref, o_ref, scratch):
        tile, barriers = scratch

        @mgpu.fori(index(3), ())
        def _(i, _):
            for slot in range(2):
                step = arith.addi(arith.muli(i, index(2)), index(slot))
                part = mgpu.memref_slice(tile, arith.remui(step, index(2)))
                ctx.async_copy(
                    src_ref=x_ref, dst_ref=part, gmem_slice=step,
                    barrier=barriers[arith.remui(step, index(2))],
                )  # fmt: skip
                barriers[slot].wait()
                ctx.async_copy(src_ref=part, dst_ref=o_ref, gmem_slice=step)
                ctx.await_async_copy(0)
            return ()

    check(body, [x], x, scratch=[smem((2, 8, 64), F32), mgpu.Barrier(1, 2)])


REDUCED = {"add": F32, "min": F16, "umax": I32, "xor": I32}


@pytest.mark.parametrize("operation", REDUCED)
def test_stores_combine_with_what_is_there(operation):
    dtype = REDUCED[operation]
    x, y = sample((16, 64), dtype), sample((16, 64), dtype, 1)
    body, scratch = copying(
        shape=(16, 64), dtype=dtype, store={"reduction_op": operation}
    )
    function = kernel(body, [x], [], scratch, inout_shape=typed(y))
    (found,) = function(x, y)
    unsigned = [z.view(np.uint32) for z in (x, y)] if dtype is I32 else (x, y)
    expected = {
        "add": lambda a, b: a + b, "min": np.minimum,
        "umax": np.maximum, "xor": np.bitwise_xor,
    }[operation](*unsigned)  # fmt: skip
    np.testing.assert_array_equal(np.asarray(found), expected.view(dtype))


def test_out_of_bounds_may_be_nan():
    x = sample((20, 64), F32)
    body, scratch = copying(
        shape=(32, 64), dtype=F32, gmem_slice=lambda: (mgpu.ds(0, 32),),
        oob_mode=mgpu.OOBFillMode.NAN,
    )  # fmt: skip
    (found,) = run(body, [x], [smem((32, 64), F32)], scratch)
    np.testing.assert_array_equal(found[:20], x)
    assert np.isnan(found[20:]).all()


@pytest.mark.parametrize("tile", [None, (8, 64)])
@pytest.mark.parametrize("with_barrier", [False, True])
def test_threads_copy_by_cp_async(tile, with_barrier):
    x = sample((3, 64, 128))
    transform = () if tile is None else Tile(tile)
    swizzle = None if tile is None else 128
    how = mgpu.AsyncCopyImplementation.CP_ASYNC

    def body(ctx, x_ref, o_ref, scratch):
        smem_ref, barrier = scratch
        ctx.async_copy(
            src_ref=x_ref, dst_ref=smem_ref, gmem_slice=index(1),
            gmem_transform=transform, swizzle=swizzle, implementation=how,
            barrier=barrier if with_barrier else None,
        )  # fmt: skip
        if with_barrier:
            barrier.wait()
            mgpu.commit_shared()
        else:
            ctx.await_cp_async_copy(0)
        ctx.async_copy(
            src_ref=smem_ref, dst_ref=o_ref, gmem_transform=transform, swizzle=swizzle
        )
        ctx.await_async_copy(0)

    shape = (64, 128) if tile is None else Tile(tile).transform_shape((64, 128))
    check(body, [x], x[1], scratch=(smem(shape, F16), mgpu.Barrier(1)))


@pytest.mark.parametrize("dims", [X, (X,), (X, Y)])
def test_blocks_of_a_cluster_share_a_load(dims):
    x = sample((4, 64, 64))

    def body(ctx, x_ref, o_ref, scratch):
        tile, barrier = scratch
        whole = dims == (X, Y)
        row = index(0) if whole else gpu.cluster_block_id(Y)
        ctx.async_copy(
            src_ref=x_ref, dst_ref=tile, gmem_slice=row, gmem_transform=Tile((8, 64)),
            swizzle=128, barrier=barrier, collective=dims,
        )  # fmt: skip
        barrier.wait()
        number = ctx.cluster_idx()
        ctx.async_copy(
            src_ref=tile, dst_ref=o_ref, gmem_slice=number,
            gmem_transform=Tile((8, 64)), swizzle=128,
        )  # fmt: skip
        ctx.await_async_copy(0)

    rows = [0, 0, 0, 0] if dims == (X, Y) else [0, 0, 1, 1]
    scratch = (smem((8, 1, 8, 64), F16), mgpu.TMABarrier())
    shape = (2, 2, 1)
    check(body, [x], x[rows], scratch=scratch, grid=shape, cluster=shape)


PAIRS = {
    "replicated": (mgpu.CopyPartition.REPLICATED, lambda x: np.stack([x, x])),
    "rows": (
        mgpu.CopyPartition.PARTITIONED(0), lambda x: np.stack([x[:32], x[32:]])
    ),
    "columns": (
        mgpu.CopyPartition.PARTITIONED(1),
        lambda x: np.stack([x[:, :64], x[:, 64:]]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS)
def test_the_first_block_of_a_pair_counts_for_both(pair):
    how, expected = PAIRS[pair]
    x = sample((64, 128))
    wanted = expected(x)

    def body(ctx, x_ref, o_ref, scratch):
        tile, barrier, _ = scratch
        ctx.async_copy(
            src_ref=x_ref, dst_ref=tile, gmem_transform=Tile((8, 64)), swizzle=128,
            barrier=barrier, collective=X, leader_tracked=how,
        )  # fmt: skip
        is_first = arith.cmpi(arith.CmpIPredicate.eq, ctx.cluster_idx(X), index(0))
        with mgpu.when(is_first):
            barrier.wait()
        # The other block has no barrier that says so.
        nvvm.cluster_arrive(aligned=True)
        nvvm.cluster_wait(aligned=True)
        ctx.async_copy(
            src_ref=tile, dst_ref=o_ref, gmem_slice=ctx.cluster_idx(X),
            gmem_transform=Tile((8, 64)), swizzle=128,
        )  # fmt: skip
        ctx.await_async_copy(0)

    # Blocks have pairs since sm_100a, as tensor memory.
    shape = Tile((8, 64)).transform_shape(wanted.shape[1:])
    tmem = mgpu.TMEM((128, 32), F32, collective=True)
    scratch = (smem(shape, F16), mgpu.Barrier(1), tmem)
    check(body, [x], wanted, scratch=scratch, grid=(2, 1, 1), cluster=(2, 1, 1))


@pytest.mark.parametrize("rows", ["gather", "scatter"])
def test_row_numbers_choose_rows(rows):
    x = sample((64, 128), F32)
    numbers = np.random.default_rng(1).permutation(64).astype(I32)

    def body(ctx, x_ref, n_ref, o_ref, scratch):
        tile, barrier = scratch
        chosen = mgpu.FragmentedArray.load_strided(n_ref, is_signed=False)
        by_rows = {"gmem_slice": (chosen, mgpu.ds(0, 128))}
        load, store = (by_rows, {}) if rows == "gather" else ({}, by_rows)
        ctx.async_copy(src_ref=x_ref, dst_ref=tile, barrier=barrier, **load)
        barrier.wait()
        ctx.async_copy(src_ref=tile, dst_ref=o_ref, **store)
        ctx.await_async_copy(0)

    numbers = np.concatenate([numbers, numbers])
    x, tile = np.concatenate([x, x]), (128, 128)
    expected = x[numbers]
    if rows == "scatter":
        numbers = np.argsort(np.random.default_rng(1).normal(size=128)).astype(I32)
        expected = np.empty_like(x)
        expected[numbers] = x
    scratch = (smem(tile, F32), mgpu.Barrier(1))
    check(body, [x, numbers], expected, scratch=scratch)


@pytest.mark.offline
def test_what_is_known_of_a_start_saves_instructions():
    x = sample((2048, 64), F16)

    def body(ctx, x_ref, o_ref, scratch):
        tile, barrier = scratch
        for size in (512, 100):
            start = arith.muli(gpu.block_id(X), index(size))
            ctx.async_copy(
                src_ref=x_ref, dst_ref=tile, gmem_slice=mgpu.ds(start, 512),
                barrier=barrier,
            )  # fmt: skip

    function = kernel(body, [x], [x], (smem((512, 64), F16), mgpu.Barrier(1)))
    (report,) = plgpu.offline.compile(function, x, target="sm_90a")
    # A box has 256 rows; of the other start no more is known than that it is even.
    assert report.ptx.count("cp.async.bulk.tensor") == 3


@pytest.mark.offline
def test_slices_are_fetched_to_l2():
    x = sample((128, 128))

    def body(ctx, x_ref, o_ref, scratch):
        del o_ref
        ctx.async_prefetch(
            gmem_ref=x_ref, gmem_slice=(mgpu.ds(0, 64),),
            gmem_transform=Tile((8, 64)), swizzle=128,
        )  # fmt: skip

    (report,) = plgpu.offline.compile(kernel(body, [x], [x]), x, target="sm_90a")
    assert "cp.async.bulk.prefetch.tensor" in report.ptx


# --- what is refused ------------------------------------------------------------------


def refused_copy(shape=(64, 64), dtype=F16, scratch=((64, 64), F16), **load):
    """Emits a load whose arguments are refused."""
    x = np.zeros(shape, dtype)

    def body(ctx, x_ref, o_ref, held):
        tile, barrier = held
        del o_ref
        made = {k: v() if callable(v) else v for k, v in load.items()}
        made.setdefault("barrier", barrier)
        made.setdefault("src_ref", x_ref)
        made.setdefault("dst_ref", tile)
        ctx.async_copy(**made)  # HERE

    run(body, [x], [x], (smem(*scratch), mgpu.Barrier(1)))


REFUSED = {
    "another shape": {"gmem_slice": (slice(0, 32),)},
    "another element type": {"scratch": ((64, 64), F32)},
    "a slice that cuts tiles": {
        "gmem_slice": (slice(0, 12),), "gmem_transform": Tile((8, 64))
    },
    "a tile that is not the swizzle": {
        "gmem_transform": Tile((8, 32)), "swizzle": 128, "scratch": ((8, 2, 8, 32), F16)
    },
    "a load without a barrier": {"barrier": None},
    "a load with a reduction": {"reduction_op": "add"},
    "another device": {"gmem_peer_id": 1},
    "a pair without a cluster": {"leader_tracked": mgpu.CopyPartition.REPLICATED},
    "a row that TMA cannot address": {"shape": (64, 60), "scratch": ((64, 60), F16),
                                          "gmem_transform": Transpose((1, 0))},
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
@refused
def test_what_cannot_be_copied(case):
    refused_copy(**REFUSED[case])
