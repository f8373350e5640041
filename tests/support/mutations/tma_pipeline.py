# SPDX-License-Identifier: Apache-2.0
"""One warpgroup doubles tiles: TMA fetches two ahead, and stores from one buffer."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.mutations.mutant import Launch, Subject, Switches, Wrong, rows

STEPS, SLOTS, ROWS = 4, 2, 8
TILE = (ROWS, 128)


def make(m: Switches) -> Launch:
    def fetch(x, tiles, full, k, slot):
        row = (k + 1 if m("fetch the tile after") else k) * ROWS
        row = row + 4 if m("fetch from half a tile on") else row
        place = 0 if m("fetch into the first slot") else slot
        signal = 1 - slot if m("fetch signals the other slot") else slot
        part = x.at[plgpu.ds(row, ROWS)]
        plgpu.copy_gmem_to_smem(part, tiles.at[place], full.at[signal])  # at: fetch

    def body(x, o, tiles, staged, full):
        for k in range(1 if m("first fetch missing") else SLOTS):
            fetch(x, tiles, full, jnp.int32(k), jnp.int32(k))

        def turn(k, _):
            slot = lax.rem(k, SLOTS)
            awaited = 1 - slot if m("wait for the other slot") else slot
            if not m("no wait for the tile"):
                plgpu.barrier_wait(full.at[awaited])  # at: wait
            if m("wait twice"):
                plgpu.barrier_wait(full.at[awaited])  # at: second wait
            source = 1 - slot if m("read the other slot") else slot
            value = 2 * tiles[source]  # at: read
            if not m("no wait for the store"):
                plgpu.wait_smem_to_gmem(1 if m("wait leaves one store") else 0)
            if m("commit before staging"):
                plgpu.commit_smem()
            if m("stage half a tile"):
                staged[:4] = value[:4]
            elif not m("nothing staged"):
                staged[...] = value  # at: stage
            if not m("no commit") and not m("commit before staging"):
                plgpu.commit_smem()
            row = jnp.int32(0) if m("store to the first tile") else k * ROWS
            out = o.at[plgpu.ds(row, ROWS)]
            plgpu.copy_smem_to_gmem(staged, out)  # at: store
            if m("stage again"):
                staged[...] = value  # at: stage again
            ahead = k + SLOTS
            if m("refetch one late"):
                ahead = ahead + 1
            limit = STEPS + 1 if m("fetch one too many") else STEPS

            if not m("no refetch"):

                @plgpu.when(ahead < limit)
                def _():
                    fetch(x, tiles, full, ahead, slot)

        steps = STEPS + 1 if m("one step too many") else STEPS
        steps = STEPS - 1 if m("one step too few") else steps
        lax.fori_loop(0, steps, turn, None)
        plgpu.wait_smem_to_gmem(0)

    x = np.arange(STEPS * ROWS * 128, dtype=np.float32).reshape(-1, 128)
    return Launch.of(
        body,
        [x],
        2 * x,
        plgpu.SMEM((SLOTS, *TILE), jnp.float32),
        plgpu.SMEM(TILE, jnp.float32),
        plgpu.Barrier(
            num_barriers=SLOTS, num_arrivals=2 if m("two arrivals expected") else 1
        ),
    )


SUBJECT = Subject(
    make,
    (
        *rows(
            "offsets",
            ("fetch the tile after", errors.OutOfBoundsError, "fetch"),
            ("fetch from half a tile on", Wrong),
            ("store to the first tile", errors.UnwrittenResultError, "store"),
        ),
        *rows(
            "slots",
            ("fetch into the first slot", errors.RaceError, "fetch"),
            ("fetch signals the other slot", errors.RaceError, "fetch", "read"),
            ("wait for the other slot", errors.RaceError, "fetch", "read"),
            ("read the other slot", errors.RaceError, "fetch", "read"),
            ("refetch one late", errors.DeadlockError, "wait"),
        ),
        *rows(
            "waits",
            ("first fetch missing", errors.DeadlockError, "wait"),
            ("no wait for the tile", errors.RaceError, "fetch", "read"),
            ("no wait for the store", errors.RaceError, "stage", "store"),
            ("no refetch", errors.DeadlockError, "wait"),
        ),
        *rows("phases", ("wait twice", errors.DeadlockError, "second wait")),
        *rows(
            "counts",
            ("wait leaves one store", errors.RaceError, "stage", "store"),
            ("one step too many", errors.DeadlockError, "wait"),
            ("one step too few", errors.BarrierError, "fetch"),
            ("two arrivals expected", errors.DeadlockError, "wait"),
        ),
        *rows(
            "commits",
            ("commit before staging", errors.RaceError, "stage", "store"),
            ("no commit", errors.RaceError, "stage", "store"),
        ),
        *rows(
            "initialisation",
            ("stage half a tile", errors.UninitializedReadError, "store"),
            ("nothing staged", errors.UninitializedReadError, "store"),
        ),
        *rows("two writers", ("stage again", errors.RaceError, "stage again", "store")),
        *rows("bounds", ("fetch one too many", errors.OutOfBoundsError, "fetch")),
    ),
)
