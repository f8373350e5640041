# SPDX-License-Identifier: Apache-2.0
"""Pairs of CTAs in the emulator: memory that one of them frees, and who issues.

What a missing wait, fence or arrival is reported as is in
tests/support/mutations/tensor_cores/pair_product.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support import everywhere
from tests.support.refusal import in_each, refused_by
from tests.support.tensor_pairs import PAIR, PairProduct
from tests.support.tensor_products import F16, storage

SEEDS = range(4)
CASE = PairProduct(n=16, k=32, swizzle=64, tracked=False)


def run(body, seed=0, scratch=None):
    """The result of a kernel over the operands of `CASE`."""
    options = {"scratch_types": scratch or CASE.scratch(), "target": "sm_100a", **PAIR}
    operands = CASE.operands()
    out = CASE.expected(*operands)
    return everywhere.emulate(body, operands, out, seed=seed, **options)


def multiply(a_smem, b_smem, acc, done):
    options = {"accumulate": False, "collective_axis": "c"}
    plgpu.tcgen05_mma(acc, a_smem, b_smem.T, done, **options)


def store(out, acc):
    out[plgpu.ds(lax.axis_index("c") * CASE.m, CASE.m)] = acc[...]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("waits", [True, False])
def test_operands_of_both_live_until_the_product_is_complete(waits, seed):
    """The CTA that does not issue leaves the scope of its operands."""
    kept = ("acc", "loaded", "ready", "done")
    scratch = {name: CASE.scratch()[name] for name in kept}

    def body(a, b, out, acc, loaded, ready, done):
        leads = lax.axis_index("c") == 0

        def scope(a_smem, b_smem):
            CASE.load(a, b, a_smem, b_smem, loaded, ready)
            plgpu.barrier_arrive(ready)
            plgpu.barrier_wait(ready)
            multiply(a_smem, b_smem, acc, done)
            if waits:
                plgpu.barrier_wait(done)
            else:
                plgpu.when(leads)(lambda: plgpu.barrier_wait(done))

        declared = CASE.scratch()
        plgpu.run_scoped(scope, a_smem=declared["a_smem"], b_smem=declared["b_smem"])
        if not waits:
            plgpu.when(~leads)(lambda: plgpu.barrier_wait(done))
        store(out, acc)

    if waits:
        expected = CASE.expected(*CASE.operands())
        np.testing.assert_array_equal(run(body, seed, scratch), expected)
        return
    with pytest.raises(
        errors.KernelError, match=r"is freed while the tcgen05_mma|has left the scope"
    ):
        # In some orders the product is complete before that CTA leaves the scope.
        for each in range(seed, seed + 4):
            run(body, each, scratch)


@refused_by(in_each(run, seed=SEEDS))
def test_the_other_cta_does_not_end_before_its_loads_are_known_to_be_used(
    a, b, out, a_smem, b_smem, acc, loaded, ready, done
):
    tracked = PairProduct(n=16, k=32, swizzle=64)
    tracked.load(a, b, a_smem, b_smem, loaded, ready)
    multiply(a_smem, b_smem, acc, done)

    @plgpu.when(lax.axis_index("c") == 0)
    def _():
        plgpu.barrier_wait(done)
        store(out, acc)


@refused_by(in_each(run, seed=SEEDS))
def test_the_leader_needs_the_loads_of_the_other_cta(
    a, b, out, a_smem, b_smem, acc, loaded, ready, done
):
    """Each CTA waits for its own loads, and the leader does not ask for the others."""
    CASE.load(a, b, a_smem, b_smem, loaded, ready)
    multiply(a_smem, b_smem, acc, done)
    plgpu.barrier_wait(done)
    store(out, acc)


def test_what_the_other_cta_passes_has_no_effect():
    """It may call with other operands, or not at all."""

    def body(a, b, out, a_smem, b_smem, acc, loaded, ready, done, other):
        CASE.load(a, b, a_smem, b_smem, loaded, ready)
        plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(ready)

        leads = lax.axis_index("c") == 0
        plgpu.when(leads)(lambda: multiply(a_smem, b_smem, acc, done))
        plgpu.when(~leads)(lambda: multiply(other, b_smem, acc, done))
        plgpu.barrier_wait(done)
        store(out, acc)

    other = plgpu.SMEM((CASE.m, CASE.k), F16, transforms=storage(F16, CASE.swizzle))
    result = run(body, 0, {**CASE.scratch(), "other": other})
    np.testing.assert_array_equal(result, CASE.expected(*CASE.operands()))
