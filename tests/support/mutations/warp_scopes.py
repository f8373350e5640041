# SPDX-License-Identifier: Apache-2.0
"""Each warp of a kernel over warps fetches, adds and stores in memory of its own."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.mutations.mutant import Launch, Subject, Switches, Wrong, rows

N = 64
F32 = jnp.float32


def make(m: Switches) -> Launch:
    def body(x, o):
        def warp(row, out, full):
            i = lax.axis_index("w")
            source = x.at[0 if m("one row") else i]
            plgpu.copy_gmem_to_smem(source, row, full)  # at: load
            if not m("no wait"):
                plgpu.barrier_wait(full)  # at: wait
            if m("waited for twice"):
                plgpu.barrier_wait(full)  # at: wait twice
            out[...] = row[...] + 1  # at: add
            if not m("no commit"):
                plgpu.commit_smem()
            place = 0 if m("one place for all") else i
            plgpu.copy_smem_to_gmem(out, o.at[place])  # at: store
            if not m("no wait for the store"):
                plgpu.wait_smem_to_gmem(0)

        arrivals = 2 if m("two copies expected") else 1
        row = plgpu.SMEM((N,), F32)
        plgpu.kernel(
            warp,
            out_type=(),
            mesh=plgpu.WarpMesh(axis_name="w"),
            scratch_types=[row, row, plgpu.Barrier(num_arrivals=arrivals)],
        )()

    x = np.arange(4 * N, dtype=np.float32).reshape(4, N)
    return Launch.of(body, [x], x + 1)


SUBJECT = Subject(
    make,
    (
        *rows(
            "waits",
            ("no wait", errors.RaceError, "load", "add"),
            ("no wait for the store", errors.KernelError, "store"),
        ),
        *rows("commits", ("no commit", errors.RaceError, "store")),
        *rows("counts", ("two copies expected", errors.DeadlockError, "wait")),
        *rows("phases", ("waited for twice", errors.DeadlockError, "wait twice")),
        *rows("two writers", ("one place for all", errors.RaceError, "store")),
        *rows("offsets", ("one row", Wrong)),
    ),
)
