# SPDX-License-Identifier: Apache-2.0
"""An all-gather by copies of TMA: each device copies its row to all others."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.mutations.mutant import Launch, Subject, Switches, rows

DEVICES = 4
N = 128


def make(m: Switches) -> Launch:
    def body(x, o, tile, arrived):
        i = lax.axis_index("x")
        tile[...] = 2 * x[0]
        if not m("no fence before the copies"):
            plgpu.commit_smem()

        def signal(to):
            plgpu.semaphore_signal(arrived, device_id=to)  # at: signal

        if m("signals before the copies"):
            for k in range(DEVICES):
                signal((i + k) % DEVICES)
        peers = DEVICES - 1 if m("a device is left out") else DEVICES
        for k in range(peers):
            to = (i + k) % DEVICES
            plgpu.copy_smem_to_gmem(tile, plgpu.remote_ref(o, to).at[i])  # at: copy
        if m("the tile is used again"):
            tile[...] = x[0]  # at: again
        if not m("no wait for the copies"):
            reads = m("a wait for the reads")
            plgpu.wait_smem_to_gmem(0, wait_read_only=reads)
        if not m("signals before the copies"):
            for k in range(1 if m("no signal to itself") else 0, DEVICES):
                signal((i + k) % DEVICES)
        count = DEVICES - 1 if m("one device is not waited for") else DEVICES
        plgpu.semaphore_wait(arrived, count)  # at: wait

    x = np.arange(DEVICES * N, dtype=np.float32).reshape(DEVICES, N)
    return Launch.on_mesh(
        {"x": DEVICES},
        body,
        [x],
        2 * np.tile(x, (DEVICES, 1)),
        plgpu.SMEM((N,), jnp.float32),
        plgpu.SemaphoreType.REGULAR,
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=m("no fence before the copies")
        ),
    )


RACE = errors.RaceError
SUBJECT = Subject(
    make,
    (
        *rows(
            "waits",
            ("no wait for the copies", RACE, "copy"),
            ("no wait for the copies", errors.KernelError, "copy"),
            ("a wait for the reads", RACE, "copy"),
        ),
        *rows("commits", ("no fence before the copies", RACE, "copy")),
        *rows("two writers", ("the tile is used again", RACE, "again")),
        *rows("peers", ("a device is left out", errors.UnwrittenResultError)),
        *rows("signals", ("signals before the copies", RACE, "copy")),
        *rows(
            "counts",
            ("no signal to itself", errors.DeadlockError, "wait"),
            ("one device is not waited for", RACE, "copy"),
            ("one device is not waited for", errors.SemaphoreError, "signal"),
        ),
    ),
)
