# SPDX-License-Identifier: Apache-2.0
"""A ring of buffers: one warpgroup brings rows, another one stores them doubled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
