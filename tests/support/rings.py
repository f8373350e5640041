# SPDX-License-Identifier: Apache-2.0
"""A ring of buffers: one warpgroup brings rows, another one stores them doubled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from tests.support import everywhere

STEPS, SLOTS = 5, 2
X = np.random.default_rng(0).standard_normal((STEPS, 128)).astype(np.float32)
DOUBLED = X * 2


def ring(
    wait: Callable[[Any], Any] = plgpu.barrier_wait,
    *,
    rounds: int = 1,
    copies: bool = True,
    first: int = 0,
    initially_complete: bool = True,
) -> Callable[[Any], Callable[..., Any]]:
    """Returns `make` for the kernel.

    Args:
      wait: for a barrier.
      rounds: how often the rows travel.
      copies: whether TMA brings the rows; else threads do.
      first: the first step that waits for a free slot.
      initially_complete: whether the barriers of free slots are.
    """
    steps = STEPS * rounds

    def produce(i, x, rows, full, free):
        slot = lax.rem(i, SLOTS)
        plgpu.when(i >= first)(lambda: wait(free.at[slot]))
        row = x.at[lax.rem(i, STEPS)]
        if copies:
            plgpu.copy_gmem_to_smem(row, rows.at[slot], full.at[slot])
        else:
            rows[slot] = row[...]
            plgpu.barrier_arrive(full.at[slot])

    def consume(i, o, rows, full, free):
        slot = lax.rem(i, SLOTS)
        wait(full.at[slot])
        o[lax.rem(i, STEPS)] = rows[slot] * 2
        plgpu.barrier_arrive(free.at[slot])

    def body(x, o, rows, full, free):
        wg = lax.axis_index("wg")
        work = lambda i: produce(i, x, rows, full, free)  # noqa: E731
        plgpu.when(wg == 0)(lambda: plgpu.loop(0, steps)(work))
        store = lambda i: consume(i, o, rows, full, free)  # noqa: E731
        plgpu.when(wg == 1)(lambda: plgpu.loop(0, steps)(store))

    return everywhere.kernel(
        body,
        X,
        plgpu.SMEM((SLOTS, 128), jnp.float32),
        plgpu.Barrier(num_barriers=SLOTS),
        plgpu.Barrier(num_barriers=SLOTS, initially_complete=initially_complete),
        threads={"wg": 2},
    )


def shared_ring(
    interpret: Any,
    *,
    slots: int = 4,
    steps: int = 8,
    consumers: int = 2,
    copies: bool = True,
    counts: bool = False,
    early: int | None = None,
) -> Callable[..., Any]:
    """Returns a kernel in which each of several warpgroups stores all rows doubled.

    Args:
      interpret: for `kernel`.
      slots, steps, consumers: their numbers.
      copies: whether TMA brings the rows; else threads do.
      counts: whether two consumers count the rows that they have read in one semaphore,
        which does not say who has read what; else each arrives on the slot's barrier.
      early: the step before which the producer waits for one row too few.
    """

    def wait_for_slot(i, free):
        if not counts:
            plgpu.barrier_wait(free.at[lax.rem(i, slots)])
            return
        # Either may have read all i rows, but the other one has to be past this slot.
        rows = 2 * i - slots + 1 - jnp.where(i == (early or 0), 1, 0)
        wait = lambda: plgpu.semaphore_wait(free, rows, decrement=False)  # noqa: E731
        plgpu.when(i >= slots)(wait)

    def produce(i, x, rows, full, free):
        slot = lax.rem(i, slots)
        wait_for_slot(i, free)
        if copies:
            plgpu.copy_gmem_to_smem(x.at[i], rows.at[slot], full.at[slot])
        else:
            rows[slot] = x[i]
            plgpu.barrier_arrive(full.at[slot])

    def consume(i, o, rows, full, free):
        slot = lax.rem(i, slots)
        plgpu.barrier_wait(full.at[slot])
        o[i] = rows[slot] * 2
        if counts:
            plgpu.semaphore_signal(free)
        else:
            plgpu.barrier_arrive(free.at[slot])

    def body(x, o, rows, full, free):
        wg = lax.axis_index("wg")

        @plgpu.when(wg == consumers)
        def _():
            plgpu.loop(0, steps)(lambda i: produce(i, x, rows, full, free))
            if counts:
                plgpu.semaphore_wait(free, 2 * steps)

        work = lambda i: consume(i, o.at[wg], rows, full, free)  # noqa: E731
        plgpu.when(wg < consumers)(lambda: plgpu.loop(0, steps)(work))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((consumers, steps, 128), jnp.float32),
        num_threads=consumers + 1,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((slots, 128), jnp.float32),
            plgpu.Barrier(num_barriers=slots),
            plgpu.SemaphoreType.REGULAR
            if counts
            else plgpu.Barrier(
                num_arrivals=consumers, num_barriers=slots, initially_complete=True
            ),
        ],
        interpret=interpret,
    )


def rows_of(steps: int = 8) -> np.ndarray:
    """Returns an operand of a ring of so many steps."""
    return np.arange(steps * 128, dtype=np.float32).reshape(steps, 128)
