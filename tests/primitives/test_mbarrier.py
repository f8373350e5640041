# SPDX-License-Identifier: Apache-2.0
"""What barrier_arrive and barrier_wait refuse, and what they say."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.entry_kernels import TILE, numbers, run
from tests.support.refusal import refused

OPERATIONS = [plgpu.barrier_wait, plgpu.barrier_arrive]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_operand_is_a_barrier(operation):
    def body(x, o, tile):
        operation(tile)  # HERE

    with refused(
        errors.MemorySpaceError,
        f"{operation.__name__}: the barrier is not a barrier",
        expected="plgpu.Barrier()",
        got="SMEM float32[64, 128]",
    ):
        run(body, scratch_types=[TILE])


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_operand_is_one_barrier(operation):
    def body(x, o, barriers):
        operation(barriers)  # HERE

    with refused(
        errors.ShapeError,
        f"{operation.__name__}: the operand is an array of barriers",
        got="barriers of shape (2,)",
        hint="barrier.at[i]",
    ):
        run(body, scratch_types=[plgpu.Barrier(num_barriers=2)])


def test_the_operand_is_a_reference():
    with refused(
        errors.ArgumentTypeError,
        "barrier_wait: the barrier is not a reference",
        got="ndarray",
    ):
        plgpu.barrier_wait(numbers())  # HERE


def test_a_barrier_of_an_array_exists():
    def body(x, o, barriers):
        plgpu.barrier_wait(barriers.at[2])  # HERE

    with refused(
        errors.OutOfBoundsError,
        "an index is out of bounds",
        expected="-2 to 1",
        got="index 2",
    ):
        run(body, scratch_types=[plgpu.Barrier(num_barriers=2)])


def test_a_barrier_is_not_read_as_an_array():
    def body(x, o, barrier):
        o[...] = barrier[...]  # HERE

    with refused(
        errors.MemorySpaceError,
        "a barrier is read or written like an array",
        expected="barrier_wait",
        hint="barrier.at[i]",
    ):
        run(body, scratch_types=[plgpu.Barrier()])


def test_a_single_barrier_has_no_index():
    def body(x, o, barrier):
        plgpu.barrier_wait(barrier.at[0])  # HERE

    with refused(
        errors.OutOfBoundsError,
        "a reference has fewer dimensions than the index",
        hint="plgpu.Barrier(num_barriers=1)",
    ):
        run(body, scratch_types=[plgpu.Barrier()])


def test_a_barrier_is_not_loaded():
    def body(x, o, barrier):
        plgpu.load(barrier)  # HERE

    with refused(
        errors.MemorySpaceError,
        "load: the source cannot be loaded",
        got="a barrier of shape ()",
    ):
        run(body, scratch_types=[plgpu.Barrier()])


def test_the_predicate_of_an_arrival_is_a_bool():
    def body(x, o, barrier):
        plgpu.barrier_arrive(barrier, predicate=1)  # HERE

    with refused(
        errors.ShapeError,
        "barrier_arrive: the predicate is not a scalar bool",
        expected="a scalar bool",
        got="int32[]",
    ):
        run(body, scratch_types=[plgpu.Barrier()])


def test_vmap_inside_a_body_does_not_reach_an_arrival():
    def body(x, o, barrier):
        def arrive(on):
            plgpu.barrier_arrive(barrier, predicate=on)  # HERE

        jax.vmap(arrive)(jnp.array([True, False]))

    with refused(
        errors.UnsupportedError, "jax.vmap inside a kernel reached barrier_arrive"
    ):
        run(body, scratch_types=[plgpu.Barrier()])
