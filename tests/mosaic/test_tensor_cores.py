# SPDX-License-Identifier: Apache-2.0
"""Products at the Mosaic level, in lockstep, against NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm

from pallas_gpu import mosaic as mgpu
from pallas_gpu.emitters import module
from pallas_gpu.mosaic import elements, tcgen05
from tests.support import mosaic_bodies as bodies
from tests.support import mosaic_kernels as kernels
from tests.support import scaled_products, sparse_products
from tests.support.refusal import refused_by

F16, BF16, F32, I8 = np.float16, ml_dtypes.bfloat16, np.float32, np.int8
F8 = ml_dtypes.float8_e4m3fn
RNG = np.random.default_rng(0)


def matrix(shape, dtype):
    if np.dtype(dtype).kind in "iu":
        return RNG.integers(-8, 8, shape).astype(dtype)
    return RNG.normal(size=shape).astype(dtype)


def tiles(offset, x, ref, swizzle, transposed=False, rows=8):
    """An array in SMEM, tiled, as the reference to its tiles; stored from GMEM."""
    shape = x.shape[::-1] if transposed else x.shape
    tile = (rows, swizzle // x.dtype.itemsize)
    held = bodies.smem(offset, shape, x.dtype, tile, swizzle)
    if transposed:
        held = mgpu.memref_transpose(held, (1, 0, 3, 2))
    signed = elements.signedness(x.dtype)
    layout = mgpu.WGMMA_LAYOUT_8BIT if x.dtype.itemsize == 1 else mgpu.WGMMA_LAYOUT
    array = mgpu.FragmentedArray.load_untiled(
        ref, layout=layout, is_signed=signed, optimized=False
    )
    array.store_tiled(held, swizzle, optimized=False)
    return held


# name: (operands, accumulator, swizzle, a transposed, b transposed, a in registers)
PRODUCTS = {
    "f16": (F16, F32, 128, False, False, False),
    "f16 into f16": (F16, F16, 64, False, True, False),
    "bf16, both transposed": (BF16, F32, 128, True, True, False),
    "bf16 in registers": (BF16, F32, 64, False, False, True),
    "i8": (I8, np.int32, 128, False, True, False),
    "f8": (F8, F32, 64, False, True, False),
}


@pytest.mark.parametrize("rows", [8, 64])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_of_a_warpgroup_is_numpys(name, rows):
    dtype, total, swizzle, left, right, in_registers = PRODUCTS[name]
    a, b = matrix((128, 128), dtype), matrix((128, 128), dtype)
    signed = True if total is np.int32 else None

    def body(x, y, out):
        held = tiles(0, a, x, swizzle, left, rows)
        if in_registers:
            held = mgpu.FragmentedArray.load_tiled(held, swizzle)
        b_held = tiles(1 << 15, b, y, swizzle, right, rows)
        mgpu.commit_shared()
        acc = mgpu.WGMMAAccumulator.zero(
            128, 128, elements.type_of(total), is_signed=signed
        )

        @mgpu.fori(mgpu.c(2, ir.IndexType.get()), acc)
        def loop(i, acc):
            acc = mgpu.wgmma(acc, held, b_held, swizzle=swizzle)
            nvvm.wgmma_commit_group_sync_aligned()
            nvvm.wgmma_wait_group_sync_aligned(0)
            return acc

        loop.result.value.store_untiled(out, optimized=False)

    expected = 2 * (a.astype(F32) @ b.astype(F32))
    tolerance = 2e-2 if total is F16 or dtype is F8 else 1e-3
    bodies.check(body, [a, b], expected.astype(total), rtol=tolerance,
                 smem_bytes=1 << 16)  # fmt: skip


@pytest.mark.parametrize("transposed", [False, True])
def test_tiles_of_64_rows_come_by_tma(transposed):
    # Small integers: a card and lockstep add them to equal sums.
    a, b = (matrix((128, 128), I8).astype(F16) for _ in range(2))

    def body(ctx, x, y, out, scratch):
        left, right, barriers = scratch
        tile = (mgpu.TileTransform((64, 64)),)
        turn = (mgpu.TransposeTransform((1, 0, 2, 3)),) * transposed
        acc = mgpu.WGMMAAccumulator.zero(128, 128)
        for step in range(2):
            barrier = barriers[step]
            barrier.arrive_expect_tx(
                2 * 128 * 64 * 2,
                predicate=mgpu.single_thread_predicate(),
            )
            k = mgpu.ds(64 * step, 64)
            ctx.async_copy(
                src_ref=x, dst_ref=mgpu.memref_slice(left, step), swizzle=128,
                gmem_slice=(slice(0, 128), k), gmem_transform=tile, barrier=barrier,
                arrive=False,
            )  # fmt: skip
            part = (slice(0, 128), k) if transposed else (k, slice(0, 128))
            ctx.async_copy(
                src_ref=y, dst_ref=mgpu.memref_slice(right, step), swizzle=128,
                gmem_slice=part, gmem_transform=(*tile, *turn), barrier=barrier,
                arrive=False,
            )  # fmt: skip
        for step in range(2):
            barriers[step].wait()
            held = mgpu.memref_slice(right, step)
            if transposed:
                held = mgpu.memref_transpose(held, (0, 1, 3, 2))
            acc = mgpu.wgmma(acc, mgpu.memref_slice(left, step), held)
            nvvm.wgmma_commit_group_sync_aligned()
        nvvm.wgmma_wait_group_sync_aligned(0)
        acc.value.store_untiled(out, optimized=False)

    scratch = [
        kernels.smem((2, 2, 1, 64, 64), F16),
        kernels.smem((2, 1, 2, 64, 64), F16),
        mgpu.TMABarrier(2),
    ]
    stored = np.ascontiguousarray(b.T) if transposed else b
    expected = a.astype(F32) @ b.astype(F32)
    kernels.check(body, [a, stored], expected, scratch=scratch)


@pytest.mark.parametrize("dtype", [F16, I8])
@pytest.mark.parametrize("m_warps", [4, 2, 1])
def test_a_product_of_warps_is_numpys(m_warps, dtype):
    a, b = matrix((64, 64), dtype), matrix((64, 32), dtype)
    total = np.int32 if dtype is I8 else F32

    def body(x, y, out):
        found = mgpu.MMALayouts(dtype, m_warps=m_warps)
        signed = elements.signedness(np.dtype(dtype))
        left, right = (
            mgpu.FragmentedArray.load_untiled(
                ref, layout=layout, is_signed=signed, optimized=False
            )
            for ref, layout in ((x, found.lhs), (y, found.rhs))
        )
        zero = mgpu.c(0, elements.type_of(total))
        acc = mgpu.FragmentedArray.splat(zero, (64, 32), found.acc, is_signed=signed)
        mgpu.mma(acc, left, right).store_untiled(out, optimized=False)

    expected = a.astype(total) @ b.astype(total)
    bodies.check(body, [a, b], expected, rtol=1e-3)


@pytest.mark.parametrize(
    ("m", "n", "warps"), [(128, 8, 4), (64, 8, 4), (32, 16, 2), (16, 32, 1)]
)
def test_layouts_have_as_many_warps_along_rows_as_the_shape_allows(m, n, warps):
    chosen = mgpu.MMALayouts.for_shape(F16, m, n)
    assert chosen.acc == mgpu.MMALayouts(F16, m_warps=warps).acc


# --- tensor memory --------------------------------------------------------------------

BLACKWELL = {"arch": (10, 0)}


def allocated(columns, barriers=1):
    """The word with the address of TMEM, and barriers; all threads meet."""
    word = bodies.smem(0, (1,), np.int32)
    found = mgpu.BarrierRef.initialize(bodies.smem(64, (barriers,), np.int64))
    zero = mgpu.c(0, ir.IntegerType.get_signless(32))
    with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, mgpu.warp_idx(), zero)):
        assert tcgen05.tmem_alloc(word, columns, exact=False) >= columns
        tcgen05.tmem_relinquish_alloc_permit(False)
    module.current().sync_after_init()
    return word, found


def freed(ref, columns):
    tcgen05.wait_load_tmem()
    zero = mgpu.c(0, ir.IntegerType.get_signless(32))
    with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, mgpu.warp_idx(), zero)):
        tcgen05.tmem_dealloc(ref.address, columns, exact=False)


@pytest.mark.parametrize("rows", [128, 64])
@pytest.mark.parametrize("issuer", ["block", "a warp"])
def test_a_product_in_tensor_memory_is_numpys(rows, issuer):
    a, b = matrix((rows, 128), F16), matrix((128, 128), F16)

    def body(x, y, out):
        word, barriers = allocated(128)
        left, right = tiles(1024, a, x, 128), tiles(1 << 16, b, y, 64, True)
        mgpu.commit_shared()
        acc = tcgen05.TMEMRef.from_alloc(word, (rows, 128), ir.F32Type.get(), False)
        chosen = mgpu.single_thread()
        if issuer == "a warp":
            three = mgpu.c(3, ir.IntegerType.get_signless(32))
            is_warp = arith.cmpi(arith.CmpIPredicate.eq, mgpu.warp_idx(), three)
            leads = mgpu.single_thread_predicate(mgpu.ThreadSubset.WARP)
            chosen = mgpu.when(arith.andi(is_warp, leads))
        with chosen:
            swizzles = {"a_swizzle": 128, "b_swizzle": 64}
            tcgen05.mma(acc, left, right, **swizzles, accumulate=False)
            one = mgpu.c(1, ir.IntegerType.get_signless(1))
            tcgen05.mma(acc, left, right, **swizzles, accumulate=one)
            tcgen05.commit_arrive(barriers)
        barriers.wait(orders_tensor_core=True)
        acc.load().store_untiled(out, optimized=False)
        freed(acc, 128)

    expected = 2 * (a.astype(F32) @ b.astype(F32))
    bodies.check(body, [a, b], expected, rtol=1e-3, smem_bytes=1 << 17, **BLACKWELL)


def test_what_is_stored_in_tensor_memory_is_loaded():
    a = matrix((128, 64), F32)

    def body(x, out, part, extrema):
        word, _ = allocated(64)
        ref = tcgen05.TMEMRef.from_alloc(
            word, (128, 64), ir.F32Type.get(), layout=tcgen05.tmem_default_layout()
        )
        layout = mgpu.TMEM_NATIVE_LAYOUT
        ref.store(mgpu.FragmentedArray.load_untiled(x, layout=layout, optimized=False))
        tcgen05.commit_tmem()
        array, largest = ref.load(layout, reduce="absmax")
        array.store_untiled(out, optimized=False)
        largest.store_untiled(extrema, optimized=False)
        middle = mgpu.ds(mgpu.c(16, ir.IndexType.get()), 32)
        ref.slice(slice(None), middle).load().store_untiled(part, optimized=False)
        freed(ref, 64)

    expected = [a, a[:, 16:48], np.abs(a).max(1)]
    bodies.check(body, [a], *expected, smem_bytes=128, **BLACKWELL)


def test_a_left_operand_is_copied_to_tensor_memory():
    a, b = matrix((128, 64), F16), matrix((64, 64), F16)

    def body(x, y, out):
        word, barriers = allocated(128)
        left, right = tiles(1024, a, x, 128), tiles(1 << 16, b, y, 128)
        mgpu.commit_shared()
        acc = tcgen05.TMEMRef.from_alloc(word, (128, 64), ir.F32Type.get(), False)
        moved = arith.addi(acc.address, mgpu.c(64, ir.IntegerType.get_signless(32)))
        packed = tcgen05.tmem_default_layout(packing=2)
        copy = tcgen05.TMEMRef(moved, (128, 64), ir.F16Type.get(), packed)
        with mgpu.single_thread():
            tcgen05.async_copy_smem_to_tmem(left, copy, 128)
            tcgen05.mma(acc, copy, right, accumulate=False)
            tcgen05.commit_arrive(barriers)
        barriers.wait(orders_tensor_core=True)
        acc.load().store_untiled(out, optimized=False)
        freed(acc, 128)

    expected = a.astype(F32) @ b.astype(F32)
    bodies.check(body, [a, b], expected, rtol=1e-3, smem_bytes=1 << 17, **BLACKWELL)


def copied(offset, x, ref):
    """An array in SMEM that is not tiled, with what GMEM has."""
    held = bodies.smem(offset, x.shape, x.dtype)
    signed = elements.signedness(x.dtype)
    mgpu.FragmentedArray.load_strided(ref, is_signed=signed).store_untiled(held)
    return held


def transposed(ref):
    return mgpu.memref_transpose(ref, (1, 0, 3, 2))


@pytest.mark.parametrize("kind", ["scaled", "sparse"])
def test_products_take_scales_and_metadata(kind):
    if kind == "scaled":
        case = scaled_products.ScaledProduct()
        a, b, *more = case.operands()
        expected = case.expected(a, b, *more)
    else:
        case = sparse_products.SparseProduct(n=64)
        a, b, *more = case.operands()
        expected = case.expected(a, b, *more)

    def body(x, y, *refs):
        *others, out = refs
        word, barriers = allocated(128)
        left, right = tiles(1024, a, x, 128), tiles(1 << 16, b, y, 128)
        held = [
            copied((3 << 15) + 4096 * i, *pair)
            for i, pair in enumerate(zip(more, others, strict=True))
        ]
        mgpu.commit_shared()
        n = expected.shape[1]
        acc = tcgen05.TMEMRef.from_alloc(word, (128, n), ir.F32Type.get(), False)

        def beside(column, shape, x, layout):
            at = mgpu.c(column, ir.IntegerType.get_signless(32))
            address = arith.addi(acc.address, at)
            return tcgen05.TMEMRef(address, shape, elements.type_of(x.dtype), layout)

        with mgpu.single_thread():
            if kind == "scaled":
                scales = tcgen05.scales_layout()
                chosen = [
                    beside(64 + 8 * i, (128, case.k // 32), x, scales)
                    for i, x in enumerate(more)
                ]
                for source, target in zip(held, chosen, strict=True):
                    tcgen05.async_copy_scales_smem_to_tmem(source, target)
                extra = dict(zip(("a_scale", "b_scale"), chosen, strict=True))
            else:
                count = sparse_products.indices(case.k, case.a)
                layout = tcgen05.sparse_meta_layout()
                meta = beside(64, (128, count), more[0], layout)
                tcgen05.async_copy_sparse_metadata_smem_to_tmem(held[0], meta)
                extra = {"a_sparse_metadata": meta}
            tcgen05.mma(acc, left, transposed(right), accumulate=False, **extra)
            tcgen05.commit_arrive(barriers)
        barriers.wait(orders_tensor_core=True)
        acc.load().store_untiled(out, optimized=False)
        freed(acc, 128)

    bodies.check(
        body, [a, b, *more], expected, rtol=1e-3, smem_bytes=1 << 17, **BLACKWELL
    )


# name: what is refused
REFUSED = {
    "tiles": lambda x: mgpu.wgmma(
        mgpu.WGMMAAccumulator.zero(64, 64), x, x, swizzle=64
    ),
    "tiles of 32 rows": lambda x: mgpu.wgmma(
        mgpu.WGMMAAccumulator.zero(64, 64),
        bodies.smem(0, (2, 2, 32, 64), F16),
        bodies.smem(0, (2, 1, 64, 64), F16),
    ),
    "a splat": lambda x: mgpu.WGMMAAccumulator.from_registers(
        mgpu.FragmentedArray.splat(mgpu.c(0.0, ir.F32Type.get()), (64, 64))
    ),
    "shape": lambda x: mgpu.WGMMAAccumulator.zero(60, 64),
    "warps": lambda x: mgpu.MMALayouts.for_shape(F16, 8, 8),
    "columns": lambda x: tcgen05.tmem_alloc(x, 65),
    "address": lambda x: tcgen05.tmem_dealloc(x, 64),
    "no layout": lambda x: tcgen05.TMEMRef.from_alloc(
        x, (128, 64), ir.F32Type.get()
    ),
    "rows": lambda x: tcgen05.TMEMRef(
        mgpu.thread_idx(), (128, 64), ir.F32Type.get(), tcgen05.TMEMLayout.default()
    ).slice(slice(0, 64)),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
@refused_by(lambda body: bodies.run(body, [], [], smem_bytes=1 << 15, **BLACKWELL))
def test_a_mistake_is_refused(*, what):
    REFUSED[what](bodies.smem(0, (8, 1, 8, 64), F16))
