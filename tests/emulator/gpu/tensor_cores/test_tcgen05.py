# SPDX-License-Identifier: Apache-2.0
"""tcgen05 in the emulator: what is in flight, and what a commit releases.

What a missing wait, commit or arrival is reported as is in
tests/support/mutations/tensor_cores/tensor_core.py.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.refusal import in_each, refused_by
from tests.support.tensor_products import F16, F32, Product, start_copies

SEEDS = range(4)
CASE = Product(n=16, k=32, b_stored=True, swizzle=64)


def run(body, seed=0, scratch=None, **options):
    """The result of a kernel over the operands of `CASE`."""
    params = plgpu.InterpretParams(seed=seed)
    return CASE.make(params, body, **(scratch or {}), **options)(*CASE.operands())


def load_operands(a, b, a_smem, b_smem, loaded):
    start_copies(loaded, (a, a_smem), (b, b_smem))
    plgpu.barrier_wait(loaded)


@pytest.mark.parametrize("seed", SEEDS)
def test_products_read_in_between(seed):
    """Two products into one accumulator, read in between, over new operands."""

    def body(a, b, out, a_smem, b_smem, acc, loaded, done):
        load_operands(a, b, a_smem, b_smem, loaded)
        plgpu.tcgen05_mma(acc, a_smem, b_smem.T, done, accumulate=False)
        plgpu.barrier_wait(done)
        first = plgpu.async_load_tmem(acc)
        plgpu.wait_load_tmem()
        a_smem[...] = jnp.zeros(a_smem.shape, F16)
        plgpu.commit_smem()
        plgpu.tcgen05_mma(acc, a_smem, b_smem.T, done)
        plgpu.barrier_wait(done)
        out[...] = first + acc[...]

    expected = 2 * CASE.expected(*CASE.operands())
    np.testing.assert_array_equal(run(body, seed), expected)


@refused_by(in_each(run, seed=SEEDS))
def test_accumulators_that_share_columns_are_not_in_order(
    a, b, out, a_smem, b_smem, acc, loaded, done
):
    load_operands(a, b, a_smem, b_smem, loaded)
    part = plgpu.ds(8, 8)
    plgpu.tcgen05_mma(acc, a_smem, b_smem.T, accumulate=False)
    plgpu.tcgen05_mma(acc.at[:, part], a_smem, b_smem.at[part].T, done)
    plgpu.barrier_wait(done)
    out[...] = acc[...]


@refused_by(in_each(run, seed=SEEDS))
def test_a_kernel_may_not_end_while_a_product_is_in_flight(
    a, b, out, a_smem, b_smem, acc, loaded, done
):
    load_operands(a, b, a_smem, b_smem, loaded)
    plgpu.tcgen05_mma(acc, a_smem, b_smem.T, done, accumulate=False)
    out[...] = jnp.zeros((128, 16), F32)


ROUNDS = 4


def roles(mistake=None):
    """A warp copies, another multiplies: only commits tell the former of the latter."""

    def body(a, b, out, a_smem, b_smem, acc, loaded, done, free, note):
        @plgpu.when(lax.axis_index("wg") == 0)
        def _():
            @plgpu.warp_map
            def _(warp):
                @plgpu.when(warp == 0)
                def _():
                    @plgpu.loop(0, ROUNDS)
                    def _(i):
                        @plgpu.when((i > 0) & (mistake != "free"))
                        def _():
                            plgpu.barrier_wait(free)

                        plgpu.copy_gmem_to_smem(a, a_smem, loaded)
                        plgpu.copy_gmem_to_smem(b, b_smem, loaded)

                @plgpu.when(warp == 1)
                def _():
                    if mistake == "note":
                        note[0] = 1.0

                    @plgpu.loop(0, ROUNDS)
                    def _(i):
                        plgpu.barrier_wait(loaded)
                        plgpu.tcgen05_mma(acc, a_smem, b_smem.T, free, accumulate=i > 0)

                    plgpu.tcgen05_commit_arrive(done)

        @plgpu.when(lax.axis_index("wg") == 1)
        def _():
            plgpu.barrier_wait(done)
            out[...] = acc[...]
            if mistake == "note":
                out[0, 0] = note[0]

    scratch = {
        "free": plgpu.Barrier(orders_tensor_core=True),
        "note": plgpu.SMEM((128,), F32),
    }
    options = {"num_threads": 2, "thread_name": "wg", "scratch": scratch}
    return lambda seed: run(body, seed, **options)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_commit_releases_the_copies_that_the_products_follow(seed):
    expected = ROUNDS * CASE.expected(*CASE.operands())
    np.testing.assert_array_equal(roles()(seed), expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        ("free", "is written|can miss its phase|wait missed"),
        # A commit says nothing of what its issuer has stored.
        ("note", "note"),
    ],
)
def test_what_a_commit_does_not_release_is_a_race(mistake, text, seed):
    with pytest.raises(errors.PallasGpuError, match=text):
        roles(mistake)(seed)
