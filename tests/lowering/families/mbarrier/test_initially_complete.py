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

STEPS, SLOTS = 5, 2
ROWS = jax.ShapeDtypeStruct((STEPS, 128), jnp.float32)


def ring(*, initially_complete=True, rounds=1):
    """A kernel in which one warpgroup loads rows and another one stores them."""

    def body(x, o, rows, full, free):
        @plgpu.when(lax.axis_index("wg") == 0)
        def _():
            @plgpu.loop(0, STEPS * rounds)
            def _(i):
                slot = lax.rem(i, SLOTS)
                plgpu.barrier_wait(free.at[slot])
                row = x.at[lax.rem(i, STEPS)]
                plgpu.copy_gmem_to_smem(row, rows.at[slot], full.at[slot])

        @plgpu.when(lax.axis_index("wg") == 1)
        def _():
            @plgpu.loop(0, STEPS * rounds)
            def _(i):
                slot = lax.rem(i, SLOTS)
                plgpu.barrier_wait(full.at[slot])
                o[lax.rem(i, STEPS)] = rows[slot] * 2
                plgpu.barrier_arrive(free.at[slot])

    return everywhere.kernel(
        body,
        ROWS,
        plgpu.SMEM((SLOTS, 128), jnp.float32),
        plgpu.Barrier(num_barriers=SLOTS),
        plgpu.Barrier(num_barriers=SLOTS, initially_complete=initially_complete),
        threads={"wg": 2},
    )


def numbers():
    return np.random.default_rng(0).standard_normal(ROWS.shape).astype(np.float32)


@pytest.mark.parametrize("rounds", [1, 3])
def test_the_first_wait_for_a_barrier_that_is_complete_returns(rounds):
    everywhere.check(ring(rounds=rounds), [numbers()], numbers() * 2)


@everywhere.gives(
    [numbers()],
    lambda *_: np.stack([numbers()] * 2),
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
        kernel(numbers())


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
