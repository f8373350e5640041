# SPDX-License-Identifier: Apache-2.0
"""Block-scaled products of pairs of CTAs: everywhere, compiled, and what is refused."""

from __future__ import annotations

import re

import jax
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors
from pallas_gpu.layouts import TmemLayout
from pallas_gpu.layouts.tmem.scaled_instruction import ScaledInstruction
from tests.support.refusal import refused
from tests.support.scaled_pairs import ScaledPair
from tests.support.scaled_products import E2M1, E8M0, ScaledProduct
from tests.support.semantics import BOTH, under
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


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
@pytest.mark.parametrize(
    ("case", "opcode", "ids"),
    [
        (MXF8, "mxf8f6f4.block_scale.scale_vec::1X", [0, 1, 2, 3] * 2),
        (MXF4, "mxf4nvf4.block_scale.scale_vec::2X", [0, 2] * 2),
        (NVF4, "mxf4nvf4.block_scale.scale_vec::4X", [0] * 4),
        (HALVES, "mxf8f6f4.block_scale.scale_vec::1X", [0, 1, 2, 3]),
    ],
    ids=["mxf8", "mxf4", "nvf4", "64 rows"],
)
def test_the_leader_copies_scales_and_multiplies(case, opcode, ids, semantics):
    kernel = under(semantics, case.make())
    (report,) = plgpu.offline.compile(kernel, *case.operands(), target="sm_100a")
    assert report.resources.spill_store_bytes == 0
    found = re.findall(r"tcgen05\.mma\.cta_group::(\d)\.kind::([\w.:]+)", report.ptx)
    assert found == [("2", opcode)] * len(ids)
    copies = re.findall(r"tcgen05\.cp\.cta_group::(\d)\.\w+\.warpx\d", report.ptx)
    # The scales of a are in two CTAs, to which one instruction copies.
    _, _, a_scale, b_scale = case.operands()
    tiles = a_scale.shape[1] + b_scale.shape[0] * b_scale.shape[1]
    assert copies == ["2"] * tiles
    bits = re.findall(r"add\.u32 i, %r\d+, (\d+);", report.ptx)
    assert [int(x) for x in bits] == [i << 4 | i << 29 for i in ids]


def test_the_descriptor_has_the_rows_of_both():
    one = ScaledInstruction(256, "e4m3", "e4m3", "ue8m0", 32)
    both = ScaledInstruction(256, "e4m3", "e4m3", "ue8m0", 32, ctas=2)
    # PTX ISA, "Instruction descriptor": bits 27-28 are M >> 7.
    assert (one.descriptor >> 27 & 3, both.descriptor >> 27 & 3) == (1, 2)
    assert one.descriptor ^ both.descriptor == 3 << 27


@pytest.mark.parametrize(
    ("n", "types", "block", "word"),
    [
        (256, ("e4m3", "e4m3", "ue8m0"), 32, 0x10C00000),
        (256, ("e2m1", "e2m1", "ue4m3"), 16, 0x10400480),
        (128, ("e2m1", "e2m1", "ue8m0"), 32, 0x10A00480),
    ],
)
def test_descriptors_are_those_of_upstreams_kernels(n, types, block, word):
    assert ScaledInstruction(n, *types, block, ctas=2).descriptor == word


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
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((128, n), F32),
        scratch_types={**declared, **scratch},
        compiler_params=plgpu.CompilerParams(target="sm_100a"),
        cluster=(2,),
        cluster_names=("c",),
    )
    jax.eval_shape(kernel, *[jax.ShapeDtypeStruct((8, 128), F32)] * 4)


def test_scales_in_halves_are_copied_from_64_rows_of_16_bytes():
    case = ScaledPair(ScaledProduct(n=64), 64)
    layout = TmemLayout.scales_m64_collective()
    two = plgpu.TMEM((256, 8), E8M0, layout=layout, collective=True)
    with pytest.raises(errors.ShapeError, match=r"smem \(1, scales / 4, 64, 16\)"):
        jax.eval_shape(case.make(sb=two), *case.operands())
