# SPDX-License-Identifier: Apache-2.0
"""An all-gather around a ring: each device stores to the next what it has received."""

from __future__ import annotations

import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.mutations.mutant import Launch, Subject, Switches, Wrong, rows

DEVICES = 4
N = 128


def make(m: Switches) -> Launch:
    def body(x, o, received):
        i = lax.axis_index("x")
        step = 2 if m("two devices on") else 1
        right = (i + step) % DEVICES
        o[i] = x[0]
        for k in range(DEVICES - 1):
            row = (i - k) % DEVICES
            place = (row + 1) % DEVICES if m("the next row") else row
            plgpu.remote_ref(o, right)[place] = o[row]  # at: pass
            twice = m("the last signal twice") and k == DEVICES - 2
            if not (m("no last signal") and k == DEVICES - 2):
                to = None if m("a signal to itself") else right
                plgpu.semaphore_signal(received, 2 if twice else 1, device_id=to)
            if m("no wait") or (m("no last wait") and k == DEVICES - 2):
                continue
            plgpu.semaphore_wait(received)  # at: wait

    x = np.arange(DEVICES * N, dtype=np.float32).reshape(DEVICES, N)
    return Launch.on_mesh(
        {"x": DEVICES},
        body,
        [x],
        np.tile(x, (DEVICES, 1)),
        plgpu.SemaphoreType.REGULAR,
    )


RACE, UNWRITTEN = errors.RaceError, errors.UninitializedReadError
SUBJECT = Subject(
    make,
    (
        *rows(
            "waits",
            ("no wait", RACE, "pass"),
            ("no wait", UNWRITTEN, "pass"),
            ("no last wait", RACE, "pass"),
        ),
        *rows(
            "peers",
            ("two devices on", RACE, "pass"),
            ("two devices on", UNWRITTEN, "pass"),
            ("a signal to itself", RACE, "pass"),
            ("a signal to itself", UNWRITTEN, "pass"),
        ),
        *rows("offsets", ("the next row", RACE, "pass"), ("the next row", Wrong)),
        *rows("signals", ("no last signal", errors.DeadlockError, "wait")),
        *rows("counts", ("the last signal twice", errors.SemaphoreError)),
    ),
)
