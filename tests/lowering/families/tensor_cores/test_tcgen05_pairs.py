# SPDX-License-Identifier: Apache-2.0
"""Products of pairs of CTAs as kernels write them: forms of operands, everywhere."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.refusal import refused
from tests.support.semantics import BOTH, under
from tests.support.tensor_pairs import PAIR, PairProduct
from tests.support.tensor_products import (
    BF16,
    BLACKWELL,
    E4M3,
    E5M2,
    F16,
    F32,
    check,
    check_body,
    check_inferred,
)

TILE = PairProduct(k=32, n=16, swizzle=64)
I8, U8, I32 = jnp.int8, jnp.uint8, jnp.int32
KERNELS = {
    "256 rows": PairProduct(),
    "128 rows": PairProduct(m=64),
    "each CTA waits for its loads": PairProduct(tracked=False),
    "128 rows, each CTA waits for its loads": PairProduct(m=64, tracked=False),
    "b along N": PairProduct(n=128, b_stored=False),
    "a along M": PairProduct(a_stored=True),
    "bf16, the least N": PairProduct(a=BF16, b=BF16, n=16),
    "128 rows, the least N": PairProduct(m=64, n=16),
    "N of 48": PairProduct(n=48),
    "the most N": PairProduct(n=256, k=32, swizzle=64),
    "128 rows, the most N": PairProduct(m=64, n=256, k=32, swizzle=64),
    "K of three swizzles": PairProduct(k=192),
    "32-byte swizzle": PairProduct(swizzle=32, k=32),
    "float16 accumulator": PairProduct(acc=F16),
    "tf32": PairProduct(a=F32, b=F32, k=32),
    "two kinds of float8": PairProduct(a=E4M3, b=E5M2, k=128),
    "float8 along N": PairProduct(a=E4M3, b=E4M3, k=128, n=256, b_stored=False),
    "int8 and uint8": PairProduct(a=I8, b=U8, acc=I32, k=128),
    "a in TMEM": PairProduct(a_in_tmem=True, tracked=False),
    "float8 in TMEM": PairProduct(a=E4M3, b=E4M3, k=128, a_in_tmem=True, tracked=False),
}


@pytest.mark.parametrize("case", KERNELS.values(), ids=KERNELS)
def test_a_product_of_a_pair(case):
    check(case)


def test_warpgroup_semantics_infer_how_operands_are_stored():
    check_inferred(PairProduct(inferred=True))


def store(case, out, acc):
    out[plgpu.ds(lax.axis_index("c") * case.m, case.m)] = acc[...]


@everywhere.tests(check_body, TILE, lambda a, b: 3 * TILE.expected(a, b), **PAIR)
def test_the_leader_alone_may_issue_and_accumulate(
    a, b, out, a_smem, b_smem, acc, loaded, ready, done
):
    TILE.load(a, b, a_smem, b_smem, loaded, ready)

    @plgpu.when(lax.axis_index("c") == 0)
    def _():
        @plgpu.loop(0, 3)
        def _(i):
            options = {"accumulate": i > 0, "collective_axis": "c"}
            plgpu.tcgen05_mma(acc, a_smem, b_smem.T, **options)

        plgpu.tcgen05_commit_arrive(done, collective_axis="c")

    plgpu.barrier_wait(done)
    store(TILE, out, acc)


ONCE = {"accumulate": False, "collective_axis": "c"}


@pytest.mark.smoke
@everywhere.tests(check_body, TILE, **PAIR)
def test_a_warp_of_the_leader_multiplies(
    a, b, out, a_smem, b_smem, acc, loaded, ready, done
):
    @plgpu.warp_map
    def _(warp):
        @plgpu.when(warp == 0)
        def _():
            TILE.load(a, b, a_smem, b_smem, loaded, ready)
            plgpu.tcgen05_mma(acc, a_smem, b_smem.T, done, **ONCE)

    plgpu.barrier_wait(done)
    store(TILE, out, acc)


def check_two(body, case, columns=slice(None), **mesh):
    """Runs a body over two left operands, the second twice as large as the first."""
    a, b = case.operands()
    expected = np.stack([case.expected(a, b), case.expected(2 * a, b)])[..., columns]
    options = {"scratch_types": case.scratch(), "target": "sm_100a", "on_gpu": False}
    everywhere.run(body, [np.stack([a, 2 * a]), b], expected, **options, **mesh)


SMALL = PairProduct(m=64, n=16, k=32, swizzle=64)


@everywhere.tests(check_two, SMALL, cluster={"p": 2, "c": 2})
def test_several_pairs_make_a_cluster(
    a, b, out, a_smem, b_smem, acc, loaded, ready, done
):
    p = lax.axis_index("p")
    SMALL.load(a.at[p], b, a_smem, b_smem, loaded, ready)
    plgpu.tcgen05_mma(acc, a_smem, b_smem.T, done, **ONCE)
    plgpu.barrier_wait(done)
    store(SMALL, out.at[p], acc)


WIDE = PairProduct(n=32, k=32, swizzle=64)
# The first accumulator has the first 8 columns of each CTA's 16.
COLUMNS = np.arange(32).reshape(2, 2, 8).transpose(1, 0, 2).reshape(-1)


@everywhere.tests(check_two, WIDE, COLUMNS, grid={"g": 2}, **PAIR)
def test_columns_of_an_accumulator_are_accumulators(
    a, b, out, a_smem, b_smem, acc, loaded, ready, done
):
    """Each has columns of b of both CTAs; clusters fill a grid."""
    g = lax.axis_index("g")
    WIDE.load(a.at[g], b, a_smem, b_smem, loaded, ready)
    for i in range(2):
        part, right = plgpu.ds(16 * i, 16), b_smem.reshape(2, 8, -1).at[i].T
        plgpu.tcgen05_mma(acc.at[:, part], a_smem, right, **ONCE)
    plgpu.tcgen05_commit_arrive(done, collective_axis="c")
    plgpu.barrier_wait(done)
    store(WIDE, out.at[g], acc)


# --- instructions ---------------------------------------------------------------------


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
def test_instructions_of_a_pair(semantics):
    case = PairProduct()
    kernel = under(semantics, case.make())
    (report,) = plgpu.offline.compile(kernel, *case.operands(), target="sm_100a")
    found = re.findall(r"(?:tcgen05|barrier\.cluster)\.[\w:.]+", report.ptx)
    assert found.count("tcgen05.mma.cta_group::2.kind::f16") == 4
    other = ("tcgen05.mma", "tcgen05.ld", "tcgen05.fence")
    # As upstream's, whose last barrier is relaxed.
    assert [x for x in found if not x.startswith(other)] == [
        "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32",
        "tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned",
        "barrier.cluster.arrive.relaxed.aligned",
        "barrier.cluster.wait.aligned",
        "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster"
        ".multicast::cluster.b64",
        "tcgen05.wait::ld.sync.aligned",
        "barrier.cluster.arrive.aligned",
        "barrier.cluster.wait.aligned",
        "tcgen05.dealloc.cta_group::2.sync.aligned.b32",
    ]


# --- what is refused ------------------------------------------------------------------


def attempt(case=KERNELS["256 rows"], scratch=None, axis="c", mesh=None):
    """Traces a product of these declarations."""

    def body(a, b, out, a_smem, b_smem, acc, loaded, ready, done):
        right = b_smem.T if case.b_stored else b_smem
        plgpu.tcgen05_mma(acc, a_smem, right, done, collective_axis=axis)  # HERE

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((2 * case.m, case.n), F32),
        scratch_types={**case.scratch(), **(scratch or {})},
        compiler_params=BLACKWELL,
        **(mesh or PAIR),
    )
    jax.eval_shape(kernel, *case.operands())


@pytest.mark.parametrize(
    "case",
    [
        PairProduct(n=24, inferred=True),
        PairProduct(n=512, k=32, swizzle=64),
        PairProduct(a=I8, b=I8, acc=I32, k=128, n=48, inferred=True),
        PairProduct(k=40, inferred=True),
        PairProduct(a=F32, b=F32, k=32, n=128, b_stored=False),
    ],
)
@refused
def test_shapes_and_storage_are_those_of_an_instruction(case):
    attempt(case)


@refused
def test_each_cta_has_half_of_the_columns_of_b():
    attempt(scratch={"acc": plgpu.TMEM((128, 32), F32, collective=True)})


@refused
def test_the_accumulator_is_that_of_a_pair():
    attempt(scratch={"acc": plgpu.TMEM((128, 64), F32)})


@refused
def test_one_cta_does_not_use_the_accumulator_of_a_pair():
    attempt(scratch={"b_smem": plgpu.SMEM((64, 64), F16)}, axis=None)


@refused
def test_the_axis_is_one_of_the_cluster():
    attempt(axis="other")


@pytest.mark.parametrize(
    "mesh",
    [
        {"cluster": (2, 2), "cluster_names": ("c", "d")},
        {"cluster": (4,), "cluster_names": ("c",)},
        {"cluster": (1, 2), "cluster_names": ("c", "d")},
    ],
    ids=["not the last", "four CTAs", "one CTA"],
)
@refused
def test_the_axis_is_that_of_a_pair(mesh):
    attempt(mesh=mesh)


@refused
def test_a_left_operand_of_64_rows_cannot_be_in_tmem():
    attempt(
        PairProduct(m=64),
        {"a_smem": plgpu.TMEM((64, 64), F16, packed=True, collective=True)},
    )


@refused
def test_an_accumulator_of_64_rows_has_no_parts():
    case = PairProduct(m=64, n=32, k=32, swizzle=64)

    def body(a, b, out, a_smem, b_smem, acc, loaded, ready, done):
        part, right = acc.at[:, plgpu.ds(0, 16)], b_smem.at[plgpu.ds(0, 8)].T
        plgpu.tcgen05_mma(part, a_smem, right, done, collective_axis="c")  # HERE

    jax.eval_shape(case.make(body=body), *case.operands())


@refused
def test_all_operations_of_a_kernel_are_those_of_pairs():
    case = PairProduct()

    def body(a, b, out, a_smem, b_smem, acc, loaded, ready, done):
        plgpu.tcgen05_commit_arrive(done)  # HERE

    jax.eval_shape(case.make(body=body), *case.operands())
