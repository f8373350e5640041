# SPDX-License-Identifier: Apache-2.0
"""wgmma: what it multiplies, how ptxas takes it, what it refuses."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from pallas_gpu.emitters import (
    control,
    elementwise,
    gmem,
    mbarrier,
    registers,
    smem,
    tma,
)
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.smem import SmemView
from pallas_gpu.emitters.tensor_cores import wgmma
from pallas_gpu.layouts import Layout
from tests.support.finished import smem_view

SMEM = 200 * 1024
# What ptxas says when it waits for an instruction that the kernel does not wait for.
LATENCY = re.compile(r"serialized|warpgroup\.\w+ is injected")


@dataclasses.dataclass(frozen=True)
class Case:
    """One product: operands lie as (M, K) and (K, N), or transposed in memory."""

    a: str
    b: str
    acc: str
    m: int = 64
    n: int = 128
    k: int = 128
    a_transposed: bool = False
    b_transposed: bool = False
    a_swizzle: int = 128
    b_swizzle: int = 128
    in_registers: bool = False

    def __str__(self) -> str:
        sizes = f"{self.a}x{self.b}-{self.acc} {self.m}x{self.n}x{self.k}"
        flips = (
            "".join(" a.T" * self.a_transposed + " b.T" * self.b_transposed)
            + " regs" * self.in_registers
        )
        return f"{sizes}{flips} {self.a_swizzle},{self.b_swizzle}"


SIZES = [
    *(
        Case("float16", "float16", "float32", n=n, b_transposed=True)
        for n in (8, 24, 96, 200, 256)
    ),
    Case("float16", "float16", "float16", n=512),
    Case("float16", "float16", "float16", n=320, b_transposed=True),
    Case("int8", "int8", "int32", n=24, b_transposed=True),
    Case("int8", "int8", "int32", n=40, b_transposed=True),
    Case("int8", "int8", "int32", n=272, b_transposed=True),
    Case("bfloat16", "bfloat16", "float32", k=512, a_swizzle=64),
    Case("float16", "float16", "float32", m=64, n=256, k=64, a_swizzle=32),
]
# Other forms of operands are those of tests/lowering/families/test_wgmma.py.
FORMS = [
    *(
        Case(a, a, acc, a_transposed=at, b_transposed=bt, a_swizzle=16, b_swizzle=16)
        for a, acc in (
            ("float16", "float32"),
            ("float32", "float32"),
            ("int8", "int32"),
        )
        for at, bt in ((0, 1), (0, 0), (1, 0), (1, 1))
        if a == "float16" or (at, bt) == (0, 1)
    ),
    *(
        Case("uint8", "int8", "int32", m=128, b_transposed=True, in_registers=regs)
        for regs in (False, True)
    ),
]


def fetch(kb, pairs) -> None:
    """Copies operands into SMEM and waits for them."""
    barrier = kb.smem_pointer(0)
    mbarrier.init(barrier, len(pairs))
    kb.sync_after_init()
    first = arith.cmpi(arith.CmpIPredicate.eq, kb.threads.warpgroup, kb.i32(0))
    with control.predicated(first):
        for source, view in pairs:
            tma.copy_gmem_to_smem(kb, source, view, barrier, sync=False)
    mbarrier.wait(barrier, kb.i32(0))


def views(kb, case, x, y) -> tuple[SmemView, SmemView]:
    size = -(-int(np.prod(x.shape)) * x.dtype.itemsize // 1024) * 1024
    a, b = (
        smem_view(kb, at, of.shape, of.dtype, (8, s // of.dtype.itemsize), s)
        for at, of, s in ((1024, x, case.a_swizzle), (1024 + size, y, case.b_swizzle))
    )
    return a, b


def oriented(case, a: SmemView, b: SmemView) -> tuple[SmemView, SmemView]:
    return (
        a.transpose((1, 0)) if case.a_transposed else a,
        b.transpose((1, 0)) if case.b_transposed else b,
    )


def product(case):
    def body(kb, x, y, out):
        stored = views(kb, case, x, y)
        fetch(kb, list(zip((x, y), stored, strict=True)))
        a, b = oriented(case, *stored)
        if case.in_registers:
            narrow = a.dtype.itemsize == 1
            a = smem.load(
                a, Layout.WGMMA_8BIT if narrow else Layout.WGMMA, optimized=False
            )
        acc = wgmma.zeros((case.m, case.n), np.dtype(case.acc))
        acc = wgmma.mma(acc, a, b)
        wgmma.wait(0)
        gmem.store(out, wgmma.fence_accumulator(acc))

    return body


def numbers(rng, shape, dtype) -> np.ndarray:
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    return rng.normal(size=shape).astype(dtype)


def tf32(x: np.ndarray) -> np.ndarray:
    """What the tensor core reads of a float32: its upper 19 bits."""
    return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def exact(x: np.ndarray) -> np.ndarray:
    wide = tf32(x) if x.dtype == np.float32 else x
    return wide.astype(np.int64 if x.dtype.kind in "iu" else np.float64)


def check(out, a, b, acc) -> None:
    """Compares with exact arithmetic; errors count relative to the sum of sizes.

    float32: products are exact, sums of 128 terms lose a few of the 24 bits. float8:
    the sums inside one instruction keep about 14 bits. float16: 11 bits, rounded after
    each of the instructions.
    """
    narrow = a.dtype.itemsize == 1
    a, b = exact(a), exact(b)
    if np.dtype(acc) == np.int32:
        np.testing.assert_array_equal(out, (a @ b).astype(np.int32))
        return
    bits = 11 if narrow else 18
    bits = 8 if np.dtype(acc) == np.float16 else bits
    error = np.abs(out.astype(np.float64) - a @ b)
    assert (error <= 2.0**-bits * (np.abs(a) @ np.abs(b))).all()


def inputs(case, rng):
    a = numbers(rng, (case.m, case.k), case.a)
    b = numbers(rng, (case.k, case.n), case.b)
    x = np.ascontiguousarray(a.T) if case.a_transposed else a
    y = np.ascontiguousarray(b.T) if case.b_transposed else b
    return a, b, x, y


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*FORMS, *SIZES], ids=str)
def test_products_are_right(case, run_kernel, typed, rng):
    a, b, x, y = inputs(case, rng)
    result = typed((case.m, case.n), case.acc)
    (out,) = run_kernel(product(case), [x, y], [result], smem_bytes=SMEM)
    check(out, a, b, case.acc)


def one_and_small_terms(case, terms, exponent):
    """Operands of 1 + terms * 2**-exponent, all within one instruction."""
    a = np.zeros((case.m, case.k))
    b = np.zeros((case.k, case.n))
    a[:, 0] = b[0] = 1
    half = exponent // 2
    a[:, 1 : 1 + terms] = 2.0**-half
    b[1 : 1 + terms] = 2.0 ** (half - exponent)
    x, y = a.astype(case.a), b.astype(case.b)
    return x, np.ascontiguousarray(y.T)


# (operands, accumulator, last bit that a term keeps beside a sum of 1)
KEPT_BITS = [
    ("float16", "float32", 25),
    ("bfloat16", "float32", 25),
    ("float32", "float32", 25),
    ("float8_e4m3fn", "float32", 13),
    ("float8_e5m2", "float32", 13),
    ("float8_e4m3fn", "float16", 13),
]


@pytest.mark.parametrize(("dtype", "acc", "bits"), KEPT_BITS)
def test_terms_are_cut_to_the_bits_of_the_largest(dtype, acc, bits, run_kernel, typed):
    # Equal terms of the last kept bit count; terms of half that are lost each, though
    # their sum would count. float16 is rounded in the end, so it takes more of them.
    terms = 15 if acc == "float16" else 4
    minor = 128 // np.dtype(dtype).itemsize
    case = Case(dtype, dtype, acc, k=minor, n=8, b_transposed=True)
    kept, lost = (
        run_kernel(
            product(case),
            one_and_small_terms(case, terms, exponent),
            [typed((64, 8), acc)],
            smem_bytes=SMEM,
        )[0].astype(np.float64)
        for exponent in (bits, bits + 1)
    )
    exact_sum = np.float64(1 + terms * 2.0**-bits)
    assert (kept == float(exact_sum.astype(acc))).all()
    assert (lost == 1).all()


# --- pipelines ------------------------------------------------------------------------

LOOP = Case("float16", "float16", "float32", m=128, n=128, k=256, b_transposed=True)


@pytest.mark.gpu
def test_accumulators_may_have_registers_of_one_element(run_kernel, typed, rng):
    case = Case("float16", "float16", "float32", m=64, n=64, k=64)
    a, b, x, y = inputs(case, rng)

    def body(kb, x, y, out):
        left, right = views(kb, case, x, y)
        fetch(kb, [(x, left), (y, right)])
        zero = registers.splat(dtypes.constant(0, dtypes.F32), dtypes.F32, (64, 64))
        acc = wgmma.mma(zero.materialize(Layout.WGMMA_ACC_32BIT), left, right)
        wgmma.wait(0)
        gmem.store(out, registers.regroup(wgmma.fence_accumulator(acc), Layout.WGMMA))

    (out,) = run_kernel(body, [x, y], [typed((64, 64), np.float32)], smem_bytes=SMEM)
    check(out, a, b, np.float32)


# --- what the compiler makes of it ----------------------------------------------------


def operand_types(case, typed):
    a = (case.k, case.m) if case.a_transposed else (case.m, case.k)
    b = (case.n, case.k) if case.b_transposed else (case.k, case.n)
    return [typed(a, case.a), typed(b, case.b)], [typed((case.m, case.n), case.acc)]


@pytest.mark.offline
def test_a_read_before_the_wait_shows_in_the_report(compile_kernel, typed):
    def body(kb, x, y, out):
        a, b = views(kb, LOOP, x, y)
        left = a.slice((0, 0), (64, 64))
        right = b.slice((0, 0), (128, 64)).transpose((1, 0))
        acc = wgmma.mma(wgmma.zeros((64, 128)), left, right)
        early = elementwise.apply("add", acc, acc)
        acc = wgmma.mma(early, left, right)
        wgmma.wait(0)
        gmem.store(out.slice((0, 0), (64, 128)), wgmma.fence_accumulator(acc))

    compiled = compile_kernel(body, *operand_types(LOOP, typed), smem_bytes=1 << 17)
    assert LATENCY.search(compiled.ptxas)


@pytest.mark.offline
def test_a_product_of_a_product_is_not_serialised(compile_kernel, typed):
    """As in attention: the product of an iteration is an operand in the next one."""
    case = Case("float16", "float16", "float32", k=128, b_transposed=True)

    def body(kb, x, y, out):
        a, b = views(kb, case, x, y)
        acc = wgmma.zeros((64, 128))
        left, right = a.slice((0, 0), (64, 64)), b.slice((0, 0), (128, 64))

        def scores():
            return wgmma.mma(wgmma.zeros((64, 128)), left, right.transpose((1, 0)))

        first = scores()
        wgmma.wait(0)
        first = elementwise.astype(wgmma.fence_accumulator(first), dtypes.F16)
        bounds = [arith.constant(ir.IndexType.get(), n) for n in (0, 8, 1)]
        count = len(acc.values)
        loop = scf.ForOp(*bounds, [*acc.values, *first.values])
        with ir.InsertionPoint(loop.body):
            values = list(loop.inner_iter_args)
            mine = acc.with_values(values[:count])
            weights = first.with_values(values[count:])
            ahead = scores()
            mine = wgmma.mma(mine, weights, b.slice((0, 0), (128, 128)))
            wgmma.wait(1)
            weights = elementwise.astype(wgmma.fence_accumulator(ahead), dtypes.F16)
            wgmma.wait(0)
            scf.yield_([*wgmma.fence_accumulator(mine).values, *weights.values])
        gmem.store(out, acc.with_values(list(loop.results)[:count]))

    types = operand_types(case, typed)
    compiled = compile_kernel(body, *types, smem_bytes=1 << 17)
    assert not LATENCY.search(compiled.ptxas)
    assert compiled.resources.spill_store_bytes == 0


@pytest.mark.offline
def test_register_limits_are_set(compile_kernel):
    def body(kb):
        wgmma.set_max_registers(40, "decrease")
        mbarrier.warpgroup_barrier()
        wgmma.set_max_registers(232, "increase")

    compiled = compile_kernel(body)
    assert re.search(r"setmaxnreg\.dec\.sync\.aligned\.u32\s+40;", compiled.ptx)
    assert re.search(r"setmaxnreg\.inc\.sync\.aligned\.u32\s+232;", compiled.ptx)
    assert "setmaxnreg ignored" not in compiled.ptxas


def test_one_call_is_one_group(build, typed):
    text = str(build(product(LOOP), *operand_types(LOOP, typed), smem_bytes=1 << 17))
    (assembly,) = re.findall(r"wgmma\.fence.*?commit_group", text)
    assert assembly.count("wgmma.mma_async") == 2 * LOOP.k // 16
