# SPDX-License-Identifier: Apache-2.0
"""Rows that indices name are doubled: by bulk copies, or by cp.async in groups."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.mutations.mutant import Launch, Subject, Switches, Wrong, rows

COUNT, ALL = 16, 32
TILE = (COUNT, 32)
BY_THREADS = "cp.async copies the rows"
PERMUTATION = np.random.default_rng(0).permutation(ALL).astype(np.int32)


def make(m: Switches) -> Launch:
    threads = m(BY_THREADS)

    def body(x, order, o, tile, staged, full):
        def load(chosen):
            chosen = chosen ^ 1 if m("neighbours of the rows") else chosen
            chosen = chosen + 1 if m("an index past the rows") else chosen
            source = x.at[chosen]
            if not threads:
                plgpu.copy_gmem_to_smem(source, tile, full)  # at: gather
                return
            plgpu.copy_gmem_to_smem(source, tile)

        def wait():
            if threads:
                plgpu.wait_gmem_to_smem(0)
            else:
                plgpu.barrier_wait(full)  # at: wait
                if m("wait twice"):
                    plgpu.barrier_wait(full)  # at: second wait

        for part in range(2):
            chosen = order[half(part)]
            if not (part and m("second gather missing")):
                load(chosen)
            if not m("no wait for the rows"):
                wait()
            value = 2 * tile[...]  # at: read
            if part and not m("no wait for the scatter"):
                plgpu.wait_smem_to_gmem(1 if m("wait leaves one scatter") else 0)
            if not m("nothing staged"):
                staged[...] = value  # at: stage
            if not m("no commit"):
                plgpu.commit_smem()
            to = chosen
            if m("all to one row"):
                to = chosen * 0
            if part and m("the first rows again"):
                to = order[half(0)]
            plgpu.copy_smem_to_gmem(staged, o.at[to])  # at: scatter
        plgpu.wait_smem_to_gmem(0)

    x = np.arange(ALL * 32, dtype=np.float32).reshape(ALL, 32)
    arrivals = 2 if m("two arrivals expected") else 1
    return Launch.of(
        body,
        [x, PERMUTATION],
        2 * x,
        plgpu.SMEM(TILE, jnp.float32),
        plgpu.SMEM(TILE, jnp.float32),
        plgpu.Barrier(num_arrivals=arrivals),
    )


def half(part: int):
    """The half of the indices that a turn of the loop uses."""
    return slice(part * COUNT, (part + 1) * COUNT)


SUBJECT = Subject(
    make,
    (
        *rows(
            "offsets",
            ("neighbours of the rows", Wrong),
            ("the first rows again", errors.UnwrittenResultError, "scatter"),
        ),
        *rows("bounds", ("an index past the rows", errors.OutOfBoundsError, "gather")),
        *rows(
            "waits",
            ("no wait for the rows", errors.RaceError, "gather", "read"),
            ("no wait for the scatter", errors.RaceError, "stage", "scatter"),
            ("second gather missing", errors.DeadlockError, "wait"),
        ),
        *rows("phases", ("wait twice", errors.DeadlockError, "second wait")),
        *rows(
            "counts",
            ("wait leaves one scatter", errors.RaceError, "stage", "scatter"),
            ("two arrivals expected", errors.DeadlockError, "wait"),
        ),
        *rows("commits", ("no commit", errors.RaceError, "stage", "scatter")),
        *rows(
            "initialisation",
            ("nothing staged", errors.UninitializedReadError, "scatter"),
        ),
        *rows("two writers", ("all to one row", errors.RaceError, "scatter")),
    ),
    (BY_THREADS,),
)
