# SPDX-License-Identifier: Apache-2.0
"""Modules of sparse products that change one thing are found out."""

from __future__ import annotations

import numpy as np
import pytest

import pallas_gpu as plgpu
from tests.support.lockstep import faults
from tests.support.lockstep.engine import KernelError
from tests.support.semantics import under
from tests.support.sparse_products import SparseProduct

CASE = SparseProduct(n=16, k=256)
OPERANDS = CASE.operands()


def run(fault=None):
    lane = under(plgpu.LoweringSemantics.Lane, CASE.make())
    return faults.run(lane, OPERANDS, fault)


def test_without_a_fault_the_kernel_is_right():
    np.testing.assert_array_equal(run(), CASE.expected())


FAULTS = {
    "the copies": (faults.drop_text(r"tcgen05\.cp"), "does not define"),
    "the place of a copy": (
        faults.edit_text(r"add\.u32 d, \$0, 4;(?= tcgen05\.cp)", "add.u32 d, $0, 200;"),
        "not allocated",
    ),
    "the mnemonic": (faults.edit_text(r"mma\.sp", "mma"), "sparsity of"),
    "an odd column": (
        faults.edit_text(r"add\.u32 m, \$5, 2;", "add.u32 m, $5, 1;"),
        "column",
    ),
    "the columns": (
        faults.edit_text(r"add\.u32 m, \$5, 2;", "add.u32 m, $5, 64;"),
        "not allocated",
    ),
}


@pytest.mark.parametrize(("fault", "text"), FAULTS.values(), ids=FAULTS)
def test_what_is_missing_is_reported(fault, text):
    with pytest.raises(KernelError, match=text):
        run(fault)


WRONG = {
    "the selector": faults.edit_text(r"add\.u32 i, \$3, 1;", "add.u32 i, $3, 0;"),
    "the column": faults.edit_text(r"add\.u32 m, \$5, 2;", "add.u32 m, $5, 0;"),
    "a's K step": faults.edit_text(r"add\.u64 a, \$1, 2;", "add.u64 a, $1, 0;"),
    "b's K step": faults.edit_text(r"add\.u64 b, \$2, 4;", "add.u64 b, $2, 2;"),
    "the source of a copy": faults.edit_text(
        r"add\.u64 s, \$1, 128;", "add.u64 s, $1, 0;"
    ),
}


@pytest.mark.parametrize("fault", WRONG.values(), ids=WRONG)
def test_what_is_changed_changes_the_result(fault):
    assert (run(fault) != CASE.expected()).any()
