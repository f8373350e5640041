# SPDX-License-Identifier: Apache-2.0
"""A sum in two shots by CTAs of a grid: pull the parts of a row, push the row."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.mutations.mutant import Launch, Subject, Switches, Wrong, rows

DEVICES, CTAS, N = 2, 2, 128


def make(m: Switches) -> Launch:
    def everybody(semaphore, count, scope="sys"):
        for d in range(DEVICES):
            plgpu.semaphore_signal(semaphore, device_id=d)  # at: signal
        plgpu.semaphore_wait(semaphore, count, memory_scope=scope)  # at: wait

    def body(x, o, staged, ready, done):
        i, cta = lax.axis_index("x"), lax.axis_index("cta")
        row = CTAS * i + cta
        for d in range(DEVICES):
            staged[CTAS * d + cta] = 3 * x[CTAS * d + cta]  # at: stage
        scope = "gpu" if m("a wait at gpu scope") else "sys"
        if not m("no wait for the parts"):
            everybody(ready, DEVICES, scope)
        total = jnp.zeros((N,), jnp.float32)
        for d in range(DEVICES):
            peer = i if m("the own parts") else d
            total += plgpu.remote_ref(staged, peer)[row]  # at: pull
        for d in range(DEVICES):
            plgpu.remote_ref(o, d)[row] = total  # at: push
        if not m("no wait for the end"):
            count = 1 if m("the first signal is enough") else DEVICES
            everybody(done, count)

    x = np.arange(DEVICES * DEVICES * CTAS * N, dtype=np.float32).reshape(-1, N)
    each = x.reshape(DEVICES, DEVICES * CTAS, N).sum(0)
    regular = plgpu.SemaphoreType.REGULAR
    return Launch.on_mesh(
        {"x": DEVICES},
        body,
        [x],
        3 * np.tile(each, (DEVICES, 1)),
        plgpu.GMEM((DEVICES * CTAS, N), jnp.float32),
        regular,
        regular,
        grid={"cta": CTAS},
    )


RACE = errors.RaceError
SUBJECT = Subject(
    make,
    (
        *rows("fences", ("a wait at gpu scope", RACE, "wait", "signal")),
        *rows(
            "waits",
            ("no wait for the parts", RACE, "pull", "stage"),
            ("no wait for the parts", RACE, "stage"),
            ("no wait for the parts", errors.UninitializedReadError, "pull"),
            ("no wait for the end", RACE, "push"),
            ("no wait for the end", RACE, "pull"),
        ),
        *rows("peers", ("the own parts", Wrong)),
        *rows(
            "counts",
            ("the first signal is enough", RACE, "push"),
            ("the first signal is enough", RACE, "pull"),
            ("the first signal is enough", errors.SemaphoreError, "signal"),
        ),
    ),
)
