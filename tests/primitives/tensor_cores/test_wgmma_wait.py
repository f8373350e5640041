# SPDX-License-Identifier: Apache-2.0
"""What waits for wgmma and reads of accumulators refuse, and what they say."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.products import F16, F32, attempt, tiles
from tests.support.refusal import refused


@pytest.mark.parametrize("n", [-1, 1.0, True, None])
def test_a_wait_names_a_number_of_groups(n):
    def multiply(acc, sa, sb, x):
        plgpu.wgmma_wait(n)  # HERE

    with refused(
        errors.ArgumentError,
        "wgmma_wait: invalid number of groups",
        expected="0 or more",
        got=repr(n),
        hint="0 waits for all",
    ):
        attempt(multiply)


@pytest.mark.parametrize("n", [-1, 1.5])
def test_a_read_names_a_number_of_groups(n):
    def multiply(acc, sa, sb, x):
        plgpu.wgmma_accumulator_load(acc, wait_n=n)  # HERE

    with refused(
        errors.ArgumentError, "wgmma_accumulator_load: invalid number of groups"
    ):
        attempt(multiply)


def test_a_read_is_one_of_an_accumulator():
    def multiply(acc, sa, sb, x):
        plgpu.wgmma_accumulator_load(sa)  # HERE

    with refused(
        errors.ArgumentTypeError,
        "wgmma_accumulator_load: not an accumulator",
        got="SMEM float16[64, 64]",
    ):
        attempt(multiply)


def test_an_accumulator_in_flight_is_not_read():
    """Only a run knows: the emulator names the line of the wgmma and of the read."""
    eye = jnp.eye(64, dtype=F16)

    def body(x, o, sa, sb, barrier):
        plgpu.copy_gmem_to_smem(x, sa, barrier)
        plgpu.barrier_wait(barrier)

        def scope(acc):
            plgpu.wgmma(acc, sa, sa)
            return plgpu.wgmma_accumulator_load(acc, wait_n=None)  # HERE

        o[...] = plgpu.run_scoped(scope, plgpu.ACC((64, 64)))

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, 64), F32),
        scratch_types=[tiles(), tiles(), plgpu.Barrier()],
    )
    with refused(
        errors.RaceError,
        "accumulator float32[64, 64] is read while a wgmma may still add to it",
        expected="wgmma_wait between the wgmma and the read",
        got="test_wgmma_wait.py",
        hint="wgmma_wait(0)",
    ):
        kernel(eye)


def test_a_copy_over_an_operand_with_too_few_arrivals_is_reported():
    """Two copies on a barrier of one arrival: the second one is left over."""

    def body(x, o, sa, sb, barrier):
        plgpu.copy_gmem_to_smem(x, sa, barrier)
        plgpu.copy_gmem_to_smem(x, sb, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.run_scoped(lambda acc: plgpu.wgmma(acc, sa, sb), plgpu.ACC((64, 64)))

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, 64), F32),
        scratch_types=[tiles(), tiles(), plgpu.Barrier(num_arrivals=1)],
    )
    with pytest.raises(errors.KernelError) as caught:
        kernel(jnp.eye(64, dtype=F16))
    text = str(caught.value)
    assert type(caught.value) is errors.BarrierError
    assert "receives more arrivals than it was declared with" in caught.value.what
    assert "1 arrivals per phase" in caught.value.expected
    assert "raise num_arrivals" in caught.value.hint
    assert "test_wgmma_wait.py" in text
