# SPDX-License-Identifier: Apache-2.0
"""Block-scaled products of pairs of CTAs: everywhere, compiled, and what is refused."""

from __future__ import annotations

import jax
import pytest

import pallas_gpu as plgpu
from pallas_gpu.layouts import TmemLayout
from tests.support import everywhere
from tests.support.refusal import refused
from tests.support.scaled_pairs import ScaledPair
from tests.support.scaled_products import E2M1, E8M0, ScaledProduct
from tests.support.tensor_products import E4M3, F32, check

SCALES = TmemLayout.scales()
MXF8 = ScaledPair(ScaledProduct(n=256, k=256))
MXF4 = ScaledPair(ScaledProduct(a=E2M1, b=E2M1, k=256))
NVF4 = ScaledPair(ScaledProduct(a=E2M1, b=E2M1, k=256, block=16, scale=E4M3))
HALVES = ScaledPair(ScaledProduct(n=64), 64)
KERNELS = {
    "mxf8, 256 columns": MXF8,
    "mxf8, 48 columns, added up": ScaledPair(ScaledProduct(n=48, rounds=2)),
    "mxf4": MXF4,
    "nvf4": NVF4,
    "64 rows": HALVES,
    "64 rows, K of two groups, N of 192": ScaledPair(ScaledProduct(n=192, k=256), 64),
    "64 rows, nvf4": ScaledPair(
        ScaledProduct(n=128, a=E2M1, b=E2M1, k=256, block=16, scale=E4M3, rounds=2), 64
    ),
}


@pytest.mark.parametrize("case", KERNELS.values(), ids=KERNELS)
def test_a_scaled_product_of_a_pair(case):
    check(case)


@pytest.mark.parametrize("asynchrony", ["eager", "late", "random"])
def test_no_schedule_has_a_race(asynchrony):
    case = ScaledPair(ScaledProduct(n=32, rounds=2))
    operands = case.operands()
    params = plgpu.InterpretParams(asynchrony=asynchrony, schedules=6)
    got = case.make(params)(*operands)
    assert (got == case.expected(*operands)).all()


# --- what is refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "scratch"),
    [
        (
            ScaledPair(ScaledProduct(n=48)),
            {"sa": plgpu.TMEM((128, 4), E8M0, layout=TmemLayout.scales())},
        ),
        (ScaledPair(ScaledProduct(n=24, inferred=True)), {}),
        (
            ScaledPair(ScaledProduct(n=64)),
            {"acc": plgpu.TMEM((64, 64), F32, collective=True)},
        ),
    ],
    ids=["allocation", "N", "rows"],
)
@refused
def test_what_a_pair_does_not_multiply(case, scratch):
    jax.eval_shape(case.make(**scratch), *case.operands())


@pytest.mark.parametrize(
    ("n", "scratch"),
    [
        (64, {"sb": plgpu.TMEM((128, 4), E8M0, layout=SCALES, collective=True)}),
        (96, {}),
    ],
    ids=["layout", "N"],
)
@refused
def test_what_a_pair_with_64_rows_in_each_cta_does_not_multiply(n, scratch):
    case = ScaledPair(ScaledProduct(n=n), 64)

    def body(a, b, sa_gmem, sb_gmem, out, a_smem, b_smem, acc, sa, sb, done, **_):
        plgpu.tcgen05_mma(  # HERE
            acc, a_smem, b_smem.T, done, a_scale=sa, b_scale=sb, collective_axis="c"
        )

    declared = {k: v for k, v in case.scratch().items() if k != "sb_smem"}
    options = {"scratch_types": declared | scratch, "cluster": {"c": 2}}
    out = jax.ShapeDtypeStruct((128, n), F32)
    kernel = everywhere.kernel(body, out, target="sm_100a", **options)()
    jax.eval_shape(kernel, *[out] * 4)


@refused
def test_scales_in_halves_are_copied_from_64_rows_of_16_bytes():
    layout = TmemLayout.scales_m64_collective()
    two = plgpu.TMEM((256, 8), E8M0, layout=layout, collective=True)
    jax.eval_shape(HALVES.make(sb=two), *HALVES.operands())
