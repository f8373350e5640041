# SPDX-License-Identifier: Apache-2.0
"""Modules of sparse products that change one thing are found out."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import pallas_gpu as plgpu
from tests.support.lockstep import faults
from tests.support.lockstep.engine import KernelError
from tests.support.scaled_products import E2M1
from tests.support.semantics import under
from tests.support.sparse_pairs import SparseTile
from tests.support.sparse_products import SparseProduct
from tests.support.tensor_products import E4M3, F32

CASE = SparseProduct(n=16, k=256)
operands = functools.cache(lambda case: case.operands())


def run(fault=None, case=CASE):
    lane = under(plgpu.LoweringSemantics.Lane, case.make())
    return faults.run(lane, operands(case), fault)


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


# Of other groups: 1:2, and two of four pairs with scales of blocks.
TF32 = SparseProduct(a=F32, b=F32, n=16, k=64)
NVF4 = SparseTile(
    SparseProduct(a=E2M1, b=E2M1, n=16, k=256, a_swizzle=64), 1, True, E4M3, 32
)
OTHERS = {
    "tf32: the selector": (TF32, r"add\.u32 i, \$3, 1;", "add.u32 i, $3, 0;"),
    "tf32: the column": (TF32, r"add\.u32 m, \$5, 2;", "add.u32 m, $5, 0;"),
    "tf32: a's K step": (TF32, r"add\.u64 a, \$1, 2;", "add.u64 a, $1, 0;"),
    "nvf4: the column": (NVF4, r"add\.u32 m, \$7, 2;", "add.u32 m, $7, 0;"),
    "nvf4: b's K step": (NVF4, r"add\.u64 b, \$2, 4;", "add.u64 b, $2, 0;"),
    "nvf4: scales of a": (NVF4, r"add\.u32 sa, \$5, 4;", "add.u32 sa, $5, 0;"),
}


@pytest.mark.parametrize(("case", "pattern", "text"), OTHERS.values(), ids=OTHERS)
def test_what_is_changed_in_other_groups_changes_the_result(case, pattern, text):
    wrong = run(faults.edit_text(pattern, text), case)
    assert (wrong != case.expected()).any()
