# SPDX-License-Identifier: Apache-2.0
"""Declarations of barriers, and references to them."""

from __future__ import annotations

import pytest

import pallas_gpu as plgpu
from pallas_gpu.types import BarrierRef, describe
from tests.support.refusal import refused


@pytest.mark.parametrize(
    ("given", "shape", "size"), [((), (), 1), (3, (3,), 3), ((2, 4), (2, 4), 8)]
)
def test_shapes_of_barrier_arrays(given, shape, size):
    barrier = plgpu.Barrier(num_barriers=given)
    assert (barrier.shape, barrier.size) == (shape, size)


@pytest.mark.parametrize("n", [0, -1, 2**20])
@refused
def test_arrivals_are_those_of_the_hardware(n):
    plgpu.Barrier(num_arrivals=n)  # HERE


@pytest.mark.parametrize("shape", [0, 1025, (32, 33), (2, 0)])
@refused
def test_one_declaration_holds_up_to_1024_barriers(shape):
    plgpu.Barrier(num_barriers=shape)  # HERE


def test_a_declaration_makes_a_fresh_reference_each_time():
    barrier = plgpu.Barrier(num_arrivals=2, num_barriers=3)
    one, other = barrier.to_ref(), barrier.to_ref()
    assert isinstance(one, BarrierRef) and one is not other and one == other
    assert hash(one) == hash(other)
    assert one != plgpu.Barrier(num_barriers=3).to_ref()
    assert describe(one) == "a barrier of shape (3,)"
    assert one.str_short() == "Barrier[3](2)"
