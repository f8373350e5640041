# SPDX-License-Identifier: Apache-2.0
"""Modules of Blackwell's tensor core that lack or change one thing are found out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support.lockstep import faults
from tests.support.lockstep.engine import DeadlockError, KernelError
from tests.support.semantics import under
from tests.support.tensor_products import BLACKWELL, F32, Product

CASE = Product(n=16, k=32, b_stored=True, swizzle=64)
OPERANDS = CASE.operands()
NATIVE = plgpu.Layout.TCGEN05_TMEM_NATIVE(2)


def body(a, b, out, a_smem, b_smem, acc, loaded, done, stored):
    """One warpgroup stores an accumulator, another one adds a product to it."""

    @plgpu.when(lax.axis_index("wg") == 0)
    def _():
        ones = plgpu.layout_cast(jnp.ones((128, 16), F32), NATIVE)
        plgpu.async_store_tmem(acc, ones)
        plgpu.commit_tmem()
        plgpu.barrier_arrive(stored)

    @plgpu.when(lax.axis_index("wg") == 1)
    def _():
        plgpu.copy_gmem_to_smem(a, a_smem, loaded)
        plgpu.copy_gmem_to_smem(b, b_smem, loaded)
        plgpu.barrier_wait(loaded)
        plgpu.barrier_wait(stored)
        plgpu.tcgen05_mma(acc, a_smem, b_smem.T, done)
        plgpu.barrier_wait(done)
        out[...] = plgpu.async_load_tmem(acc)


def run(fault=None):
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((128, 16), F32),
        scratch_types={
            **CASE.scratch(),
            "stored": plgpu.Barrier(orders_tensor_core=True),
        },
        compiler_params=BLACKWELL,
        num_threads=2,
        thread_name="wg",
    )
    lane = under(plgpu.LoweringSemantics.Lane, kernel)
    return faults.run(lane, OPERANDS, fault)


def test_without_a_fault_the_kernel_is_right():
    np.testing.assert_array_equal(run(), CASE.expected(*OPERANDS) + 1)


FENCE = "nvvm.tcgen05.fence"
FAULTS = {
    # Of the fences: two in commit_tmem, one before the arrival, one after each wait,
    # two around the barrier before TMEM is freed.
    "the fence after the wait for the stores": (faults.drop(FENCE, 3), "fence"),
    "all fences": (faults.drop(FENCE), "fence"),
    "the fence after the wait for the product": (faults.drop(FENCE, 4), "fence"),
    "the wait for the stores": (
        faults.drop("nvvm.tcgen05.wait", 0),
        "still being written",
    ),
    "the wait for the loads": (faults.drop("nvvm.tcgen05.wait", 1), "still being read"),
    "the deallocation": (faults.drop("nvvm.tcgen05.dealloc"), "has not freed its TMEM"),
    "the allocation": (faults.drop("nvvm.tcgen05.alloc"), "TMEM lanes"),
    "the version of a descriptor": (
        faults.edit_text(r"add\.u64 b, \$2, 0", "add.u64 b, $2, 70368744177664"),
        "bits 46-48",
    ),
    "the columns of the accumulator": (
        faults.edit_text(r"add\.u32 d, \$0, 0", "add.u32 d, $0, 32"),
        "not allocated",
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
    "the shape of the stores": faults.edit_text(r"32x32b\.x16", "16x256b.x4"),
    "b's K step": faults.edit_text(r"add\.u64 b, \$2, 2;", "add.u64 b, $2, 0;"),
    "a's K step": faults.edit_text(r"add\.u64 a, \$1, 2;", "add.u64 a, $1, 0;"),
    "accumulate": faults.edit_text(r"setp\.ne\.b32 first", "setp.eq.b32 first"),
}


@pytest.mark.parametrize("fault", WRONG.values(), ids=WRONG)
def test_what_is_changed_changes_the_result(fault):
    assert (run(fault) != CASE.expected(*OPERANDS) + 1).any()
