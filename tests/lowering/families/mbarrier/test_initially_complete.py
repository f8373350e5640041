# SPDX-License-Identifier: Apache-2.0
"""Barriers, everywhere: a ring of buffers whose first round is like all others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support import everywhere
from tests.support.rings import DOUBLED, X, ring


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


def test_otherwise_the_first_wait_needs_a_phase():
    kernel = ring(initially_complete=False)(plgpu.InterpretParams())
    with pytest.raises(errors.DeadlockError, match=r"phase 0 of barrier free\[0\]"):
        kernel(X)


def of_one_warpgroup(first):
    """A kernel whose warpgroup waits for a complete barrier after another operation."""

    def body(o, barrier):
        first(barrier)
        plgpu.barrier_wait(barrier)
        o[...] = jnp.ones(4)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((4,), jnp.float32),
        scratch_types={"barrier": plgpu.Barrier(initially_complete=True)},
    )


def test_the_second_wait_needs_a_phase():
    with pytest.raises(errors.DeadlockError, match="phase 0 of barrier barrier"):
        of_one_warpgroup(plgpu.barrier_wait)()


def test_a_first_wait_after_the_first_phase_has_missed_it():
    """Its parity then denotes the second phase."""
    with pytest.raises(errors.BarrierError, match="a wait missed its phase"):
        of_one_warpgroup(plgpu.barrier_arrive)()
