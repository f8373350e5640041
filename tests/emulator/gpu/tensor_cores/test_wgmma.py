# SPDX-License-Identifier: Apache-2.0
"""wgmma in the emulator: what it reports. Its arithmetic is in test_tensor_core.py."""

from __future__ import annotations

import functools
import inspect

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.entry_kernels import f32
from tests.support.products import tiles
from tests.support.refusal import in_each, refused, refused_by

F16 = jnp.float16
A, B = (
    np.random.default_rng(i).standard_normal((64, 64)).astype(np.float16)
    for i in (0, 1)
)
ACC = plgpu.ACC((64, 64))


def load_both(a, b, sa, sb, barrier):
    plgpu.copy_gmem_to_smem(a, sa, barrier)
    plgpu.copy_gmem_to_smem(b, sb, barrier)
    plgpu.barrier_wait(barrier)


def run(body, **options):
    """Runs `body(a, b, o, sa, sb, barrier, acc)` in the emulator."""
    scratch = tiles(), tiles(), plgpu.Barrier(num_arrivals=2), ACC
    return everywhere.emulate(body, [A, B], f32(64, 64), *scratch, **options)


def test_a_register_operand_is_taken_when_the_product_is_issued():
    def body(a, b, o, sa, sb, barrier, acc):
        load_both(a, b, sa, sb, barrier)
        x = plgpu.load(sa, layout=plgpu.Layout.WGMMA)
        plgpu.wgmma(acc, x * 2, sb.T)
        sa[...] = jnp.zeros((64, 64), F16)
        o[...] = acc[...]

    expected = 2 * A.astype(np.float64) @ B.astype(np.float64).T
    np.testing.assert_allclose(run(body, asynchrony="late"), expected, atol=4e-5)


REPORTED = in_each(run, asynchrony=["eager", "late", "random"])


def of_operands(body):
    """A body that has both operands in SMEM."""

    def full(a, b, o, sa, sb, barrier, acc):
        load_both(a, b, sa, sb, barrier)
        body(acc, sa, sb, o)

    # The names of the references in reports.
    full.__signature__ = inspect.signature(full)
    return functools.update_wrapper(full, body)


@refused_by(REPORTED)
@of_operands
def test_an_operand_overwritten_before_the_wait(acc, sa, sb, o):
    plgpu.wgmma(acc, sa, sb.T)
    sb[...] = jnp.zeros((64, 64), F16)  # HERE
    o[...] = acc[...]


@refused_by(REPORTED)
def test_an_operand_copied_over_before_the_wait(a, b, o, sa, sb, barrier, acc):
    load_both(a, b, sa, sb, barrier)
    plgpu.wgmma(acc, sa, sb.T)
    load_both(a, b, sa, sb, barrier)
    o[...] = acc[...]


@refused_by(REPORTED)
@of_operands
def test_an_operand_of_the_group_that_a_wait_leaves(acc, sa, sb, o):
    upper, lower = (plgpu.ds(n, 32) for n in (0, 32))
    plgpu.wgmma(acc.at[:, 0:32], sa, sb.at[upper].T)
    plgpu.wgmma(acc.at[:, 32:64], sa, sb.at[lower].T)
    plgpu.wgmma_wait(1)
    sb[upper] = jnp.zeros((32, 64), F16)
    sb[lower] = jnp.zeros((32, 64), F16)  # HERE


@refused_by(REPORTED)
@of_operands
def test_an_operand_that_threads_wrote_without_commit_smem(acc, sa, sb, o):
    sa[...] = sa[...] * 2
    plgpu.wgmma(acc, sa, sb.T)  # HERE


@refused_by(REPORTED)
def test_an_operand_whose_copy_nobody_waited_for(a, b, o, sa, sb, barrier, acc):
    plgpu.copy_gmem_to_smem(a, sa, barrier)
    plgpu.copy_gmem_to_smem(b, sb, barrier)
    plgpu.wgmma(acc, sa, sb.T)  # HERE


@refused_by(REPORTED)
def test_an_operand_that_nobody_wrote(a, b, o, sa, sb, barrier, acc):
    plgpu.wgmma(acc, sa, sa)  # HERE


@refused_by(REPORTED)
@of_operands
def test_an_accumulator_read_in_flight(acc, sa, sb, o):
    plgpu.wgmma(acc, sa, sb.T)
    o[...] = plgpu.wgmma_accumulator_load(acc, wait_n=None)  # HERE


@refused_by(REPORTED)
@of_operands
def test_a_product_that_nobody_waited_for_at_the_end(acc, sa, sb, o):
    plgpu.wgmma(acc, sa, sb.T)  # HERE


@refused_by(REPORTED)
@of_operands
def test_a_dynamic_start_inside_of_a_tile(acc, sa, sb, o):
    @plgpu.loop(0, 2)
    def _(k):
        part = plgpu.ds(k * 4, 32)
        plgpu.wgmma(acc.at[:, 0:32], sa, sb.at[part].T)  # HERE
        plgpu.wgmma_wait(0)


# --- the barrier of a slot that two consumers read ------------------------------------


def consumers(arrivals, arrive, **options):
    """Two warpgroups multiply what a third one brings; those of `arrive` free it."""

    def body(a, b, o, sa, sb, barrier, empty):
        wg = lax.axis_index("wg")

        @plgpu.when(wg < 2)
        def _():
            def multiply(acc):
                @plgpu.loop(0, 2)
                def _(i):
                    plgpu.barrier_wait(barrier)
                    plgpu.wgmma(acc, sa, sb.T)
                    plgpu.wgmma_wait(0)
                    plgpu.when(wg < arrive)(lambda: plgpu.barrier_arrive(empty))

                o[wg] = acc[...]

            plgpu.run_scoped(multiply, ACC)

        @plgpu.when(wg == 2)
        def _():
            for i in range(2):
                if i:
                    plgpu.barrier_wait(empty)
                plgpu.copy_gmem_to_smem(a, sa, barrier)
                plgpu.copy_gmem_to_smem(b, sb, barrier)

    scratch = tiles(), tiles(), plgpu.Barrier(num_arrivals=2)
    empty = plgpu.Barrier(num_arrivals=arrivals)
    options |= {"threads": {"wg": 3}, "seed": 1}
    return everywhere.emulate(body, [A, B], f32(2, 64, 64), *scratch, empty, **options)


def test_a_slot_that_both_consumers_free():
    expected = 2 * A.astype(np.float64) @ B.astype(np.float64).T
    for result in consumers(2, 2):
        np.testing.assert_allclose(result, expected, atol=4e-5)


@refused
def test_a_slot_that_one_of_two_consumers_frees():
    consumers(1, 1)


@refused
def test_a_slot_whose_barrier_expects_one_arrival_more():
    consumers(2, 1)
