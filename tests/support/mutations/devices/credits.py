# SPDX-License-Identifier: Apache-2.0
"""A sum that goes around a ring in two slots, which the receiver gives back."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.mutations.mutant import Launch, Subject, Switches, Wrong, rows

DEVICES, SLOTS, N = 4, 2, 128


def make(m: Switches) -> Launch:
    def body(x, o, slots, full, free):
        i = lax.axis_index("x")
        right, left = (i + 1) % DEVICES, (i - 1) % DEVICES
        own = x.at[i] if m("the own row first") else x.at[(i - 1) % DEVICES]
        total = own[...]
        for k in range(DEVICES - 1):
            slot = 0 if m("one slot") else k % SLOTS
            if k >= SLOTS and not m("a slot is not waited for"):
                plgpu.semaphore_wait(free)  # at: free
            plgpu.remote_ref(slots, right)[slot] = total  # at: fill
            plgpu.semaphore_signal(full, device_id=right)
            plgpu.semaphore_wait(full)  # at: full
            if m("a slot is given back early"):
                plgpu.semaphore_signal(free, device_id=left)
            total = slots[slot] + x[(i - 2 - k) % DEVICES]  # at: read
            if not m("a slot is given back early"):
                back = right if m("a slot is given back to the right") else left
                plgpu.semaphore_signal(free, device_id=back)  # at: back
        # As many slots are given back at the end as were free at the start.
        if not m("slots stay given back"):
            plgpu.semaphore_wait(free, SLOTS)
        o[0] = total

    x = np.arange(DEVICES * DEVICES * N, dtype=np.float32).reshape(-1, N)
    regular = plgpu.SemaphoreType.REGULAR
    return Launch.on_mesh(
        {"x": DEVICES},
        body,
        [x],
        x.reshape(DEVICES, DEVICES, N).sum(0),
        plgpu.GMEM((SLOTS, N), jnp.float32),
        regular,
        regular,
    )


RACE = errors.RaceError
SUBJECT = Subject(
    make,
    (
        *rows(
            "slots",
            ("one slot", RACE, "fill"),
            ("a slot is not waited for", RACE, "fill"),
            ("a slot is not waited for", errors.SemaphoreError, "back"),
            ("a slot is given back early", RACE, "read"),
            ("a slot is given back early", RACE, "fill"),
        ),
        *rows("offsets", ("the own row first", Wrong)),
        *rows("peers", ("a slot is given back to the right", RACE, "fill"),
              ("a slot is given back to the right", RACE, "read")),
        *rows("counts", ("slots stay given back", RACE, "fill"),
              ("slots stay given back", RACE, "read"),
              ("slots stay given back", errors.SemaphoreError, "back")),
    ),
)  # fmt: skip
