# SPDX-License-Identifier: Apache-2.0
"""tcgen05_mma as kernels write it: every form of operands, everywhere."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.refusal import refused
from tests.support.semantics import BOTH, Lane, under
from tests.support.tensor_products import (
    BF16,
    E4M3,
    E5M2,
    F16,
    F32,
    Product,
    check,
    check_body,
    check_inferred,
    start_copies,
    storage,
)

I8, U8, I32 = jnp.int8, jnp.uint8, jnp.int32
KERNELS = {
    "f16": Product(),
    "b along K": Product(b_stored=True),
    "a along M": Product(a_stored=True),
    "bf16, the least N": Product(a=BF16, b=BF16, n=8, b_stored=True),
    "N of 24": Product(n=24, b_stored=True),
    "64-byte swizzle": Product(swizzle=64),
    "32-byte swizzle": Product(swizzle=32, k=32),
    "K of three swizzles": Product(k=192),
    "float16 accumulator": Product(acc=F16),
    "tf32": Product(a=F32, b=F32, b_stored=True, k=32),
    "two kinds of float8": Product(a=E4M3, b=E5M2, b_stored=True, k=128),
    "float8 along N": Product(a=E4M3, b=E4M3, k=128, n=128),
    "int8 and uint8": Product(a=I8, b=U8, acc=I32, b_stored=True, k=128, n=32),
    "64 rows": Product(m=64, n=128),
    "64 rows, narrow tiles along N": Product(m=64, n=64, swizzle=64),
    "64 rows, the least N": Product(m=64, n=16, b_stored=True),
    "three products": Product(rounds=3),
    "N of 192, b along N": Product(n=192, k=32, swizzle=64),
    "a in TMEM": Product(a_in_tmem=True),
    "float8 in TMEM": Product(a=E4M3, b=E4M3, k=128, n=128, a_in_tmem=True),
    "tf32 in TMEM": Product(a=F32, b=F32, b_stored=True, k=32, a_in_tmem=True),
}


@pytest.mark.parametrize("case", KERNELS.values(), ids=KERNELS)
def test_a_product(case):
    check(case)


@pytest.mark.parametrize(
    "case",
    [
        Product(inferred=True),
        Product(a=E4M3, b=E4M3, k=128, inferred=True),
        Product(m=64, n=64, inferred=True),
    ],
)
def test_warpgroup_semantics_infer_how_operands_are_stored(case):
    check_inferred(case)


TILE = Product(n=16, k=32, b_stored=True, swizzle=64)


def load(a, b, a_smem, b_smem, loaded):
    start_copies(loaded, (a, a_smem), (b, b_smem))
    plgpu.barrier_wait(loaded)


@pytest.mark.smoke
@everywhere.tests(check_body, TILE, lambda a, b: 3 * TILE.expected(a, b))
def test_accumulate_may_be_a_value(a, b, out, a_smem, b_smem, acc, loaded, done):
    load(a, b, a_smem, b_smem, loaded)

    @plgpu.loop(0, 3)
    def _(i):
        plgpu.tcgen05_mma(acc, a_smem, b_smem.T, accumulate=i > 0)

    plgpu.tcgen05_commit_arrive(done)
    plgpu.barrier_wait(done)
    out[...] = acc[...]


@everywhere.tests(check_body, TILE)
def test_a_commit_arrives_where_its_predicate_holds(
    a, b, out, a_smem, b_smem, acc, loaded, done
):
    load(a, b, a_smem, b_smem, loaded)
    plgpu.tcgen05_mma(acc, a_smem, b_smem.T, accumulate=False)
    plgpu.tcgen05_commit_arrive(done, predicate=False)

    # An arrival too many would end the wait for the one that follows.
    @plgpu.loop(0, 2)
    def _(i):
        plgpu.tcgen05_commit_arrive(done, predicate=i == 1)

    plgpu.barrier_wait(done)
    out[...] = acc[...]


@everywhere.tests(check_body, Product(n=32, k=32, b_stored=True, swizzle=64))
def test_columns_of_an_accumulator_are_accumulators(
    a, b, out, a_smem, b_smem, acc, loaded, done
):
    load(a, b, a_smem, b_smem, loaded)
    for start in (0, 16):
        part = plgpu.ds(start, 16)
        right = b_smem.at[part].T if start else b_smem.reshape(2, 16, -1).at[0].T
        plgpu.tcgen05_mma(acc.at[:, part], a_smem, right, accumulate=False)
    plgpu.tcgen05_commit_arrive(done)
    plgpu.barrier_wait(done)
    out[...] = acc[...]


@everywhere.tests(check_body, TILE)
def test_a_warp_multiplies_and_the_warpgroup_reads(
    a, b, out, a_smem, b_smem, acc, loaded, done
):
    @plgpu.warp_map
    def _(warp):
        @plgpu.when(warp == 0)
        def _():
            load(a, b, a_smem, b_smem, loaded)
            plgpu.tcgen05_mma(acc, a_smem, b_smem.T, done, accumulate=False)

    plgpu.barrier_wait(done)
    out[...] = acc[...]


@pytest.mark.parametrize("b_stored", [False, True], ids=["along N", "along K"])
@pytest.mark.parametrize("n", [256, 512])
def test_all_columns_of_tensor_memory(n, b_stored):
    def body(a, b, out, a_smem, b_smem, acc, loaded, done):
        load(a, b, a_smem, b_smem, loaded)
        right = b_smem.T if b_stored else b_smem
        plgpu.tcgen05_mma(acc, a_smem, right, done, accumulate=False)
        plgpu.barrier_wait(done)
        for start in range(0, n, 64):
            part = plgpu.ds(start, 64)
            out[:, part] = plgpu.async_load_tmem(acc.at[:, part])

    check_body(body, Product(n=n, k=32, b_stored=b_stored, swizzle=64))


# --- instructions ---------------------------------------------------------------------


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
def test_instructions_of_a_product(semantics):
    case = Product()
    kernel = under(semantics, case.make())
    (report,) = plgpu.offline.compile(kernel, *case.operands(), target="sm_100a")
    found = re.findall(r"tcgen05\.[\w:.]+", report.ptx)
    assert found.count("tcgen05.mma.cta_group::1.kind::f16") == 4
    assert [x.split(".cta_group")[0] for x in found if ".mma" not in x] == [
        "tcgen05.alloc",
        "tcgen05.relinquish_alloc_permit",
        "tcgen05.commit",
        "tcgen05.fence::after_thread_sync",
        "tcgen05.ld.sync.aligned.16x256b.x8.b32",
        "tcgen05.ld.sync.aligned.16x256b.x8.b32",
        "tcgen05.wait::ld.sync.aligned",
        "tcgen05.fence::before_thread_sync",
        "tcgen05.fence::after_thread_sync",
        "tcgen05.dealloc",
    ]


# --- what is refused ------------------------------------------------------------------


def attempt(case=KERNELS["f16"], scratch=None):
    """Traces a product of these declarations."""

    def body(a, b, out, a_smem, b_smem, acc, loaded, done):
        plgpu.tcgen05_mma(acc, a_smem, b_smem, done)  # HERE

    jax.eval_shape(case.make(body=body, **(scratch or {})), *case.operands())


@pytest.mark.parametrize("rows", [192, 256])
@refused
def test_an_accumulator_is_one_tile_of_rows(rows):
    """TMEM has 128 lanes: several tiles of M are several accumulators."""
    plgpu.TMEM((rows, 64), F32)


@refused
def test_the_accumulator_is_in_tmem():
    attempt(scratch={"acc": plgpu.SMEM((128, 64), F32)})


@refused
def test_the_barrier_orders_the_tensor_core():
    attempt(scratch={"done": plgpu.Barrier()})


@refused
def test_operands_have_types_that_an_instruction_multiplies():
    other = plgpu.SMEM((64, 64), BF16, transforms=storage(BF16))
    attempt(scratch={"b_smem": other})


@refused
def test_bfloat16_accumulates_in_float32():
    attempt(Product(a=BF16, b=BF16, acc=F16))


@pytest.mark.parametrize(
    "case",
    [
        Product(n=20, inferred=True),
        Product(a=I8, b=I8, acc=I32, k=128, n=40, inferred=True),
        Product(m=64, n=64),
        Product(m=64, n=80, inferred=True),
        Product(k=40, inferred=True),
        Product(a=F32, b=F32, k=32),
    ],
)
@refused
def test_shapes_and_storage_are_those_of_an_instruction(case):
    attempt(case)


@refused
def test_lane_semantics_need_the_storage_of_operands():
    case = Product(inferred=True)
    lane = plgpu.CompilerParams(target="sm_100a", lowering_semantics=Lane)
    options = {"scratch_types": case.scratch(), "compiler_params": lane}
    kernel = everywhere.kernel(case.body, jnp.zeros(case.result[0]), **options)()
    jax.eval_shape(kernel, *case.operands())


@refused
def test_a_packed_accumulator_is_refused():
    attempt(Product(acc=F16), {"acc": plgpu.TMEM((128, 64), F16, packed=True)})


@refused
def test_hopper_has_no_tcgen05():
    def body(done):
        plgpu.tcgen05_commit_arrive(done)

    done = plgpu.Barrier(orders_tensor_core=True)
    jax.eval_shape(everywhere.kernel(body, (), done, target="sm_90a")())


@refused
def test_blackwell_ultra_does_not_multiply_bytes():
    case = KERNELS["int8 and uint8"]
    options = {"scratch_types": case.scratch(), "target": "sm_103a"}
    out = jax.ShapeDtypeStruct(*case.result)
    jax.eval_shape(everywhere.kernel(case.body, out, **options)(), *case.operands())


GOOD = {
    "tcgen05_mma": lambda e: {"acc": e.acc, "a": e.a, "b": e.w.T},
    "tcgen05_commit_arrive": lambda e: {"barrier": e.b},
}
EFFECTS = {
    "tcgen05_mma.barrier": [lambda e: e.b],
    "tcgen05_mma.accumulate": [True, False],
    "tcgen05_mma.a_scale": [lambda e: e.t],
    "tcgen05_mma.b_scale": [lambda e: e.t],
    "tcgen05_mma.a_sparse_metadata": [lambda e: e.t],
    "tcgen05_commit_arrive.predicate": "",
    **dict.fromkeys(
        ("tcgen05_mma.collective_axis", "tcgen05_commit_arrive.collective_axis"),
        "tests/lowering/families/tensor_cores/test_tcgen05_pairs.py",
    ),
}
