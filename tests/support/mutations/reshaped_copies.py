# SPDX-License-Identifier: Apache-2.0
"""Every other row is doubled: copies see GMEM and SMEM in other shapes than threads."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.mutations.mutant import Launch, Subject, Switches, Wrong, rows

ROWS, WIDTH, PARTS = 16, 64, 2
GROUP = ROWS // PARTS
BY_THREADS = "cp.async copies the parts"


def make(m: Switches) -> Launch:
    threads = m(BY_THREADS)

    def body(x, o, tiles, staged, full):
        def part(ref, i):
            return ref.reshape(GROUP, PARTS, WIDTH).at[:, i]

        def load(i):
            src = part(x, 0 if m("the even rows twice") else i)
            if m("rows of the halves"):
                src = x.reshape(PARTS, GROUP, WIDTH).at[i]
            slot = 0 if m("both in one slot") else i
            dst = tiles.reshape(PARTS, GROUP, WIDTH).at[slot]
            if not threads:
                plgpu.copy_gmem_to_smem(src, dst, full.at[i])  # at: load
                return
            plgpu.copy_gmem_to_smem(src, dst)

        def wait(i):
            if threads:
                plgpu.wait_gmem_to_smem(PARTS - 1 - i)
            else:
                plgpu.barrier_wait(full.at[i])  # at: wait

        load(0)
        if not m("second load missing"):
            load(1)
        for i in range(PARTS):
            if not m("no wait for the load"):
                wait(i)
            value = 2 * tiles[plgpu.ds(i * GROUP, GROUP)]  # at: read
            if i and not m("no wait for the store"):
                plgpu.wait_smem_to_gmem(1 if m("wait leaves one store") else 0)
            staged[0 : GROUP // 2] = value[0 : GROUP // 2]  # at: stage
            if not m("half of it staged"):
                staged[GROUP // 2 : GROUP] = value[GROUP // 2 : GROUP]
            if not m("no commit"):
                plgpu.commit_smem()
            src = staged.reshape(GROUP * WIDTH).reshape(GROUP, 1, WIDTH).at[:, 0]
            to = part(o, 0 if m("both to the even rows") else i)
            plgpu.copy_smem_to_gmem(src, to)  # at: store
        plgpu.wait_smem_to_gmem(0)

    x = np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)
    return Launch.of(
        body,
        [x],
        2 * x,
        plgpu.SMEM((ROWS, WIDTH), jnp.float32),
        plgpu.SMEM((GROUP, WIDTH), jnp.float32),
        plgpu.Barrier(num_barriers=PARTS),
    )


SUBJECT = Subject(
    make,
    (
        *rows(
            "offsets",
            ("the even rows twice", Wrong),
            ("rows of the halves", Wrong),
            ("both to the even rows", errors.UnwrittenResultError),
        ),
        *rows("slots", ("both in one slot", errors.RaceError, "load")),
        *rows(
            "waits",
            ("no wait for the load", errors.RaceError, "load", "read"),
            ("no wait for the store", errors.RaceError, "stage", "store"),
            ("second load missing", errors.DeadlockError, "wait"),
        ),
        *rows("counts", ("wait leaves one store", errors.RaceError, "stage", "store")),
        *rows("commits", ("no commit", errors.RaceError, "stage", "store")),
        *rows(
            "initialisation",
            ("half of it staged", errors.UninitializedReadError, "store"),
        ),
    ),
    (BY_THREADS,),
)
