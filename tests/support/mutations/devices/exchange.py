# SPDX-License-Identifier: Apache-2.0
"""An all-to-all on a mesh of two axes, whose rows arrive by TMA and leave by TMA."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.mutations.mutant import Launch, Subject, Switches, Wrong, rows

MESH = {"x": 2, "y": 4}
DEVICES, N = 8, 128


def make(m: Switches) -> Launch:
    def body(x, o, inbox, tile, loaded, arrived):
        i, j = lax.axis_index("x"), lax.axis_index("y")
        me = 2 * j + i if m("the axes are swapped") else 4 * i + j
        for d in range(DEVICES):
            peer = (
                {"y": d % 4} if m("an axis is left out") else {"x": d // 4, "y": d % 4}
            )
            plgpu.remote_ref(inbox, peer)[me] = x[d]  # at: send
            if m("data after the last signal") and d == DEVICES - 1:
                plgpu.remote_ref(inbox, peer)[me] = x[d] + 1  # at: late
            if not m("no fence for copies"):
                plgpu.commit_gmem()
            plgpu.semaphore_signal(arrived, device_id=d, device_id_type=LOGICAL)
            if m("data after a signal") and d == DEVICES - 1:
                plgpu.remote_ref(inbox, peer)[me] = x[d] + 1  # at: after
        plgpu.semaphore_wait(arrived, DEVICES - m("one too few"))  # at: wait
        plgpu.copy_gmem_to_smem(inbox, tile, loaded)  # at: load
        plgpu.barrier_wait(loaded)
        o[...] = tile[...]

    x = np.arange(DEVICES * DEVICES * N, dtype=np.float32).reshape(-1, N)
    parts = x.reshape(DEVICES, DEVICES, N)
    return Launch.on_mesh(
        MESH,
        body,
        [x],
        parts.transpose(1, 0, 2).reshape(-1, N),
        plgpu.GMEM((DEVICES, N), jnp.float32),
        plgpu.SMEM((DEVICES, N), jnp.float32),
        plgpu.Barrier(),
        plgpu.SemaphoreType.REGULAR,
    )


LOGICAL = plgpu.DeviceIdType.LOGICAL
RACE = errors.RaceError
SUBJECT = Subject(
    make,
    (
        *rows("peers", ("the axes are swapped", Wrong),
              ("an axis is left out", RACE, "send"),
              ("an axis is left out", errors.UninitializedReadError, "load")),
        *rows("fences", ("no fence for copies", RACE, "load", "send")),
        *rows("offsets", ("data after the last signal", Wrong)),
        *rows("signals", ("data after a signal", RACE, "after")),
        *rows("counts", ("one too few", RACE, "send"),
              ("one too few", errors.UninitializedReadError, "load"),
              ("one too few", errors.SemaphoreError)),
    ),
)  # fmt: skip
