# SPDX-License-Identifier: Apache-2.0
"""Inline PTX: emulated by its author's function, as emitted code, on a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import offline
from tests.support import everywhere
from tests.support.features.row import Row
from tests.support.refusal import refused, refused_by

SHAPE = (64, 128)
F32, I32, BF16 = jnp.float32, jnp.int32, jnp.bfloat16
X = (np.arange(64 * 128) % 251 - 125).astype(np.float32).reshape(SHAPE)
OUT = jax.ShapeDtypeStruct(SHAPE, F32)


def ptx(template, *operands, **options):
    """A body that executes a template for arrays, and scalars after these."""

    def body(*refs):
        *inputs, o = refs
        o[...] = plgpu.inline_ptx(template, *(x[...] for x in inputs), *operands,
                                  **{"dtype": o.dtype, **options})  # fmt: skip

    return body


INTS = X.astype(np.int32)
BYTES = X.astype(np.int8)
HALVES = (X / 8).astype(BF16)
# Of PTX the template, operands of it, its result, and the options.
PTX = {
    "f32": ("ex2.approx.f32 $0, $1;", [X / 32], np.exp2(X / 32), {}),
    "two": ("fma.rn.f32 $0, $1, $2, $1;", [X, X + 1], X * (X + 1) + X, {}),
    "s32": ("min.s32 $0, $1, $2;", [INTS, -INTS], np.minimum(INTS, -INTS), {}),
    "bf16": ("mul.bf16x2 $0, $1, $1;", [HALVES], HALVES * HALVES, {"pack": 2}),
    "alone": ("add.bf16 $0, $1, $1;", [HALVES], HALVES + HALVES, {}),
    "bytes": ("not.b32 $0, $1;", [BYTES], ~BYTES, {"pack": 4}),
    "constant": ("xor.b32 $0, $1, 0x0101;", [INTS], INTS ^ 0x0101, {}),
    "below 0": ("mad.lo.s32 $0, $1, $1, -3;", [INTS], INTS * INTS - 3, {}),
    "shifted": ("shl.b32 $0, $1, 4;", [INTS], INTS << 4, {}),
    "rounded": (
        "cvt.rn.bf16x2.f32 $0, $2, $1;",
        [X / 3],
        (X / 3).astype(BF16),
        {"pack": 2},
    ),
    "wide": (
        "and.b64 $0, $1, $2;",
        [INTS.astype(np.int64) << 20, (INTS + 77).astype(np.int64) << 20],
        (INTS.astype(np.int64) << 20) & ((INTS + 77).astype(np.int64) << 20),
        {},
    ),
}


@pytest.mark.parametrize("case", PTX)
def test_ptx_computes_each_element(case):
    template, args, expected, options = PTX[case]
    if case == "wide":
        with jax.enable_x64(True):
            everywhere.run(ptx(template, **options), args, expected, **options and {})
        return
    everywhere.run(ptx(template, **options), args, expected, rtol=1e-6)


def test_ptx_takes_scalars_and_broadcasts():
    def body(x, o):
        row = plgpu.inline_ptx("mul.f32 $0, $1, $1;", x[0], dtype=F32)
        number = plgpu.inline_ptx("add.f32 $0, $1, $1;", x[0, 1], dtype=F32)
        o[...] = plgpu.inline_ptx(
            "fma.rn.f32 $0, $1, $2, $3;", x[...], row[None], number, dtype=F32
        )

    everywhere.run(body, [X], X * X[0] ** 2 + 2 * X[0, 1])


def test_ptx_has_several_results():
    text = "{ mul.lo.s32 $0, $2, $3; mul.hi.s32 $1, $2, $3; }"

    def emulate(a, b):
        product = a.astype(np.int64) * b
        return product.astype(np.int32), product >> 32

    def body(x, o):
        low, high = plgpu.inline_ptx(
            text, x[...], 1 << 20, dtype=(I32, I32), emulate=emulate
        )
        o[...] = low + high

    def expected():
        low, high = emulate(INTS << 8, 1 << 20)
        return low + high.astype(np.int32)

    everywhere.run(body, [INTS << 8], expected(), executed=[])


def test_each_warp_executes_ptx_for_arrays_of_its_own():
    def body(x, o, smem):
        @plgpu.warp_map
        def _(i):
            rows = plgpu.ds(i * 16, 16)
            smem[rows] = plgpu.inline_ptx("add.f32 $0, $1, $1;", x[rows], dtype=F32)

        o[...] = smem[...]

    everywhere.run(body, [X], 2 * X, plgpu.SMEM(SHAPE, F32))


def test_ptx_runs_in_loops_and_branches():
    def body(x, o):
        def double(x):
            return plgpu.inline_ptx("add.f32 $0, $1, $1;", x, dtype=F32)

        def step(i, total):
            return jax.lax.cond(i % 2 == 0, double, lambda t: t + 1, total)

        o[...] = jax.lax.fori_loop(0, 4, step, x[...])

    everywhere.run(body, [X], (2 * X + 1) * 2 + 1)


def test_the_last_group_is_filled_up():
    """Each thread has one element, and the template takes two."""
    x = np.arange(128, dtype=np.float32).astype(BF16)
    everywhere.run(ptx("add.bf16x2 $0, $1, $1;", pack=2), [x], x + x)


def compiled(body, x, target="sm_90a"):
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    (report,) = offline.compile(everywhere.kernel(body, out)(), x, target=target)
    return report


@pytest.mark.offline
def test_the_template_is_compiled_for_each_group():
    text = compiled(ptx("mul.bf16x2 $0, $1, $1;", pack=2), HALVES).ptx
    # 64 elements in each thread.
    assert text.count("mul.bf16x2") == 32


@pytest.mark.offline
@pytest.mark.parametrize("pure", [True, False])
def test_a_pure_template_is_dropped_if_nobody_reads_it(pure):
    def body(x, o):
        plgpu.inline_ptx("ex2.approx.f32 $0, $1;", x[0, 0], dtype=F32, pure=pure)
        o[...] = x[...]

    assert ("ex2.approx" in compiled(body, X).ptx) is not pure


# --- errors ---------------------------------------------------------------------------


def run_once(body, *scratch, interpret=None, **options):
    make = everywhere.kernel(body, OUT, *scratch, **options)
    return make(interpret)(X)


@refused_by(run_once)
def test_an_instruction_without_a_model_names_the_line(x, o):
    plgpu.inline_ptx("prefetch.global.L2 [$0];", 0)  # HERE
    o[...] = x[...]


@refused_by(run_once)
def test_registers_have_the_width_of_the_instruction(x, o):
    half = x[...].astype(BF16)
    o[...] = plgpu.inline_ptx("ex2.approx.f32 $0, $1;", half, dtype=F32)  # HERE


WRONG = {
    "registers": ("add.f32 $0, $1, $2;", {}),
    "unused": ("mov.b32 $0, 0;", {}),
    "pack": ("add.f32 $0, $1;", {"pack": 3, "dtype": BF16}),
    "many": ("add.f32 $0, $1;", {"pack": 2**40}),
    "bool": ("not.pred $0, $1;", {"dtype": jnp.bool_}),
    "since": ("ex2.approx.f32 $0, $1;", {"since": "sm_100a"}),
    "target": ("ex2.approx.f32 $0, $1;", {"since": "sm_1"}),
}


@pytest.mark.parametrize("case", WRONG)
@refused
def test_a_template_fits_its_operands(case):
    template, options = WRONG[case]
    target = plgpu.CompilerParams(target="sm_90a")

    def body(x, o):
        o[...] = plgpu.inline_ptx(template, x[...], **{"dtype": F32, **options})  # HERE

    run_once(body, compiler_params=target)


@refused_by(run_once)
def test_scalars_are_not_packed(x, o):
    number = x[0, 0].astype(BF16)
    plgpu.inline_ptx("add.bf16x2 $0, $1;", number, dtype=BF16, pack=2)  # HERE


@refused_by(run_once)
def test_the_shapes_of_operands_broadcast(x, o):
    plgpu.inline_ptx("add.f32 $0, $1, $2;", x[:32], x[...], dtype=F32)  # HERE


@refused_by(
    run_once,
    compiler_params=plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane
    ),
)
def test_operands_of_ptx_have_one_layout(x, o):
    a = plgpu.load(x, layout=plgpu.Layout.WG_STRIDED(SHAPE, 1), optimized=False)
    b = plgpu.load(x, layout=plgpu.Layout.WGMMA, optimized=False)
    o[...] = plgpu.inline_ptx("add.f32 $0, $1, $2;", a, b, dtype=F32)  # HERE


GOOD = {
    "inline_ptx": lambda e: {
        "template": "add.s32 $0, $1, $1;",
        "operands": (e.i,),
        "dtype": I32,
    },
}
EFFECTS = {
    "inline_ptx.operands": "test_ptx_takes_scalars_and_broadcasts",
    "inline_ptx.dtype": "test_ptx_has_several_results",
    "inline_ptx.pack": "test_the_template_is_compiled_for_each_group",
    "inline_ptx.pure": "test_a_pure_template_is_dropped_if_nobody_reads_it",
    "inline_ptx.since": "test_a_template_fits_its_operands",
    "inline_ptx.emulate": "test_ptx_has_several_results",
}
FEATURES = [
    Row(
        "inline PTX",
        operations=("inline_ptx",),
        runs="ptx_computes_each_element",
        offline="the_template_is_compiled_for_each_group",
        instruction="mul.bf16x2",
    ),
]
