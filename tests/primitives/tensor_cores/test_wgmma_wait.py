# SPDX-License-Identifier: Apache-2.0
"""What waits for wgmma and reads of accumulators refuse, and what they say."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import pallas_gpu as plgpu
from tests.support.products import F16, F32, attempt, tiles
from tests.support.refusal import refused_by


@pytest.mark.parametrize("n", [-1, 1.0, True, None])
@refused_by(attempt)
def test_a_wait_names_a_number_of_groups(acc, sa, sb, x, *, n):
    plgpu.wgmma_wait(n)  # HERE


@pytest.mark.parametrize("n", [-1, 1.5])
@refused_by(attempt)
def test_a_read_names_a_number_of_groups(acc, sa, sb, x, *, n):
    plgpu.wgmma_accumulator_load(acc, wait_n=n)  # HERE


@refused_by(attempt)
def test_a_read_is_one_of_an_accumulator(acc, sa, sb, x):
    plgpu.wgmma_accumulator_load(sa)  # HERE


def run(body):
    """Runs a kernel in the emulator."""
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, 64), F32),
        scratch_types=[tiles(), tiles(), plgpu.Barrier()],
    )
    kernel(jnp.eye(64, dtype=F16))


@refused_by(run)
def test_an_accumulator_in_flight_is_not_read(x, o, sa, sb, barrier):
    """Only a run knows: the emulator names the line of the wgmma and of the read."""

    plgpu.copy_gmem_to_smem(x, sa, barrier)
    plgpu.barrier_wait(barrier)

    def scope(acc):
        plgpu.wgmma(acc, sa, sa)
        return plgpu.wgmma_accumulator_load(acc, wait_n=None)  # HERE

    o[...] = plgpu.run_scoped(scope, plgpu.ACC((64, 64)))


@refused_by(run)
def test_a_copy_over_an_operand_with_too_few_arrivals_is_reported(
    x, o, sa, sb, barrier
):
    """Two copies on a barrier of one arrival: the second one is left over."""
    plgpu.copy_gmem_to_smem(x, sa, barrier)
    plgpu.copy_gmem_to_smem(x, sb, barrier)
    plgpu.barrier_wait(barrier)
    plgpu.run_scoped(lambda acc: plgpu.wgmma(acc, sa, sb), plgpu.ACC((64, 64)))
