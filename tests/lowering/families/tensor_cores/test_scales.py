# SPDX-License-Identifier: Apache-2.0
"""Block-scaled products as kernels write them: every form of scales, everywhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu.layouts import TmemLayout
from tests.support import everywhere
from tests.support.refusal import refused
from tests.support.scaled_products import E2M1, E8M0, ScaledProduct
from tests.support.tensor_products import (
    E4M3,
    E5M2,
    F16,
    F32,
    check,
    check_body,
    check_inferred,
    start_copies,
)

MXF8 = ScaledProduct(n=256, k=256)
FP4 = ScaledProduct(a=E2M1, b=E2M1, k=256)
NVF4 = ScaledProduct(a=E2M1, b=E2M1, k=256, block=16, scale=E4M3)
KERNELS = {
    "mxf8": ScaledProduct(),
    "two kinds of float8": ScaledProduct(a=E5M2),
    "b along N": ScaledProduct(n=128, b_stored=False),
    "256 columns, two groups of scales": MXF8,
    "136 columns, added up": ScaledProduct(n=136, rounds=3),
    "64-byte swizzle": ScaledProduct(n=8, swizzle=64),
    "mxf4": FP4,
    "mxf8, a in TMEM": ScaledProduct(n=16, a_in_tmem=True),
    "mxf4, a in TMEM": ScaledProduct(n=16, a=E2M1, b=E2M1, k=256, a_in_tmem=True),
    "nvf4": NVF4,
    "nvf4, 256 columns": ScaledProduct(
        n=256, a=E2M1, b=E2M1, k=256, block=16, scale=E4M3
    ),
    "float4, float8_e8m0fnu of 16": ScaledProduct(
        n=24, a=E2M1, b=E2M1, k=256, block=16
    ),
}


@pytest.mark.parametrize("case", KERNELS.values(), ids=KERNELS)
def test_a_scaled_product(case):
    check(case)


def test_warpgroup_semantics_infer_how_operands_are_stored():
    check_inferred(ScaledProduct(inferred=True))


def test_a_scale_that_is_nan_spoils_its_row():
    case = ScaledProduct(n=8)
    operands = [x.copy() for x in case.operands()]
    operands[2][0, 0, 5, 4] = np.nan  # row 37, the first block
    expected = case.expected(*operands)
    assert np.isnan(expected[37]).all()
    assert np.isfinite(np.delete(expected, 37, axis=0)).all()
    everywhere.check(case.make, operands, expected, on_gpu=False)


def copy_all(a, b, sa_gmem, sb_gmem, *smem, loaded, sa, sb):
    """Copies the operands, and the scales to TMEM."""
    start_copies(loaded, *zip((a, b, sa_gmem, sb_gmem), smem, strict=True))
    plgpu.barrier_wait(loaded)
    plgpu.async_copy_scales_to_tmem(smem[2], sa)
    plgpu.async_copy_scales_to_tmem(smem[3], sb)


HALVES = ScaledProduct(k=256, n=256)


@everywhere.tests(check_body, HALVES)
def test_a_part_of_the_scales_scales_a_part_of_k(
    a, b, sa_gmem, sb_gmem, out, a_smem, b_smem, sa_smem, sb_smem, acc, sa, sb,
    loaded, done,
):  # fmt: skip
    smem = a_smem, b_smem, sa_smem, sb_smem
    copy_all(a, b, sa_gmem, sb_gmem, *smem, loaded=loaded, sa=sa, sb=sb)
    for half in (0, 1):
        ks, blocks = plgpu.ds(128 * half, 128), plgpu.ds(4 * half, 4)
        left, right = a_smem.at[:, ks], b_smem.at[:, ks].T
        scales = {"a_scale": sa.at[:, blocks], "b_scale": sb.at[:, blocks]}
        plgpu.tcgen05_mma(acc, left, right, accumulate=half > 0, **scales)
    plgpu.tcgen05_commit_arrive(done)
    plgpu.barrier_wait(done)
    for half in (0, 1):
        part = plgpu.ds(128 * half, 128)
        out[:, part] = plgpu.async_load_tmem(acc.at[:, part])


# --- what is refused ------------------------------------------------------------------

SCALES = TmemLayout.scales()


def attempt(case=KERNELS["mxf8"], copied=None, scratch=None):
    """Traces a product, or of a copy of what `copied` returns."""

    def body(
        a, b, sa_gmem, sb_gmem, out, a_smem, b_smem, sa_smem, acc, sa, sb, done, **_
    ):  # fmt: skip
        right = b_smem.T if case.b_stored else b_smem
        call, args, options = plgpu.tcgen05_mma, (acc, a_smem, right, done), {}
        if copied is not None:
            call, args = plgpu.async_copy_scales_to_tmem, copied(sa_smem, sa)
        else:
            options = {"a_scale": sa, "b_scale": sb}
        call(*args, **options)  # HERE

    jax.eval_shape(case.make(body=body, **(scratch or {})), *case.operands())


def both(source, target):
    return source, target


@refused
def test_scales_are_copied_from_smem():
    attempt(copied=lambda source, target: (target, target))


@refused
def test_the_types_of_a_copy_are_equal():
    attempt(copied=both, scratch={"sa_smem": plgpu.SMEM((1, 1, 32, 16), E4M3)})


@refused
def test_the_shapes_of_a_copy_correspond():
    attempt(copied=both, scratch={"sa_smem": plgpu.SMEM((128, 4), E8M0)})


@refused
def test_copied_scales_have_their_layout():
    attempt(copied=both, scratch={"sa": plgpu.TMEM((128, 4), E8M0, packed=True)})


@refused
def test_a_part_of_the_tiles_is_not_contiguous():
    attempt(
        copied=lambda source, target: (source.at[:, :1], target.at[:, :4]),
        case=ScaledProduct(k=256),
        scratch={
            "sa_smem": plgpu.SMEM((2, 2, 32, 16), E8M0),
            "sa": plgpu.TMEM((256, 8), E8M0, layout=SCALES),
        },
    )


@refused
def test_both_operands_have_scales():
    case = ScaledProduct()

    def body(a, b, sa_gmem, sb_gmem, out, acc, a_smem, b_smem, sa, done, **_):
        plgpu.tcgen05_mma(acc, a_smem, b_smem.T, done, a_scale=sa)  # HERE

    jax.eval_shape(case.make(body=body), *case.operands())


@pytest.mark.parametrize(
    ("case", "scratch"),
    [
        (ScaledProduct(n=384), {"acc": plgpu.TMEM((128, 384), F32)}),
        (ScaledProduct(), {"sb": plgpu.TMEM((256, 4), E8M0, layout=SCALES)}),
        (ScaledProduct(), {"sa": plgpu.TMEM((128, 4), E4M3, layout=SCALES)}),
        (ScaledProduct(block=16), {}),
        (ScaledProduct(scale=E4M3), {}),
        (ScaledProduct(n=64), {"acc": plgpu.TMEM((128, 64), F16, packed=False)}),
        (ScaledProduct(a=jnp.int8, b=jnp.int8), {}),
        (ScaledProduct(), {"sb": plgpu.TMEM((128, 4), E8M0, packed=True)}),
        (ScaledProduct(a=E2M1, b=E2M1, n=256, k=256, b_stored=False), {}),
    ],
    ids=["N", "rows", "two types", "block", "e4m3", "f16", "int8", "layout", "fp4"],
)
@refused
def test_what_no_instruction_multiplies(case, scratch):
    attempt(case, scratch=scratch)


GOOD = {"async_copy_scales_to_tmem": lambda e: {"smem_ref": e.f, "tmem_ref": e.t}}
EFFECTS = {
    "async_copy_scales_to_tmem.collective_axis": (
        "tests/lowering/families/tensor_cores/test_scaled_pairs.py"
    )
}
