# SPDX-License-Identifier: Apache-2.0
"""Kernels whose emitted module lacks or changes one thing are found out."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from demo.kernels import shifted_exp_job
from pallas_gpu.errors import PtxError
from pallas_gpu.lockstep.engine import DeadlockError
from pallas_gpu.ops.gemm.matmul import MatmulConfig, matmul
from tests.support.lockstep import faults

COPIED = shifted_exp_job(64)
TILES = MatmulConfig(
    tile_m=64, tile_n=64, tile_k=64, stages=2, blocks=2, cluster=None, strip=1
)
RNG = np.random.default_rng(0)
A = RNG.integers(-4, 5, (256, 192)).astype(np.float16)
B = RNG.integers(-4, 5, (192, 128)).astype(np.float16)


def copied(fault=None):
    return faults.run(COPIED.function, COPIED.arguments, fault)


def product(fault=None, cluster=None):
    config = dataclasses.replace(TILES, cluster=cluster)
    return faults.run(functools.partial(matmul, config=config), [A, B], fault)


def test_without_a_fault_the_kernels_are_right():
    assert COPIED.error(copied()) <= COPIED.tolerance
    np.testing.assert_array_equal(product(), A @ B)


# What threads, copies and products have to wait for, and what it looks like if not.
LOST_IN_A_COPY = {
    "the wait for a copy": (
        faults.drop("nvvm.mbarrier.try_wait.parity"),
        "loaded while an asynchronous operation still writes them",
    ),
    "the fence before a store's copy": (
        faults.drop("nvvm.fence.proxy"),
        "without fence.proxy.async",
    ),
    "the wait for a store's copy": (
        faults.drop("nvvm.cp.async.bulk.wait_group"),
        "ends while asynchronous operations use its SMEM",
    ),
    "the commit of a store's copy": (
        faults.drop("nvvm.cp.async.bulk.commit.group"),
        "ends while asynchronous operations use its SMEM",
    ),
    "all meetings of threads": (faults.drop("nvvm.barrier"), "is known"),
    "the initialisation of an mbarrier": (
        faults.drop("nvvm.mbarrier.init"),
        "no mbarrier is initialised",
    ),
}


@pytest.mark.parametrize("lost", LOST_IN_A_COPY)
def test_a_lost_operation_of_a_copy_is_found(lost):
    fault, text = LOST_IN_A_COPY[lost]
    with pytest.raises(PtxError, match=text):
        copied(fault)


LOST_IN_A_PRODUCT = {
    "wait_group": (
        faults.drop("nvvm.wgmma.wait.group.sync.aligned"),
        "used before wgmma.wait_group|asynchronous operation still reads",
    ),
    "fence": (
        faults.edit_text(r"wgmma\.fence\.sync\.aligned;", ""),
        "without wgmma.fence",
    ),
    "commit_group": (
        faults.edit_text(r"wgmma\.commit_group\.sync\.aligned;", ""),
        "used before wgmma.wait_group|asynchronous operation still reads",
    ),
}


@pytest.mark.parametrize("lost", LOST_IN_A_PRODUCT)
def test_a_lost_instruction_of_wgmma_is_found(lost):
    fault, text = LOST_IN_A_PRODUCT[lost]
    with pytest.raises(PtxError, match=text):
        product(fault)


def test_a_deadlock_says_who_waits_for_what():
    with pytest.raises(DeadlockError) as info:
        product(faults.drop_text("mbarrier.arrive"))
    text = str(info.value)
    # The consumers wait for what the producer brings, the producer for free stages.
    assert "CTA 0 warps 0-3 waits for parity" in text
    assert "CTA 0 warps 8-11 waits for parity" in text
    assert "2 of 2 arrivals and 0 bytes missing" in text


@pytest.mark.parametrize("change", [lambda n: n - 16, lambda n: n + 16])
def test_another_number_of_bytes_never_completes_the_phase(change):
    fault = faults.edit_operand("mbarrier.arrive.expect_tx", 1, change)
    with pytest.raises(DeadlockError, match=r"-?16 bytes missing"):
        copied(fault)


def test_a_tensor_map_without_the_swizzle_brings_other_numbers():
    # Of the load alone: a store without it would put everything right.
    fault = faults.edit_operand("func.call", 6, lambda _: 16, 0)
    assert not COPIED.error(copied(fault)) <= COPIED.tolerance


def test_a_tensor_map_that_the_driver_refuses_is_found():
    fault = faults.edit_operand("func.call", 6, lambda _: 32)
    with pytest.raises(PtxError, match="cuTensorMapEncodeTiled refuses"):
        copied(fault)


def test_another_step_of_a_descriptor_multiplies_other_numbers():
    fault = faults.edit_text(r"add\.s64 da, (\$\d+), 2;", r"add.s64 da, \1, 4;")
    assert (product(fault) != A @ B).any()


def test_another_transposition_multiplies_other_numbers():
    fault = faults.edit_text(r"one, 1, 1, 0, 1;", "one, 1, 1, 0, 0;")
    try:
        result = product(fault)
    except PtxError:
        return
    assert (result != A @ B).any()


# --- clusters -------------------------------------------------------------------------

LOST_IN_A_CLUSTER = {
    "the fence of initialisations": (
        faults.drop("nvvm.fence.mbarrier.init"),
        "before its mbarrier.init is known",
    ),
    "the cluster's first wait": (
        faults.drop("nvvm.cluster.wait", 0),
        "before its mbarrier.init is known|arrives twice",
    ),
    "the other blocks' arrivals": (faults.drop_text("shared::cluster"), "deadlock"),
}


@pytest.mark.parametrize("lost", LOST_IN_A_CLUSTER)
def test_a_lost_operation_of_a_cluster_is_found(lost):
    fault, text = LOST_IN_A_CLUSTER[lost]
    np.testing.assert_array_equal(product(cluster="m"), A @ B)
    with pytest.raises(PtxError, match=text):
        product(fault, cluster="m")
