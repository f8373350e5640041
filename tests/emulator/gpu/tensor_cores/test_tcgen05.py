# SPDX-License-Identifier: Apache-2.0
"""tcgen05 in the emulator: what is in flight, and what a missing wait is reported as.

Each kernel is right without a mistake, and each mistake is one line that it lacks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.refusal import refused
from tests.support.tensor_products import BLACKWELL, F16, F32, Product

SEEDS = range(4)
CASE = Product(n=16, k=32, b_stored=True, swizzle=64)


def run(body, seed=0, scratch=None, out=(128, 16), **options):
    """The result of a kernel over the operands of `CASE`."""
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(out, F32),
        scratch_types={**CASE.scratch(), **(scratch or {})},
        compiler_params=BLACKWELL,
        interpret=plgpu.InterpretParams(seed=seed),
        **options,
    )
    return np.asarray(kernel(*CASE.operands()))


def load_operands(a, b, a_smem, b_smem, loaded):
    plgpu.copy_gmem_to_smem(a, a_smem, loaded)
    plgpu.copy_gmem_to_smem(b, b_smem, loaded)
    plgpu.barrier_wait(loaded)


def twice(mistake=None, **options):
    """Two products into one accumulator, read in between, over new operands."""

    def body(a, b, out, a_smem, b_smem, acc, loaded, done):
        load_operands(a, b, a_smem, b_smem, loaded)
        plgpu.tcgen05_mma(acc, a_smem, b_smem.T, accumulate=False)
        if mistake != "commit":
            plgpu.tcgen05_commit_arrive(done)
        if mistake != "wait":
            plgpu.barrier_wait(done)
        first = plgpu.async_load_tmem(acc)
        if mistake != "wait_load":
            plgpu.wait_load_tmem()
        a_smem[...] = jnp.zeros(a_smem.shape, F16)
        if mistake != "commit_smem":
            plgpu.commit_smem()
        plgpu.tcgen05_mma(acc, a_smem, b_smem.T, done)
        plgpu.barrier_wait(done)
        out[...] = first + acc[...]

    return lambda seed: run(body, seed, **options)


@pytest.mark.parametrize("seed", SEEDS)
def test_products_read_in_between(seed):
    expected = 2 * CASE.expected(*CASE.operands())
    np.testing.assert_array_equal(twice()(seed), expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mistake", ["commit", "wait", "wait_load", "commit_smem"])
@refused
def test_a_missing_wait_is_reported_in_every_run(mistake, seed):
    twice(mistake)(seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_operands_may_not_be_overwritten_before_the_commit_arrives(seed):
    def body(a, b, out, a_smem, b_smem, acc, loaded, done):
        load_operands(a, b, a_smem, b_smem, loaded)
        plgpu.tcgen05_mma(acc, a_smem, b_smem.T, done, accumulate=False)
        b_smem[...] = jnp.zeros(b_smem.shape, F16)
        plgpu.barrier_wait(done)
        out[...] = acc[...]

    with pytest.raises(errors.RaceError, match="the tcgen05_mma"):
        run(body, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_accumulators_that_share_columns_are_not_in_order(seed):
    def body(a, b, out, a_smem, b_smem, acc, loaded, done):
        load_operands(a, b, a_smem, b_smem, loaded)
        part = plgpu.ds(8, 8)
        plgpu.tcgen05_mma(acc, a_smem, b_smem.T, accumulate=False)
        plgpu.tcgen05_mma(acc.at[:, part], a_smem, b_smem.at[part].T, done)
        plgpu.barrier_wait(done)
        out[...] = acc[...]

    with pytest.raises(errors.RaceError, match="tcgen05_mma"):
        run(body, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_kernel_may_not_end_while_a_product_is_in_flight(seed):
    def body(a, b, out, a_smem, b_smem, acc, loaded, done):
        load_operands(a, b, a_smem, b_smem, loaded)
        plgpu.tcgen05_mma(acc, a_smem, b_smem.T, done, accumulate=False)
        out[...] = jnp.zeros((128, 16), F32)

    with pytest.raises(errors.PallasGpuError, match="is freed while the tcgen05_mma"):
        run(body, seed)


def test_an_accumulator_that_nothing_was_written_to_has_no_value():
    def body(a, b, out, a_smem, b_smem, acc, loaded, done):
        load_operands(a, b, a_smem, b_smem, loaded)
        plgpu.tcgen05_mma(acc, a_smem, b_smem.T, done)
        plgpu.barrier_wait(done)
        out[...] = acc[...]

    with pytest.raises(errors.UninitializedReadError, match="TMEM"):
        run(body)


# --- stores ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("commit", [True, False])
def test_a_store_is_in_flight_until_it_is_committed(commit, seed):
    def body(a, b, out, a_smem, b_smem, acc, loaded, done):
        load_operands(a, b, a_smem, b_smem, loaded)
        plgpu.async_store_tmem(acc, jnp.ones((128, 16), F32))
        if commit:
            plgpu.commit_tmem()
        plgpu.tcgen05_mma(acc, a_smem, b_smem.T, done)
        plgpu.barrier_wait(done)
        out[...] = acc[...]

    if not commit:
        with pytest.raises(errors.RaceError, match=r"commit_tmem\(\)"):
            run(body, seed)
        return
    expected = CASE.expected(*CASE.operands()) + 1
    np.testing.assert_array_equal(run(body, seed), expected)


# --- several warpgroups ---------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("orders", [True, False])
def test_only_some_barriers_order_tensor_memory_between_warpgroups(orders, seed):
    def body(a, b, out, a_smem, b_smem, acc, loaded, done, stored):
        @plgpu.when(lax.axis_index("wg") == 0)
        def _():
            plgpu.async_store_tmem(acc, jnp.ones((128, 16), F32))
            plgpu.commit_tmem()
            plgpu.barrier_arrive(stored)

        @plgpu.when(lax.axis_index("wg") == 1)
        def _():
            load_operands(a, b, a_smem, b_smem, loaded)
            plgpu.barrier_wait(stored)
            plgpu.tcgen05_mma(acc, a_smem, b_smem.T, done)
            plgpu.barrier_wait(done)
            out[...] = acc[...]

    options = {
        "scratch": {"stored": plgpu.Barrier(orders_tensor_core=orders)},
        "num_threads": 2,
        "thread_name": "wg",
    }
    if not orders:
        with pytest.raises(errors.RaceError, match="orders_tensor_core"):
            run(body, seed, **options)
        return
    expected = CASE.expected(*CASE.operands()) + 1
    np.testing.assert_array_equal(run(body, seed, **options), expected)


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
@pytest.mark.parametrize("mistake", ["free", "note"])
@refused
def test_what_a_commit_does_not_release_is_a_race(mistake, seed):
    roles(mistake)(seed)
