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


@pytest.mark.parametrize(
    "options",
    [{"num_arrivals": n} for n in (0, -1, 2**20)]
    + [{"num_barriers": shape} for shape in (0, 1025, (32, 33), (2, 0))],
    ids=str,
)
@refused
def test_arrivals_and_barriers_are_as_many_as_the_hardware_has(options):
    plgpu.Barrier(**options)  # HERE


def test_a_declaration_makes_a_fresh_reference_each_time():
    barrier = plgpu.Barrier(num_arrivals=2, num_barriers=3)
    one, other = barrier.to_ref(), barrier.to_ref()
    assert isinstance(one, BarrierRef) and one is not other and one == other
    assert hash(one) == hash(other)
    assert one != plgpu.Barrier(num_barriers=3).to_ref()
    assert describe(one) == "a barrier of shape (3,)"
    assert one.str_short() == "Barrier[3](2)"
