# SPDX-License-Identifier: Apache-2.0
"""What barrier_arrive and barrier_wait refuse, and what they say."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import pallas_gpu as plgpu
from tests.support.entry_kernels import TILE, numbers, run
from tests.support.refusal import refused, refused_by

OPERATIONS = [plgpu.barrier_wait, plgpu.barrier_arrive]


@pytest.mark.parametrize("operation", OPERATIONS)
@refused_by(run, scratch_types=[TILE])
def test_the_operand_is_a_barrier(x, o, tile, *, operation):
    operation(tile)  # HERE


@pytest.mark.parametrize("operation", OPERATIONS)
@refused_by(run, scratch_types=[plgpu.Barrier(num_barriers=2)])
def test_the_operand_is_one_barrier(x, o, barriers, *, operation):
    operation(barriers)  # HERE


@refused
def test_the_operand_is_a_reference():
    plgpu.barrier_wait(numbers())  # HERE


@refused_by(run, scratch_types=[plgpu.Barrier(num_barriers=2)])
def test_a_barrier_of_an_array_exists(x, o, barriers):
    plgpu.barrier_wait(barriers.at[2])  # HERE


CALLS = {
    "it is not read as an array": lambda barrier: barrier[...],
    "it has no index": lambda barrier: plgpu.barrier_wait(barrier.at[0]),
    "it is not loaded": lambda barrier: plgpu.load(barrier),
    "a predicate is a bool": lambda barrier: plgpu.barrier_arrive(barrier, predicate=1),
    "vmap does not reach it": lambda barrier: jax.vmap(
        lambda on: plgpu.barrier_arrive(barrier, predicate=on)
    )(jnp.array([True, False])),
}


@pytest.mark.parametrize("call", CALLS)
@refused_by(run, scratch_types=[plgpu.Barrier()])
def test_the_call_of_a_single_barrier_is_refused(x, o, barrier, *, call):
    CALLS[call](barrier)


GOOD = {
    "barrier_arrive_and_wait": lambda e: {"barrier": e.b},
    "barrier_wait": lambda e: {"barrier": e.b},
}
