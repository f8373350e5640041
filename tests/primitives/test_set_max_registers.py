# SPDX-License-Identifier: Apache-2.0
"""set_max_registers: counts and actions that the hardware does not have."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.entry_kernels import make, numbers, run
from tests.support.lockstep import kernels as in_lockstep
from tests.support.refusal import refused_by
from tests.support.semantics import BOTH


@pytest.mark.parametrize("n", [16, 30, 264, 40.0, "40"])
@refused_by(run)
def test_the_count_is_one_that_the_instruction_has(x, o, *, n):
    plgpu.set_max_registers(n, action="decrease")  # HERE


@refused_by(run)
def test_the_action_is_one_of_two(x, o):
    plgpu.set_max_registers(40, action="dec")  # HERE


@refused_by(run, num_threads=3, thread_name="wg")
def test_the_warpgroups_of_a_block_share_its_registers(x, o):
    @plgpu.when(lax.axis_index("wg") < 3)
    def _():
        plgpu.set_max_registers(240, action="increase")  # HERE


@pytest.mark.parametrize(
    ("counts", "total"), [((104, 24, 40), None), ((112, 24, 24), 496)]
)
def test_a_block_of_six_warpgroups_has_480_registers_for_a_thread_of_each(
    counts, total
):
    # The SM has 512; a warpgroup would wait forever for those that were not allocated.
    def body(x, o):
        for i, n in enumerate((*counts[:1] * 4, *counts[1:])):

            @plgpu.when(lax.axis_index("wg") == i)
            def _(n=n):
                plgpu.set_max_registers(n, action="increase" if n > 80 else "decrease")

        o[...] = x[...]

    if total is None:
        run(body, num_threads=6, thread_name="wg")
        return
    with pytest.raises(errors.OutOfResources, match="at most 480 per thread"):
        run(body, num_threads=6, thread_name="wg")


@refused_by(run)
def test_an_increase_is_none_when_it_asks_for_less(x, o):
    plgpu.set_max_registers(64, action="decrease")
    plgpu.set_max_registers(40, action="increase")  # HERE


THREE = {"num_threads": 3, "thread_name": "wg"}


@refused_by(run, **THREE)
def test_a_decrease_is_none_to_more_than_the_launch_has(x, o):
    plgpu.set_max_registers(200, action="decrease")  # HERE


def hand_over(x, o, increased, *, released_first):
    """Two warpgroups need what the third one releases."""
    wg = lax.axis_index("wg")

    @plgpu.when(wg < 2)
    def _():
        plgpu.set_max_registers(232, action="increase")
        plgpu.barrier_arrive(increased)

    @plgpu.when(wg == 2)
    def _():
        if not released_first:
            plgpu.barrier_wait(increased)
        plgpu.set_max_registers(40, action="decrease")
        o[...] = x[...]


@pytest.mark.parametrize("seed", range(4))
def test_an_increase_waits_until_others_have_released_what_it_needs(seed):
    interpret = plgpu.InterpretParams(seed=seed)
    for released_first in (True, False):
        body = functools.partial(hand_over, released_first=released_first)
        barrier = plgpu.Barrier(num_arrivals=2)
        options = THREE | {"scratch_types": [barrier], "interpret": interpret}
        if released_first:
            run(body, **options)
            continue
        with pytest.raises(errors.DeadlockError) as caught:
            run(body, **options)
        assert "waits for 232 registers per thread" in caught.value.got
        assert "warpgroup 2 holds 168" in caught.value.got
        assert "let the others decrease their counts first" in caught.value.hint


@pytest.mark.parametrize("released_first", [True, False])
def test_an_increase_waits_in_the_emitted_code_too(released_first):
    body = functools.partial(hand_over, released_first=released_first)
    kernel = make(body, scratch_types=[plgpu.Barrier(num_arrivals=2)], **THREE)
    if released_first:
        (result,) = in_lockstep.run(kernel, [numbers()], BOTH[0])
        np.testing.assert_array_equal(result, numbers())
        return
    with pytest.raises(errors.DeadlockError, match="232 registers of each thread"):
        in_lockstep.run(kernel, [numbers()], BOTH[0])


def test_a_count_is_part_of_a_kernel():
    with pytest.raises(errors.PallasGpuError):
        plgpu.set_max_registers(40, action="decrease")


def test_every_target_with_the_instruction_gets_it():
    def body(x, o):
        plgpu.set_max_registers(40, action="decrease")

    for target in ("sm_90a", "sm_100a"):
        (report,) = plgpu.offline.lower(make(body), numbers(), target=target)
        assert "setmaxregister" in report.mlir


GOOD = {"set_max_registers": lambda e: {"n": 40, "action": "decrease"}}
