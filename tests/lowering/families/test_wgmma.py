# SPDX-License-Identifier: Apache-2.0
"""wgmma as kernels write it: every operand form, accumulators through control flow.

Errors are absolute, for operands of normal distribution and K = 128, so that results
have a standard deviation of 11 and the sum of all |a b| is about 80.
"""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import arch, compiler
from pallas_gpu.lowering.machine import Build
from tests.support import everywhere
from tests.support.semantics import BOTH, Warpgroup

F16, F32 = jnp.float16, jnp.float32
M, N, K = 128, 64, 128
# 16-bit products and tf32's are exact in float32; 128 terms lose a few of 24 bits.
EXACT = 1e-4
# float8: the sums inside of an instruction keep 13 bits below their largest term.
FLOAT8 = 0.05
# A float16 accumulator is rounded after each of 8 instructions, by 2**-6 below 64.
FLOAT16 = 0.25
# What ptxas says when it waits for an instruction that the kernel does not wait for.
SERIALISED = re.compile(r"serialized|warpgroup\.\w+ is injected")


@dataclasses.dataclass(frozen=True)
class Case:
    """One product; `at` and `bt`: the operand lies in memory as (K, M), (N, K)."""

    a: str = "float16"
    b: str = "float16"
    acc: str = "float32"
    at: bool = False
    bt: bool = False
    registers: bool = False
    swizzle: int = 128
    atol: float = EXACT

    def __str__(self) -> str:
        kind = f"{self.a}-{self.b}-{self.acc}"
        form = "-aT" * self.at + "-bT" * self.bt + "-regs" * self.registers
        return f"{kind}{form}-{self.swizzle}"


def case(a, b=None, acc="float32", **options):
    return Case(a, b or a, acc, **options)


K_MINOR = [
    case("float32", bt=True),
    case("float8_e4m3fn", bt=True, atol=FLOAT8),
    case("float8_e5m2", bt=True, atol=FLOAT8),
    case("float8_e4m3fn", "float8_e5m2", bt=True, atol=FLOAT8),
    case("float8_e5m2", "float8_e4m3fn", acc="float16", bt=True, atol=FLOAT16),
    case("int8", acc="int32", bt=True, atol=0),
]
CASES = [
    *(
        case(t, at=at, bt=bt, swizzle=s)
        for t, swizzles in (("float16", (128, 64, 32)), ("bfloat16", (128,)))
        for s in swizzles
        for at in (False, True)
        for bt in (False, True)
    ),
    case("float16", acc="float16", atol=FLOAT16),
    *K_MINOR,
    *(
        dataclasses.replace(c, swizzle=s)
        for c in (K_MINOR[0], K_MINOR[1], K_MINOR[-1])
        for s in (64, 32)
    ),
    *(
        case(t, bt=bt, registers=True)
        for t in ("float16", "bfloat16")
        for bt in (False, True)
    ),
    *(dataclasses.replace(c, registers=True) for c in K_MINOR),
    case("float32", at=True, bt=True, registers=True),
]
# One of each kind of instruction.
COMPILED = [
    case("float16"),
    case("bfloat16", at=True, bt=True, swizzle=64),
    case("float16", acc="float16", registers=True),
    case("float32", bt=True),
    case("float32", bt=True, registers=True),
    case("float8_e4m3fn", "float8_e5m2", bt=True),
    case("float8_e5m2", "float8_e4m3fn", acc="float16", bt=True),
    case("float8_e4m3fn", bt=True, registers=True),
    case("int8", acc="int32", bt=True, registers=True),
]
LEFT_LAYOUTS = {
    1: plgpu.Layout.WGMMA_8BIT,
    2: plgpu.Layout.WGMMA,
    4: plgpu.Layout.WGMMA_32BIT,
}
PTX_NAMES = {
    "float16": "f16", "bfloat16": "bf16", "float32": "tf32", "int8": "s8",
    "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "int32": "s32",
}  # fmt: skip


def tiles(shape, dtype, swizzle=128):
    """SMEM stored as the tensor core reads it."""
    elements = swizzle // jnp.dtype(dtype).itemsize
    transforms = (
        plgpu.TilingTransform((8, elements)),
        plgpu.SwizzleTransform(swizzle),
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def make_kernel(body, a, b, out=(M, N), out_dtype=F32, swizzle=128, **options):
    """A kernel that runs `body(sa, sb, o)` with both operands in SMEM."""

    def full(a_ref, b_ref, o, sa, sb, barrier):
        plgpu.copy_gmem_to_smem(a_ref, sa, barrier)
        plgpu.copy_gmem_to_smem(b_ref, sb, barrier)
        plgpu.barrier_wait(barrier)
        body(sa, sb, o)

    return everywhere.kernel(
        full,
        jax.ShapeDtypeStruct(out, out_dtype),
        tiles(a.shape, a.dtype, swizzle),
        tiles(b.shape, b.dtype, swizzle),
        plgpu.Barrier(num_arrivals=2),
        **options,
    )


def numbers(seed, shape, dtype):
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(dtype)
    if dtype == jnp.int8:
        return rng.integers(-128, 128, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


def exact(x):
    """What the tensor core reads of an operand: of float32 the upper 19 bits."""
    x = np.asarray(x)
    if x.dtype == np.float32:
        x = (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    return x.astype(np.int64 if x.dtype.kind == "i" else np.float64)


def multiplied(left, right):
    """The product of two operands."""

    def scope(acc):
        plgpu.wgmma(acc, left, right)
        return acc[...]

    return plgpu.run_scoped(scope, plgpu.ACC((M, N)))


def product(c: Case):
    """The operands as they lie in memory, the kernel and the exact result."""
    a, b = numbers(1, (M, K), c.a), numbers(2, (K, N), c.b)
    stored = (a.T if c.at else a, b.T if c.bt else b)

    def body(sa, sb, o):
        left = sa.T if c.at else sa
        if c.registers:
            layout = LEFT_LAYOUTS[jnp.dtype(c.a).itemsize]
            left = plgpu.load(left, layout=layout, optimized=False)

        def scope(acc):
            plgpu.wgmma(acc, left, sb.T if c.bt else sb)
            return acc[...]

        o[...] = plgpu.run_scoped(scope, plgpu.ACC((M, N), c.acc))

    make = make_kernel(body, *stored, out_dtype=c.acc, swizzle=c.swizzle)
    return make, stored, exact(a) @ exact(b)


@pytest.mark.parametrize("c", CASES, ids=str)
def test_every_form_of_operand_is_multiplied(c):
    make, stored, expected = product(c)
    everywhere.check(make, stored, expected, atol=c.atol)


# How b is declared, in tiles of which shape, and how it becomes (K, N).
RESHAPED = {
    "dimensions before the tiles": ((2, 64, N), (8, 64), lambda b: b.reshape(K, N)),
    "tiles of one row": ((16, 8, N), (1, 8, 64), lambda b: b.reshape(K, N)),
    "between the tiles": ((N, 2, 64), (8, 1, 64), lambda b: b.reshape(N, K).T),
    "a part": ((2, 2, 64, N), (8, 64), lambda b: at(b, 1).reshape(K, N)),
    "split": ((2 * K, N), (8, 64), lambda b: at(b.reshape(2, K, N), 1)),
    "rows of it": ((3, 64, N), (8, 64), lambda b: at(b.reshape(192, N), RANGE)),
}
RANGE = slice(32, 32 + K)
OUT = jax.ShapeDtypeStruct((M, N), F32)


def at(x, index):
    return x[index] if isinstance(x, np.ndarray) else x.at[index]


# Inference tiles the last two dimensions.
INFERRED = [(case, True) for case in RESHAPED if RESHAPED[case][1] == (8, 64)]


@pytest.mark.parametrize(
    ("case", "inferred"), [*((case, False) for case in RESHAPED), *INFERRED]
)
def test_a_reshaped_reference_is_an_operand(case, inferred):
    shape, tiling, view = RESHAPED[case]
    a, b = numbers(1, (2, M // 2, K), F16), numbers(2, shape, F16)

    def body(a_ref, b_ref, o, sa, sb, barrier):
        plgpu.copy_gmem_to_smem(a_ref, sa, barrier)
        plgpu.copy_gmem_to_smem(b_ref, sb, barrier)
        plgpu.barrier_wait(barrier)
        o[...] = multiplied(sa.reshape(M, K), view(sb))

    stored = [
        plgpu.SMEM(x.shape, F16, transforms=() if inferred else (
            plgpu.TilingTransform(t), plgpu.SwizzleTransform(128)
        ))
        for x, t in ((a, (8, 64)), (b, tiling))
    ]  # fmt: skip
    expected = exact(a).reshape(M, K) @ exact(view(b))
    semantics = [Warpgroup] if inferred else BOTH
    everywhere.run(
        body, [a, b], expected, *stored, plgpu.Barrier(num_arrivals=2), out=OUT,
        atol=EXACT, semantics=semantics, executed=semantics, emulate=not inferred,
    )  # fmt: skip


def test_zeros_in_registers_take_their_layout_from_wgmma():
    a, b = numbers(1, (M, N), F16), numbers(2, (M, N), F16)

    def body(sa, sb, o):
        o[...] = multiplied(jnp.full((M, M), 0.5, F16), sb)

    expected = np.broadcast_to(0.5 * exact(b).sum(0), (M, N))
    everywhere.check(make_kernel(body, a, b), [a, b], expected, atol=EXACT)


# --- accumulators ---------------------------------------------------------------------

A, B = numbers(3, (M, K), F16), numbers(4, (K, N), F16)
AB = exact(A) @ exact(B)


def with_accumulator(scope, *, acc=None, **options):
    """A kernel that stores what `scope(acc, sa, sb)` returns."""

    def body(sa, sb, o):
        o[...] = plgpu.run_scoped(lambda x: scope(x, sa, sb), acc or plgpu.ACC((M, N)))

    return make_kernel(body, A, B, **options)


def check(make, expected, atol=EXACT, **options):
    everywhere.check(make, [A, B], expected, atol=atol, **options)


def accumulates(scope, expected, atol=EXACT, **options):
    check(with_accumulator(scope, **options), expected, atol)


def multiplies(body, expected, atol=EXACT):
    check(make_kernel(body, A, B), expected, atol)


def add_step(acc, sa, sb, k, depth=64):
    """Adds the products of one part of K."""
    part = plgpu.ds(k * depth, depth)
    plgpu.wgmma(acc, sa.at[:, part], sb.at[part])


@everywhere.tests(accumulates, AB)
def test_fori_loop_carries_an_accumulator(acc, sa, sb):
    def step(k, _):
        add_step(acc, sa, sb, k)
        plgpu.wgmma_wait(1)

    lax.fori_loop(0, 2, step, None)
    return acc[...]


@pytest.mark.parametrize("form", ["for", "while"])
def test_a_loop_reads_an_accumulator_into_its_carry(form):
    def scope(acc, sa, sb):
        for k in range(2):
            add_step(acc, sa, sb, k)
        if form == "for":
            return lax.fori_loop(0, 3, lambda _, v: v + acc[...], acc[...])
        step = lambda c: (c[0] + 1, c[1] + acc[...])  # noqa: E731
        return lax.while_loop(lambda c: c[0] < 3, step, (0, acc[...]))[1]

    accumulates(scope, 4 * AB, atol=4 * EXACT)


@everywhere.tests(accumulates, AB)
def test_while_loop_carries_an_accumulator(acc, sa, sb):
    def step(k):
        add_step(acc, sa, sb, k)
        plgpu.wgmma_wait(0)
        return k + 1

    lax.while_loop(lambda k: k < 2, step, jnp.int32(0))
    return acc[...]


@everywhere.tests(accumulates, 2 * AB + exact(A)[:, 64:] @ exact(B)[64:], 3 * EXACT)
def test_switch_and_a_loop_around_it_carry_an_accumulator(acc, sa, sb):
    @plgpu.loop(0, 4)
    def _(i):
        branches = [
            lambda: plgpu.wgmma(acc, sa, sb),
            lambda: None,
            lambda: add_step(acc, sa, sb, 1),
        ]
        lax.switch(lax.rem(i, jnp.int32(3)), branches)

    return acc[...]


@everywhere.tests(
    accumulates,
    exact(A)[:, [*range(32, 64), *range(96, 128)]]
    @ exact(B)[[*range(32, 64), *range(96, 128)]],
    swizzle=64,
)
def test_when_skips_a_product(acc, sa, sb):
    @plgpu.loop(0, 4)
    def _(k):
        @plgpu.when(k % 2 == 1)
        def _():
            add_step(acc, sa, sb, k, 32)

    return acc[...]


@everywhere.tests(accumulates, AB, grid={"i": 1})
def test_a_product_that_no_branch_waits_for_is_read_after_it(acc, sa, sb):
    @plgpu.when(lax.axis_index("i") == 0)
    def _():
        plgpu.wgmma(acc, sa, sb)

    plgpu.wgmma_wait(0)
    return plgpu.wgmma_accumulator_load(acc, wait_n=None)


@everywhere.tests(multiplies, 3 * AB, 3 * EXACT)
def test_an_accumulator_of_a_loop_body_starts_again_as_zeros(sa, sb, o):
    total = jnp.zeros((M, N), F32)
    o[...] = lax.fori_loop(0, 3, lambda _, x: x + multiplied(sa, sb), total)


def test_products_and_reads_of_parts_of_the_columns():
    def scope(acc, sa, sb):
        plgpu.wgmma(acc.at[:, :32], sa, sb.at[:, 32:])
        plgpu.wgmma(acc.at[:, 32:], sa, sb.at[:, :32])
        plgpu.wgmma(acc.at[:, plgpu.ds(8, 16)], sa, sb.at[:, :16])
        left, right = acc[:, :32], plgpu.wgmma_accumulator_load(acc.at[:, 32:])
        return left - right

    expected = AB[:, 32:] - AB[:, :32]
    expected[:, 8:24] += AB[:, :16]
    accumulates(scope, expected, 3 * EXACT, out=(M, 32), swizzle=32)


@everywhere.tests(accumulates, np.concatenate([AB[64:], AB[:64]]))
def test_products_of_parts_of_the_rows(acc, sa, sb):
    plgpu.wgmma(acc.at[64:], sa.at[:64], sb)
    plgpu.wgmma(acc.at[:64], sa.at[64:], sb)
    return acc[...]


@everywhere.tests(accumulates, 2 * AB + 1, 2 * EXACT)
def test_addition_into_an_accumulator(acc, sa, sb):
    plgpu.wgmma(acc, sa, sb)
    jax.ref.addupdate(acc, ..., jnp.ones((M, N), F32))
    plgpu.wgmma(acc, sa, sb)
    return jax.ref.swap(acc, ..., jnp.zeros((M, N), F32)) + acc[...]


@everywhere.tests(accumulates, AB)
def test_a_store_of_a_constant_resets_an_accumulator(acc, sa, sb):
    plgpu.wgmma(acc, sa, sb)
    acc[...] = jnp.zeros((M, N), F32)
    plgpu.wgmma(acc, sa, sb)
    return acc[...]


def test_a_store_waits_for_no_product_of_another_accumulator():
    def scope(accumulators, sa, sb):
        first, second = accumulators
        plgpu.wgmma(first, sa, sb)
        plgpu.wgmma(second, sa, sb)
        early = plgpu.wgmma_accumulator_load(first, wait_n=1)
        first[...] = jnp.zeros((M, N), F32)
        plgpu.wgmma(first, sa, sb)
        early += plgpu.wgmma_accumulator_load(second, wait_n=1)
        return early + first[...]

    make = with_accumulator(scope, acc=[plgpu.ACC((M, N))] * 2)
    check(make, 3 * AB, 3 * EXACT)
    (report,) = plgpu.offline.lower(make(None), A, B)
    assert report.mlir.count("wgmma.wait.group.sync.aligned") == 3


def test_a_product_becomes_the_left_operand_of_the_next():
    def body(sa, sb, o):
        o[...] = multiplied(multiplied(sa, sb).astype(F16), sb.at[:N])

    middle = AB.astype(np.float16).astype(np.float64)
    # The first product is rounded to float16 where float32 may lie on the other side.
    multiplies(body, middle @ exact(B)[:N], 0.2)


@everywhere.tests(multiplies, 3 + 2 * AB, 2 * EXACT)
def test_run_state_starts_from_values_and_returns_them(sa, sb, o):
    def add(refs):
        plgpu.wgmma(refs["sum"], sa, sb)
        plgpu.wgmma(refs["zero"], sa, sb)

    start = {
        "sum": plgpu.ACC.init(jnp.full((M, N), 3.0, F32)),
        "zero": plgpu.ACC((M, N)),
    }
    end = plgpu.run_state(add)(start)
    o[...] = end["sum"] + end["zero"]


@everywhere.tests(multiplies, 1 + AB)
def test_run_state_in_a_loop_carries_values(sa, sb, o):
    def step(k, value):
        def add(acc):
            add_step(acc, sa, sb, k)

        return plgpu.run_state(add)(plgpu.ACC.init(value))

    o[...] = lax.fori_loop(0, 2, step, jnp.ones((M, N), F32))


@everywhere.tests(accumulates, 2 * AB, 2 * EXACT)
def test_optimization_barrier_is_the_identity_on_arrays_and_scalars(acc, sa, sb):
    plgpu.wgmma(acc, sa, sb)
    value, scale = lax.optimization_barrier((acc[...], jnp.float32(2)))
    return value * scale


# --- what the compiler makes of it ----------------------------------------------------


def compiled(make, *args):
    """Compiles a kernel offline and returns all that ptxas said, too."""
    (params,) = plgpu.offline.kernels_called(make(None), args, arch.SM_90A)
    return compiler.run(Build(params, arch.SM_90A)).compiled


def assert_clean(report):
    assert not SERIALISED.search(report.ptxas)
    assert report.resources.spill_store_bytes == 0
    assert report.resources.spill_load_bytes == 0


@pytest.mark.offline
@pytest.mark.parametrize("c", COMPILED, ids=str)
def test_each_kind_of_instruction_compiles(c):
    make, stored, _ = product(c)
    report = compiled(make, *stored)
    assert_clean(report)
    k_step = 32 // jnp.dtype(c.a).itemsize
    acc = {"float32": "f32", "float16": "f16", "int32": "s32"}[c.acc]
    name = f"wgmma.mma_async.sync.aligned.m64n64k{k_step}.{acc}."
    name += f"{PTX_NAMES[c.a]}.{PTX_NAMES[c.b]}"
    assert report.ptx.count(name) == M // 64 * K // k_step


@pytest.mark.offline
def test_a_loop_with_one_product_under_way_is_not_serialised():
    def scope(acc, sa, sb):
        @plgpu.loop(0, 4)
        def _(k):
            add_step(acc, sa, sb, k, 32)
            plgpu.wgmma_wait(1)

        return jax.nn.silu(acc[...])

    assert_clean(compiled(with_accumulator(scope, swizzle=64), A, B))


GOOD = {
    "wgmma": lambda e: {"acc": e.acc, "a": e.a, "b": e.w},
    "wgmma_wait": lambda e: {"n": 0},
    "wgmma_accumulator_load": lambda e: {"acc": e.acc},
    "wgmma_accumulator_deref": lambda e: {"acc": e.acc},
}
EFFECTS = {"wgmma_accumulator_load.wait_n": [0, 1]}
