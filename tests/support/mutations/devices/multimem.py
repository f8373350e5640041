# SPDX-License-Identifier: Apache-2.0
"""A sum that each device loads from all at once, and stores to all at once."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.mutations.mutant import Launch, Subject, Switches, Wrong, rows

DEVICES, N = 4, 128


def make(m: Switches) -> Launch:
    def body(x, o, staged, ready, done):
        i = lax.axis_index("x")
        for d in range(DEVICES):
            staged[d] = 2 * x[d]  # at: stage
        if m("only itself is signalled"):
            plgpu.semaphore_signal(ready, DEVICES)
        elif not m("no signal"):
            plgpu.semaphore_signal_multicast(ready, collective_axes="x")
        if not m("no wait"):
            plgpu.semaphore_wait(ready, DEVICES)  # at: ready
        row = 0 if m("one row") else i
        how = "max" if m("the largest") else "add"
        load = functools.partial(plgpu.multimem_load_reduce, collective_axes="x")
        total = load(staged.at[row], reduction_op=how)  # at: load
        plgpu.multimem_store(total, o.at[row], "x")  # at: store
        if m("no end"):
            return
        plgpu.semaphore_signal_multicast(done, collective_axes="x")  # at: signal
        keep = m("the count is kept")
        plgpu.semaphore_wait(done, DEVICES, decrement=not keep)

    x = np.arange(DEVICES * DEVICES * N, dtype=np.int32).reshape(-1, N)
    regular = plgpu.SemaphoreType.REGULAR
    each = 2 * x.reshape(DEVICES, DEVICES, N).sum(0, dtype=np.int32)
    return Launch.on_mesh(
        {"x": DEVICES},
        body,
        [x],
        np.tile(each, (DEVICES, 1)),
        plgpu.GMEM((DEVICES, N), jnp.int32),
        regular,
        regular,
    )


RACE = errors.RaceError
SUBJECT = Subject(
    make,
    (
        *rows("waits", ("no wait", RACE, "stage"), ("no end", RACE, "store"),
              ("no end", RACE, "stage")),
        *rows("signals", ("no signal", errors.DeadlockError, "ready"),
              ("only itself is signalled", RACE, "stage"),
              ("only itself is signalled", errors.UninitializedReadError, "load")),
        *rows("offsets", ("one row", errors.UnwrittenResultError, "store")),
        *rows("arithmetic", ("the largest", Wrong)),
        *rows("counts", ("the count is kept", errors.SemaphoreError, "signal")),
    ),
)  # fmt: skip
