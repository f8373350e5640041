# SPDX-License-Identifier: Apache-2.0
"""Neighbours exchange the edges of their blocks; one warpgroup sends, one receives."""

from __future__ import annotations

import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.mutations.mutant import Launch, Subject, Switches, rows

DEVICES, N = 2, 128


def make(m: Switches) -> Launch:
    def body(x, o, halo, sent, ready, taken):
        i, wg = lax.axis_index("x"), lax.axis_index("wg")
        other = 1 - i

        @plgpu.when(wg == 0)
        def _():
            for edge in (0, 1):
                plgpu.remote_ref(halo, other)[edge] = x[3 * edge]  # at: send
            # Whoever waits on this device passes it on to the other one.
            if not m("nothing is handed over"):
                plgpu.semaphore_signal(sent, memory_scope="gpu")

        @plgpu.when(wg == 1)
        def _():
            if not m("nothing is handed over"):
                plgpu.semaphore_wait(sent, memory_scope="gpu")
            plgpu.semaphore_signal(ready, device_id=other)
            if m("a second signal"):
                plgpu.semaphore_signal(ready, device_id=other)  # at: second
            if not m("no wait"):
                plgpu.semaphore_wait(ready)  # at: ready
            o[1:3] = x[1:3]
            o[0], o[3] = halo[1], halo[0]  # at: take
            if not m("the kernel ends at once"):
                plgpu.semaphore_signal(taken, device_id=other)
                plgpu.semaphore_wait(taken)

    x = np.arange(DEVICES * 4 * N, dtype=np.float32).reshape(-1, N)
    swapped = x.copy()
    swapped[[0, 4, 3, 7]] = x[[7, 3, 4, 0]]
    regular = plgpu.SemaphoreType.REGULAR
    return Launch.on_mesh(
        {"x": DEVICES},
        body,
        [x],
        x if LAUNCHES % 2 == 0 else swapped,
        plgpu.GMEM((2, N), np.float32),
        regular,
        regular,
        regular,
        threads={"wg": 2},
        launches=LAUNCHES,
    )


# The results of one launch are the operands of the next.
LAUNCHES = 2
RACE, UNWRITTEN = errors.RaceError, errors.UninitializedReadError
SUBJECT = Subject(
    make,
    (
        *rows(
            "fences",
            ("nothing is handed over", RACE, "send"),
            ("nothing is handed over", UNWRITTEN, "take"),
        ),
        *rows(
            "waits",
            ("no wait", RACE, "take"),
            ("no wait", RACE, "send"),
            ("no wait", UNWRITTEN, "take"),
        ),
        *rows("signals", ("a second signal", errors.SemaphoreError, "second")),
    ),
    variants=("the kernel ends at once",),
)
