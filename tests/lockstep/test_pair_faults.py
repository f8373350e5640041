# SPDX-License-Identifier: Apache-2.0
"""Modules of pairs of CTAs that lack or change one thing are found out."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

import pallas_gpu as plgpu
from pallas_gpu.mosaic import module
from pallas_gpu.mosaic.tensor_cores import pairs
from tests.support.lockstep import faults
from tests.support.lockstep.engine import DeadlockError, KernelError
from tests.support.semantics import under
from tests.support.tensor_pairs import PAIR, PairProduct
from tests.support.tensor_products import BLACKWELL, F32

CASES = {
    "256 rows": PairProduct(n=32, k=32, swizzle=64, tracked=False),
    "128 rows": PairProduct(m=64, n=32, k=32, swizzle=64, tracked=False),
}
CASE = CASES["256 rows"]


def run(fault=None, case=CASE):
    lane = under(plgpu.LoweringSemantics.Lane, case.make())
    return faults.run(lane, case.operands(), fault)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_without_a_fault_the_kernel_is_right(case):
    np.testing.assert_array_equal(run(case=case), case.expected(*case.operands()))


FENCE = "nvvm.tcgen05.fence"


def of_one_cta(name):
    """An operation has cta_group::1."""

    def fault(found: ir.Module) -> None:
        for op in faults._operations(found, name):
            op.attributes["group"] = ir.Attribute.parse("#nvvm.cta_group<cta_1>")

    return fault


FAULTS = {
    "the fence after the wait for the product": (faults.drop(FENCE, 0), "fence"),
    "the group of the products": (
        faults.edit_text("cta_group::2", "cta_group::1"),
        "no tcgen05.mma is",
    ),
    "the group of the commit": (of_one_cta("nvvm.tcgen05.commit"), "after ::2"),
    "the group of the allocation": (of_one_cta("nvvm.tcgen05.alloc"), "after ::1"),
    "the deallocation": (faults.drop("nvvm.tcgen05.dealloc"), "has not freed its TMEM"),
    "the barrier before the deallocation": (
        lambda found: [
            faults.drop(f"nvvm.cluster.{x}", -1)(found) for x in ("arrive", "wait")
        ],
        "TMEM",
    ),
    "the wait of the leader for the other": (
        faults.drop_text(r"mbarrier\.try_wait\.parity\.acquire\.cluster"),
        "SMEM",
    ),
}


@pytest.mark.parametrize(("fault", "text"), FAULTS.values(), ids=FAULTS)
def test_what_is_missing_is_reported(fault, text):
    with pytest.raises(KernelError, match=text):
        run(fault)


def test_a_missing_commit_is_a_deadlock():
    with pytest.raises(DeadlockError):
        run(faults.drop("nvvm.tcgen05.commit"))


WRONG = {
    "a's K step": faults.edit_text(r"add\.u64 a, \$1, 2;", "add.u64 a, $1, 0;"),
    "b's K step": faults.edit_text(r"add\.u64 b, \$2, 2;", "add.u64 b, $2, 0;"),
}


@pytest.mark.parametrize("fault", WRONG.values(), ids=WRONG)
def test_what_is_changed_changes_the_result(fault):
    assert (run(fault) != CASE.expected(*CASE.operands())).any()


# --- mutants of the emitters ----------------------------------------------------------


def test_the_other_cta_must_not_issue(monkeypatch):
    monkeypatch.setattr(pairs, "issuer", lambda _: module.current().elected)
    with pytest.raises(KernelError, match=r"still being written|more arrivals"):
        run()


@pytest.mark.parametrize("mask", [0b01, 0b10])
def test_a_commit_to_one_cta_leaves_the_other_waiting(mask, monkeypatch):
    def of_one():
        return arith.constant(ir.IntegerType.get_signless(16), mask)

    monkeypatch.setattr(pairs, "mask", of_one)
    with pytest.raises(DeadlockError):
        run()


def test_a_commit_to_no_cta_of_the_cluster_is_reported(monkeypatch):
    def too_many():
        return arith.constant(ir.IntegerType.get_signless(16), 0b110)

    monkeypatch.setattr(pairs, "mask", too_many)
    with pytest.raises(KernelError, match="to no CTA of the cluster"):
        run()


def test_loads_of_the_other_cta_are_finished_when_tmem_is_freed():
    """The barrier of the cluster alone does not order tcgen05 instructions."""
    with pytest.raises(KernelError, match="TMEM"):
        run(faults.drop("nvvm.tcgen05.wait"))


def test_pairs_of_a_cluster_are_of_adjacent_ranks(monkeypatch):
    """The leaders of a cluster of two pairs have the ranks 0 and 2."""
    case = PairProduct(m=64, n=32, k=32, swizzle=64)

    def body(a, b, out, a_smem, b_smem, acc, loaded, ready, done):
        p, c = lax.axis_index("p"), lax.axis_index("c")
        case.load(a, b, a_smem, b_smem, loaded, ready)
        plgpu.tcgen05_mma(
            acc, a_smem, b_smem.T, done, accumulate=False, collective_axis="c"
        )
        plgpu.barrier_wait(done)
        out[p, plgpu.ds(c * case.m, case.m)] = acc[...]

    def run_pairs():
        kernel = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((2, 2 * case.m, case.n), F32),
            scratch_types=case.scratch(),
            compiler_params=BLACKWELL,
            **{**PAIR, "cluster": (2, 2), "cluster_names": ("p", "c")},
        )
        return faults.run(under(plgpu.LoweringSemantics.Lane, kernel), case.operands())

    np.testing.assert_array_equal(
        run_pairs(), np.stack([case.expected(*case.operands())] * 2)
    )
    monkeypatch.setattr(pairs, "_ctas", lambda: 2)
    with pytest.raises((DeadlockError, KernelError)):
        run_pairs()
