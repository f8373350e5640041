# SPDX-License-Identifier: Apache-2.0
"""CTAs of a ring send arrays into each other's slots; copies take them from there."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.mutations.mutant import Launch, Subject, Switches, Wrong, rows

CTAS, STEPS, SLOTS, N = 4, 3, 2, 128
F32 = jnp.float32


def make(m: Switches) -> Launch:
    def body(x, o, inbox, full, empty):
        i = lax.axis_index("c")
        right = i if m("sent to itself") else lax.rem(i + 1, CTAS)

        def send(step):
            slot = 0 if m("one slot") else step % SLOTS
            sem = "relaxed" if m("relaxed") else "release"
            there = {"cluster_idx": right, "cluster_dim": "c", "sem": sem}
            value, place = x[i, step], inbox.at[slot]
            plgpu.async_store_smem(value, place, full.at[slot], **there)  # at: send

        for step in range(STEPS):
            slot = step % SLOTS
            if step >= SLOTS and not m("no wait for empty"):
                plgpu.barrier_wait(empty.at[slot])  # at: wait empty
            send(step)
            if m("sent twice"):
                send(step)
            if not m("no wait for full"):
                plgpu.barrier_wait(full.at[slot])  # at: wait full
            if not m("no commit"):
                plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(inbox.at[slot], o.at[i, step])  # at: copy
            if not m("no wait for the copy"):
                plgpu.wait_smem_to_gmem(0)
            if step + SLOTS < STEPS:
                if m("one CTA frees"):
                    free = lambda: plgpu.barrier_arrive(empty.at[slot])  # noqa: B023, E731
                    plgpu.when(i == 0)(free)
                elif not m("nobody frees"):
                    plgpu.barrier_arrive(empty.at[slot])

    full = plgpu.Barrier(
        num_barriers=SLOTS, num_arrivals=2 if m("two arrivals expected") else 1
    )
    empty = plgpu.ClusterBarrier(collective_axes="c", num_barriers=SLOTS)
    if m("empty is the CTA's own"):
        empty = plgpu.Barrier(num_barriers=SLOTS)
    x = np.arange(CTAS * STEPS * N, dtype=np.float32).reshape(CTAS, STEPS, N)
    return Launch.of(
        body,
        [x],
        np.roll(x, 1, 0),
        plgpu.SMEM((SLOTS, N), F32),
        full,
        empty,
        cluster={"c": CTAS},
    )


RACE, LOST = errors.RaceError, errors.BarrierError
SUBJECT = Subject(
    make,
    (
        *rows(
            "waits",
            ("no wait for full", RACE, "copy"),
            ("no wait for full", errors.UninitializedReadError, "copy"),
            ("no wait for empty", RACE, "send"),
            ("no wait for the copy", RACE, "copy"),
        ),
        *rows("commits", ("no commit", RACE, "copy")),
        *rows(
            "counts",
            ("two arrivals expected", errors.DeadlockError, "wait full"),
            ("sent twice", RACE, "send"),
            ("sent twice", LOST, "send"),
        ),
        *rows(
            "arrivals",
            ("nobody frees", errors.DeadlockError, "wait empty"),
            ("one CTA frees", errors.DeadlockError, "wait empty"),
            ("empty is the CTA's own", RACE, "send"),
        ),
        *rows("axes", ("sent to itself", Wrong)),
        *rows("slots", ("one slot", RACE, "send"), ("one slot", LOST, "send")),
    ),
    variants=("relaxed",),
)
