# SPDX-License-Identifier: Apache-2.0
"""Modules of block-scaled products that change one thing are found out."""

from __future__ import annotations

import numpy as np
import pytest

import pallas_gpu as plgpu
from tests.support.lockstep import faults
from tests.support.lockstep.engine import KernelError
from tests.support.scaled_products import ScaledProduct
from tests.support.semantics import under

CASE = ScaledProduct(n=136, k=256)
OPERANDS = CASE.operands()


def run(fault=None):
    lane = under(plgpu.LoweringSemantics.Lane, CASE.make())
    return faults.run(lane, OPERANDS, fault)


def test_without_a_fault_the_kernel_is_right():
    np.testing.assert_array_equal(run(), CASE.expected(*OPERANDS))


FAULTS = {
    "the multicast": (
        faults.edit_text(r"32x128b\.warpx4", "128x128b"),
        "out of bounds of the SMEM",
    ),
    "a scale id of 2X": (
        faults.edit_text("kind::mxf8f6f4", "kind::mxf4"),
        "no such scale_vec::1X",
    ),
    "the type of the scales": (
        faults.edit_text(r"add\.u32 i, \$3, 0", "add.u32 i, $3, 8388608"),
        "no such scale_vec::1X",
    ),
    "the columns of the scales": (
        faults.edit_text(r"add\.u32 sa, \$5, 4", "add.u32 sa, $5, 300"),
        "not allocated",
    ),
    "the columns of the copies": (
        faults.edit_text(r"add\.u32 d, \$0, 12", "add.u32 d, $0, 300"),
        "not allocated",
    ),
    "the lane of the scales": (
        faults.edit_text(r"add\.u32 sb, \$6, 0", "add.u32 sb, $6, 2097152"),
        "scales from lane 32 on",
    ),
    "the lane of the copies": (
        faults.edit_text(r"add\.u32 d, \$0, 12", "add.u32 d, $0, 2097152"),
        "tcgen05.cp to lane 32",
    ),
}


@pytest.mark.parametrize(("fault", "text"), FAULTS.values(), ids=FAULTS)
def test_what_is_missing_is_reported(fault, text):
    with pytest.raises(KernelError, match=text):
        run(fault)


WRONG = {
    "the id of a's scales": (rf"add\.u32 i, \$3, {1 << 29 | 1 << 4};", 1 << 4),
    "the id of b's scales": (rf"add\.u32 i, \$3, {1 << 29 | 1 << 4};", 1 << 29),
}


@pytest.mark.parametrize(("pattern", "ids"), WRONG.values(), ids=WRONG)
def test_the_ids_choose_the_scales(pattern, ids):
    changed = run(faults.edit_text(pattern, f"add.u32 i, $3, {ids};"))
    assert (changed != CASE.expected(*OPERANDS)).any()


@pytest.mark.parametrize("which", [0, 1])
def test_a_missing_copy_changes_the_result(which):
    found = run(faults.drop_text(r"tcgen05\.cp", which))
    assert (found != CASE.expected(*OPERANDS)).any()


@pytest.mark.parametrize("operand", ["sa, $5", "sb, $6"])
def test_the_columns_choose_the_scales(operand):
    step = 4 if "5" in operand else 8
    text = operand.replace("$", r"\$")
    changed = run(
        faults.edit_text(rf"add\.u32 {text}, {step};", f"add.u32 {operand}, 0;")
    )
    assert (changed != CASE.expected(*OPERANDS)).any()


@pytest.mark.parametrize("tile", [4, 8])
def test_each_tile_of_scales_has_its_place(tile):
    other = 12 - tile
    fault = faults.edit_text(
        rf"add\.u32 d, \$0, {tile};(?= tcgen05\.cp)", f"add.u32 d, $0, {other};"
    )
    assert (run(fault) != CASE.expected(*OPERANDS)).any()
