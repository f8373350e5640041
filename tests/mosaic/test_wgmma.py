# SPDX-License-Identifier: Apache-2.0
"""wgmma: what it multiplies, how ptxas takes it, what it refuses."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from pallas_gpu.layouts import Layout
from pallas_gpu.mosaic import elementwise, gmem, mbarrier, registers, smem, tma
from pallas_gpu.mosaic.elements import dtypes
from pallas_gpu.mosaic.smem import SmemView
from pallas_gpu.mosaic.tensor_cores import wgmma
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


HALF = [("float16", "float32"), ("bfloat16", "float32"), ("float16", "float16")]
# Types whose right operand must be K-major: it lies in memory as (N, K).
K_MAJOR = [
    ("float32", "float32", "float32"),
    ("float8_e4m3fn", "float8_e4m3fn", "float32"),
    ("float8_e4m3fn", "float8_e5m2", "float32"),
    ("float8_e5m2", "float8_e4m3fn", "float16"),
    ("int8", "int8", "int32"),
    ("uint8", "int8", "int32"),
]
MAJORS = [
    Case(t, t, acc, a_transposed=at, b_transposed=bt, a_swizzle=s, b_swizzle=s, m=128)
    for t, acc in HALF
    for at in (False, True)
    for bt in (False, True)
    for s in (128, 64, 32, 16)
    if (t == "float16" and acc == "float32") or s == 128
]
OTHERS = [
    Case(a, b, acc, b_transposed=True, a_swizzle=s, b_swizzle=s, m=128)
    for a, b, acc in K_MAJOR
    for s in (128, 64, 32, 16)
    if s == 128 or a in ("float32", "int8")
]
FROM_REGISTERS = [
    *(
        Case(t, t, acc, m=128, b_transposed=bt, in_registers=True)
        for t, acc in HALF
        for bt in (False, True)
    ),
    *(
        Case(a, b, acc, m=128, b_transposed=True, in_registers=True, b_swizzle=s)
        for a, b, acc in K_MAJOR[1:]
        for s in (128, 64, 32)
        if s == 128 or a in ("int8", "float8_e4m3fn")
    ),
]
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
ALL = [*MAJORS, *OTHERS, *FROM_REGISTERS, *SIZES]


def fetch(kb, pairs) -> None:
    """Copies operands into SMEM and waits for them."""
    barrier = kb.smem_pointer(0)
    mbarrier.init(barrier, len(pairs))
    kb.sync_after_init()
    for source, view in pairs:
        with smem.predicated(mbarrier.block_leader()):
            true = dtypes.constant(True, dtypes.BOOL)
            tma.copy_gmem_to_smem(kb, source, view, barrier, elected=true, sync=False)
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
@pytest.mark.parametrize("case", ALL, ids=str)
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


def loop_over_k(case, *, pending=1, groups=1):
    """Each warpgroup takes its share of M; K in blocks of 64, a group pending."""

    def body(kb, x, y, out):
        a, b = views(kb, case, x, y)
        fetch(kb, [(x, a), (y, b)])
        rows = case.m // groups
        start = arith.muli(kb.threads.warpgroup, kb.i32(rows))
        acc = wgmma.zeros((rows, case.n))
        index = ir.IndexType.get()
        bounds = [arith.constant(index, n) for n in (0, case.k // 64, 1)]
        loop = scf.ForOp(*bounds, list(acc.values))
        with ir.InsertionPoint(loop.body):
            step = arith.index_cast(
                ir.IntegerType.get_signless(32), loop.induction_variable
            )
            k = arith.muli(step, kb.i32(64))
            left = a.slice((start, k), (rows, 64))
            right = b.slice((0, k), (case.n, 64)).transpose((1, 0))
            carried = acc.with_values(loop.inner_iter_args)
            new = wgmma.mma(carried, left, right)
            wgmma.wait(pending)
            scf.yield_(list(new.values))
        wgmma.wait(0)
        done = wgmma.fence_accumulator(acc.with_values(loop.results))
        gmem.store(out.slice((start, 0), (rows, case.n)), done)

    return body


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [1, 2])
def test_accumulators_travel_through_a_loop(groups, run_kernel, typed, rng):
    a, b, x, y = inputs(LOOP, rng)
    result = typed((LOOP.m, LOOP.n), np.float32)
    body = loop_over_k(LOOP, groups=groups)
    spec = {"smem_bytes": SMEM, "threads": 128 * groups}
    (out,) = run_kernel(body, [x, y], [result], **spec)
    check(out, a, b, np.float32)


@pytest.fixture
def multiply(run_kernel, typed, rng):
    """Runs what a function emits of both operands in SMEM, of float16 and K = 64."""

    def run(emit, m, n):
        case = Case("float16", "float16", "float32", m=m, n=n, k=64)
        a, b, x, y = inputs(case, rng)

        def body(kb, x, y, out):
            left, right = views(kb, case, x, y)
            fetch(kb, [(x, left), (y, right)])
            gmem.store(out, emit(left, right))

        (out,) = run_kernel(body, [x, y], [typed((m, n), np.float32)], smem_bytes=SMEM)
        return a, b, out

    return run


@pytest.mark.gpu
def test_slices_of_an_accumulator_take_their_own_products(multiply):
    def emit(left, right):
        acc = wgmma.zeros((128, 128))
        # The second block of columns twice, the lower rows of the first one once.
        for (m, n), rows in (((0, 64), 128), ((0, 64), 128), ((64, 0), 64)):
            part = wgmma.accumulator_slice(acc, (m, n), (rows, 64))
            a, b = left.slice((m, 0), (rows, 64)), right.slice((0, n), (64, 64))
            acc = wgmma.accumulator_update(acc, (m, n), wgmma.mma(part, a, b))
        wgmma.wait(0)
        return wgmma.fence_accumulator(acc)

    a, b, out = multiply(emit, 128, 128)
    check(out[:, 64:], np.float16(2) * a, b[:, 64:], np.float32)
    check(out[64:, :64], a[64:], b[:, :64], np.float32)
    assert (out[:64, :64] == 0).all()


@pytest.mark.gpu
def test_an_operand_computed_in_registers_may_be_one(multiply):
    def emit(left, right):
        value = smem.load(left, Layout.WGMMA)
        value = elementwise.apply("add", value, value)
        acc = wgmma.mma(wgmma.zeros((64, 64)), value, right)
        wgmma.wait(0)
        # The first product becomes the left operand of the second: attention's way.
        first = elementwise.astype(wgmma.fence_accumulator(acc), dtypes.F16)
        again = wgmma.mma(wgmma.zeros((64, 64)), first, right)
        wgmma.wait(0)
        return wgmma.fence_accumulator(again)

    a, b, out = multiply(emit, 64, 64)
    a, b = exact(a), exact(b)
    bound = 2.0**-9 * (np.abs(2 * a @ b) @ np.abs(b))
    assert (np.abs(out - 2 * a @ b @ b) <= bound).all()


@pytest.mark.gpu
def test_accumulators_may_have_registers_of_one_element(multiply):
    def emit(left, right):
        zero = registers.splat(dtypes.constant(0, dtypes.F32), dtypes.F32, (64, 64))
        acc = wgmma.mma(zero.materialize(Layout.WGMMA_ACC_32BIT), left, right)
        wgmma.wait(0)
        return registers.regroup(wgmma.fence_accumulator(acc), Layout.WGMMA)

    a, b, out = multiply(emit, 64, 64)
    check(out, a, b, np.float32)


# --- what the compiler makes of it ----------------------------------------------------


def operand_types(case, typed):
    a = (case.k, case.m) if case.a_transposed else (case.m, case.k)
    b = (case.n, case.k) if case.b_transposed else (case.k, case.n)
    return [typed(a, case.a), typed(b, case.b)], [typed((case.m, case.n), case.acc)]


@pytest.fixture
def compiled(compile_kernel, typed):
    """Compiles a product of a case, whose operands are in flight until its waits."""

    def run(case, body):
        module = compile_kernel(body, *operand_types(case, typed), smem_bytes=1 << 17)
        assert not LATENCY.search(module.ptxas)
        assert module.resources.spill_store_bytes == 0
        return module

    return run


@pytest.mark.offline
@pytest.mark.parametrize(("m", "n"), [(64, 256), (128, 128)])
def test_a_pipelined_loop_is_not_serialised(m, n, compiled):
    case = dataclasses.replace(LOOP, m=m, n=n)
    ptx = compiled(case, loop_over_k(case)).ptx
    shape = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16"
    assert ptx.count(shape) == 4 * m // 64
    assert ptx.count("wgmma.commit_group") == 1


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
@pytest.mark.parametrize(
    "case",
    [
        Case("bfloat16", "bfloat16", "float32", a_transposed=True),
        Case("float16", "float16", "float16", in_registers=True),
        Case("float32", "float32", "float32", b_transposed=True),
        Case("float8_e4m3fn", "float8_e5m2", "float16", b_transposed=True),
        Case("int8", "int8", "int32", b_transposed=True, in_registers=True),
    ],
    ids=str,
)
def test_each_kind_of_operand_compiles(case, compiled):
    compiled(case, product(case))


def attention_like(case, *, overlapped):
    """Two products an iteration; the first one's result is the second's operand."""

    def body(kb, x, y, out):
        a, b = views(kb, case, x, y)
        index = ir.IndexType.get()
        acc = wgmma.zeros((64, 128))
        right = b.slice((0, 0), (128, 64))

        def scores():
            left = a.slice((0, 0), (64, 64))
            return wgmma.mma(wgmma.zeros((64, 128)), left, right.transpose((1, 0)))

        bounds = [arith.constant(index, n) for n in (0, 8, 1)]
        first = scores() if overlapped else None
        if first is not None:
            wgmma.wait(0)
            first = elementwise.astype(wgmma.fence_accumulator(first), dtypes.F16)
        carried = [*acc.values, *(first.values if first else ())]
        loop = scf.ForOp(*bounds, carried)
        with ir.InsertionPoint(loop.body):
            values = list(loop.inner_iter_args)
            count = len(acc.values)
            mine = acc.with_values(values[:count])
            value = b.slice((0, 0), (128, 128))
            ahead = scores()
            if first is None:
                wgmma.wait(0)
                weights = elementwise.astype(wgmma.fence_accumulator(ahead), dtypes.F16)
                mine = wgmma.mma(mine, weights, value)
                wgmma.wait(0)
                scf.yield_(list(wgmma.fence_accumulator(mine).values))
            else:
                mine = wgmma.mma(mine, first.with_values(values[count:]), value)
                wgmma.wait(1)
                weights = elementwise.astype(wgmma.fence_accumulator(ahead), dtypes.F16)
                wgmma.wait(0)
                scf.yield_([*wgmma.fence_accumulator(mine).values, *weights.values])
        gmem.store(out, acc.with_values(list(loop.results)[: len(acc.values)]))

    return body


@pytest.mark.offline
@pytest.mark.parametrize("overlapped", [False, True])
def test_a_product_of_a_product_is_not_serialised(overlapped, compiled):
    case = Case("float16", "float16", "float32", k=128, b_transposed=True)
    compiled(case, attention_like(case, overlapped=overlapped))


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
