# SPDX-License-Identifier: Apache-2.0
"""Copies to TMEM in the emulator: what is in order, and what a missing wait gives.

The kernel is right without a mistake, and each mistake is one line that it lacks.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.refusal import refused
from tests.support.scaled_products import E8M0, ScaledProduct
from tests.support.sparse_products import SparseProduct
from tests.support.tensor_products import start_copies

SEEDS = range(4)
CASE = ScaledProduct(n=8)


def run(mistake, seed):
    """Two products; the scales of the second, stored by threads, are twice as large."""

    def body(
        a, b, sa_gmem, sb_gmem, out, a_smem, b_smem, sa_smem, sb_smem, acc, sa, sb,
        loaded, done,
    ):  # fmt: skip
        pairs = (a, a_smem), (b, b_smem), (sa_gmem, sa_smem), (sb_gmem, sb_smem)
        start_copies(loaded, *pairs)
        if mistake != "loaded":
            plgpu.barrier_wait(loaded)
        plgpu.async_copy_scales_to_tmem(sa_smem, sa)
        if mistake != "copy":
            plgpu.async_copy_scales_to_tmem(sb_smem, sb)
        scales = {"a_scale": sa, "b_scale": sb}
        plgpu.tcgen05_mma(acc, a_smem, b_smem.T, done, accumulate=False, **scales)
        if mistake != "wait":
            plgpu.barrier_wait(done)
        sa_smem[...] = jnp.full(sa_smem.shape, 1, jnp.float32).astype(E8M0)
        if mistake != "commit_smem":
            plgpu.commit_smem()
        # In order after the product, and before the next, without a wait.
        plgpu.async_copy_scales_to_tmem(sa_smem, sa)
        plgpu.tcgen05_mma(acc, a_smem, b_smem.T, done, **scales)
        plgpu.barrier_wait(done)
        out[...] = plgpu.async_load_tmem(acc)

    a, b, sa, sb = CASE.operands()
    got = CASE.make(plgpu.InterpretParams(seed=seed), body)(a, b, sa, sb)
    ones = np.ones_like(sa)
    expected = CASE.expected(a, b, sa, sb) + CASE.expected(a, b, ones, sb)
    np.testing.assert_array_equal(np.asarray(got), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_copy_is_in_order_with_products(seed):
    run(None, seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mistake", ["loaded", "copy", "wait", "commit_smem"])
@refused
def test_a_missing_line_is_reported_in_every_run(mistake, seed):
    run(mistake, seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ordered", [True, False])
def test_another_warpgroup_needs_a_fence_after_the_copy(ordered, seed):
    def body(
        a, b, sa_gmem, sb_gmem, out, a_smem, b_smem, sa_smem, sb_smem, acc, sa, sb,
        loaded, done, copied, plain,
    ):  # fmt: skip
        @plgpu.when(lax.axis_index("wg") == 0)
        def _():
            pairs = (a, a_smem), (b, b_smem), (sa_gmem, sa_smem), (sb_gmem, sb_smem)
            start_copies(loaded, *pairs)
            plgpu.barrier_wait(loaded)
            plgpu.async_copy_scales_to_tmem(sa_smem, sa)
            plgpu.async_copy_scales_to_tmem(sb_smem, sb)
            plgpu.barrier_arrive(copied if ordered else plain)

        @plgpu.when(lax.axis_index("wg") == 1)
        def _():
            plgpu.barrier_wait(copied if ordered else plain)
            scales = {"a_scale": sa, "b_scale": sb}
            plgpu.tcgen05_mma(acc, a_smem, b_smem.T, done, accumulate=False, **scales)
            plgpu.barrier_wait(done)
            out[...] = plgpu.async_load_tmem(acc)

    kernel = CASE.make(
        plgpu.InterpretParams(seed=seed),
        body,
        copied=plgpu.Barrier(orders_tensor_core=True),
        plain=plgpu.Barrier(),
        num_threads=2,
        thread_name="wg",
    )
    operands = CASE.operands()
    if not ordered:
        with pytest.raises(errors.RaceError, match="async_copy_scales_to_tmem"):
            kernel(*operands)
        return
    np.testing.assert_array_equal(kernel(*operands), CASE.expected(*operands))


# --- metadata -------------------------------------------------------------------------

SPARSE = SparseProduct(n=16)


def multiply_sparse(seed, metadata=None, mistake=None):
    def body(a, b, meta, out, a_smem, b_smem, m_smem, acc, metadata, loaded, done):
        start_copies(loaded, (a, a_smem), (b, b_smem), (meta, m_smem))
        plgpu.barrier_wait(loaded)
        if mistake != "copy":
            plgpu.async_copy_sparse_metadata_to_tmem(m_smem, metadata)
        if mistake == "overwrite":
            plgpu.copy_gmem_to_smem(meta, m_smem, loaded)
        plgpu.tcgen05_mma(
            acc, a_smem, b_smem.T, done, a_sparse_metadata=metadata, accumulate=False
        )
        plgpu.barrier_wait(done)
        out[...] = plgpu.async_load_tmem(acc)

    stored, b, meta = SPARSE.operands()
    kernel = SPARSE.make(plgpu.InterpretParams(seed=seed), body)
    return np.asarray(kernel(stored, b, meta if metadata is None else metadata))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_copy_of_metadata_is_in_order_with_products(seed):
    np.testing.assert_array_equal(multiply_sparse(seed), SPARSE.expected())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mistake", ["copy", "overwrite"])
@refused
def test_a_mistake_with_metadata_is_reported_in_every_run(mistake, seed):
    multiply_sparse(seed, mistake=mistake)


@refused
def test_metadata_that_does_not_ascend_is_reported():
    a, _ = SPARSE.dense()
    _, meta = plgpu.compress_2_of_4(a)
    reversed_ = plgpu.format_tcgen05_sparse_metadata(meta[..., ::-1], a.dtype)
    multiply_sparse(0, reversed_)
