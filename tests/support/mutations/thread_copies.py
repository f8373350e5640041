# SPDX-License-Identifier: Apache-2.0
"""Threads copy tiles of rows that TMA cannot address, one ahead, in groups."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.mutations.mutant import Launch, Subject, Switches, rows

STEPS, SLOTS, ROWS = 4, 2, 8
TILE = (ROWS, 33)  # rows of 132 bytes


def make(m: Switches) -> Launch:
    def body(x, o, tiles):
        def fetch(k):
            slot = 0 if m("fetch into the first slot") else k % SLOTS
            first = (k + 1 if m("fetch the tile after") else k) * ROWS
            part = x.at[plgpu.ds(first, ROWS), plgpu.ds(1, 33)]
            plgpu.copy_gmem_to_smem(part, tiles.at[slot])  # at: fetch

        fetch(0)
        for k in range(STEPS):
            last = k + 1 == STEPS
            if not last:
                fetch(k + (2 if m("fetch one too far") else 1))
            if not m("no wait for the tile"):
                ahead = 0 if last else 1
                pending = ahead + 1 if m("wait leaves the tile") else ahead
                plgpu.wait_gmem_to_smem(pending)
            slot = (k + 1 if m("read the other slot") else k) % SLOTS
            value = 2 * tiles[slot]  # at: read
            row = 0 if m("store to the first tile") else k * ROWS
            o[plgpu.ds(row, ROWS)] = value

    x = np.arange(STEPS * ROWS * 35, dtype=np.float32).reshape(-1, 35)
    return Launch.of(body, [x], 2 * x[:, 1:34], plgpu.SMEM((SLOTS, *TILE), jnp.float32))


SUBJECT = Subject(
    make,
    (
        *rows(
            "offsets",
            ("fetch the tile after", errors.OutOfBoundsError, "fetch"),
            ("fetch one too far", errors.OutOfBoundsError, "fetch"),
            ("store to the first tile", errors.UnwrittenResultError),
        ),
        *rows(
            "slots",
            ("fetch into the first slot", errors.RaceError, "fetch"),
            ("read the other slot", errors.RaceError, "fetch", "read"),
        ),
        *rows("waits", ("no wait for the tile", errors.RaceError, "fetch", "read")),
        *rows("counts", ("wait leaves the tile", errors.RaceError, "fetch", "read")),
    ),
)
