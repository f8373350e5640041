# SPDX-License-Identifier: Apache-2.0
"""Two warpgroups transpose an array in place: each writes its half for the other."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.mutations.mutant import Launch, Subject, Switches, Wrong, rows

SIZE = 32
HALF = SIZE // 2


def make(m: Switches) -> Launch:
    def body(x, o, tile, written, read):
        wg = lax.axis_index("wg")
        part = plgpu.ds((0 if m("both write the first half") else wg) * HALF, HALF)
        if m("one warpgroup writes"):

            @plgpu.when(wg == 0)
            def _():
                tile[part] = x[part]

        elif not m("nothing written"):
            tile[part] = x[part]  # at: write
        if not m("no arrival"):
            plgpu.barrier_arrive(written)  # at: arrive
        if m("arrive twice"):
            plgpu.barrier_arrive(written)
        if not m("no wait for the other"):
            plgpu.barrier_wait(written)  # at: wait
        mine = plgpu.ds(wg * HALF, HALF)
        axis = mine if m("rows for columns") else slice(None)
        columns = slice(None) if m("rows for columns") else mine
        value = tile[axis, columns]  # at: read
        turned = value if m("rows for columns") else value.T
        if m("one warpgroup has read"):

            @plgpu.when(wg == 0)
            def _():
                plgpu.barrier_arrive(read)

        elif not m("no arrival after reading"):
            plgpu.barrier_arrive(read)  # at: arrive read
        if m("one warpgroup waits"):

            @plgpu.when(wg == 0)
            def _():
                plgpu.barrier_wait(read)

        elif not m("no wait before writing back"):
            again = written if m("wait for the first barrier again") else read
            plgpu.barrier_wait(again)  # at: wait read
        place = plgpu.ds((1 - wg) * HALF, HALF) if m("rows of the other") else mine
        tile[place] = turned  # at: write back
        if m("written twice"):
            tile[:HALF] = turned  # at: written twice
        if not m("no commit"):
            plgpu.commit_smem()
        source = tile if m("store of the whole array") else tile.at[mine]
        target = o if m("store of the whole array") else o.at[mine]
        target = o.at[:HALF] if m("stores to one place") else target
        plgpu.copy_smem_to_gmem(source, target)  # at: store
        plgpu.wait_smem_to_gmem(0)

    x = np.arange(SIZE * SIZE, dtype=np.float32).reshape(SIZE, SIZE)
    return Launch.of(
        body,
        [x],
        x.T,
        plgpu.SMEM((SIZE, SIZE), jnp.float32),
        plgpu.Barrier(num_arrivals=1 if m("one arrival expected") else 2),
        plgpu.Barrier(num_arrivals=3 if m("three readers expected") else 2),
        threads={"wg": 2},
    )


SUBJECT = Subject(
    make,
    (
        *rows(
            "two writers",
            ("written twice", errors.RaceError, "written twice"),
            ("rows of the other", errors.RaceError, "store", "write back"),
            ("stores to one place", errors.RaceError, "store"),
            ("store of the whole array", errors.RaceError, "store", "write back"),
        ),
        *rows(
            "initialisation",
            (
                "both write the first half",
                errors.UninitializedReadError,
                "read",
                "store",
            ),
            ("one warpgroup writes", errors.UninitializedReadError, "read", "store"),
            ("nothing written", errors.UninitializedReadError, "read", "store"),
        ),
        *rows(
            "arrivals",
            ("no arrival", errors.DeadlockError, "wait"),
            ("arrive twice", errors.RaceError, "read", "write"),
            ("arrive twice", errors.BarrierError, "wait"),
            ("no arrival after reading", errors.DeadlockError, "wait read"),
        ),
        *rows(
            "waits",
            ("no wait for the other", errors.RaceError, "read", "write"),
            ("no wait before writing back", errors.RaceError, "read", "write back"),
        ),
        *rows("axes", ("rows for columns", Wrong)),
        *rows(
            "divergence",
            ("one warpgroup has read", errors.DeadlockError, "wait read"),
            ("one warpgroup waits", errors.RaceError, "read", "write back"),
        ),
        *rows(
            "phases",
            ("wait for the first barrier again", errors.DeadlockError, "wait read"),
        ),
        *rows("commits", ("no commit", errors.RaceError, "store", "write back")),
        *rows(
            "counts",
            ("one arrival expected", errors.RaceError, "read", "write"),
            ("one arrival expected", errors.BarrierError, "wait"),
            ("three readers expected", errors.DeadlockError, "wait read"),
        ),
    ),
)
