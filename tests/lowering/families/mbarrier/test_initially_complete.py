# SPDX-License-Identifier: Apache-2.0
"""Barriers, everywhere: a ring of buffers whose first round is like all others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.refusal import refused, refused_by
from tests.support.rings import DOUBLED, X, ring

ONE = jax.ShapeDtypeStruct((4,), jnp.float32)


@pytest.mark.parametrize("rounds", [1, 3])
def test_the_first_wait_for_a_barrier_that_is_complete_returns(rounds):
    everywhere.check(ring(rounds=rounds), [X], DOUBLED)


@everywhere.gives(
    [X],
    lambda *_: np.stack([X] * 2),
    plgpu.ClusterBarrier(collective_axes="c", initially_complete=True),
    cluster={"c": 2},
)
def test_the_same_holds_for_barriers_of_a_cluster(x, o, barrier):
    plgpu.barrier_wait(barrier)
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)
    o[lax.axis_index("c")] = x[...]


@refused
def test_otherwise_the_first_wait_needs_a_phase():
    ring(initially_complete=False)(plgpu.InterpretParams())(X)


@pytest.mark.parametrize("first", [plgpu.barrier_wait, plgpu.barrier_arrive])
@refused_by(everywhere.emulate, [], ONE, plgpu.Barrier(initially_complete=True))
def test_only_the_first_phase_is_complete(o, barrier, *, first):
    """After an arrival, the parity of a wait denotes the second phase."""
    first(barrier)
    plgpu.barrier_wait(barrier)  # HERE
    o[...] = jnp.ones(4)
