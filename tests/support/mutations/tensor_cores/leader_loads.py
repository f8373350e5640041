# SPDX-License-Identifier: Apache-2.0
"""A pair of CTAs loads tiles that the leader's barrier tracks, in two slots."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.mutations.mutant import Launch, Subject, Switches, rows

ROWS, COLUMNS, STEPS = 8, 32, 3
F32 = jnp.float32


def make(m: Switches) -> Launch:
    partition = plgpu.CopyPartition.REPLICATED
    if m("rows"):
        partition = plgpu.CopyPartition.PARTITIONED(0)
    if m("columns"):
        partition = plgpu.CopyPartition.PARTITIONED(1)

    def body(x, o, tiles, full, ready):
        i = lax.axis_index("c")
        for step in range(STEPS):
            slot = 0 if m("one slot") else step % 2
            pair = {"collective_axes": "c", "leader_tracked": partition}
            copy = functools.partial(
                plgpu.copy_gmem_to_smem, x.at[step], tiles.at[slot], full.at[slot]
            )

            def load(copy=copy, pair=pair):
                copy(**pair)  # at: load

            if m("the leader alone loads"):
                plgpu.when(i == 0)(load)
            else:
                load()

            def wait(slot=slot):
                plgpu.barrier_wait(full.at[slot])  # at: wait full

            if m("both wait"):
                wait()
            elif not m("the leader does not wait"):
                plgpu.when(i == 0)(wait)
            if m("the leader alone tells"):
                plgpu.when(i == 0)(lambda: plgpu.barrier_arrive(ready))
            elif not m("nobody tells"):
                plgpu.barrier_arrive(ready)
            if not m("the other does not wait"):
                plgpu.barrier_wait(ready)  # at: wait ready
            o[i, step] = tiles[slot]  # at: read

    shape, axis = (ROWS, COLUMNS), None
    if m("rows"):
        shape, axis = (2 * ROWS, COLUMNS), 1
    if m("columns"):
        shape, axis = (ROWS, 2 * COLUMNS), 2
    x = np.arange(STEPS * np.prod(shape), dtype=np.float32).reshape(STEPS, *shape)
    halves = np.stack([x, x] if axis is None else np.split(x, 2, axis))
    arrivals = 2 if m("two arrivals expected") else 1
    return Launch.of(
        body,
        [x],
        halves,
        plgpu.SMEM((2, ROWS, COLUMNS), F32),
        plgpu.Barrier(num_barriers=2, num_arrivals=arrivals),
        plgpu.ClusterBarrier(collective_axes="c"),
        cluster={"c": 2},
        target="sm_100a",
    )


RACE, STUCK = errors.RaceError, errors.DeadlockError
SUBJECT = Subject(
    make,
    (
        *rows(
            "waits",
            ("the leader does not wait", RACE, "load", "read"),
            ("the other does not wait", RACE, "load", "read"),
        ),
        *rows("counts", ("two arrivals expected", STUCK, "wait full")),
        *rows(
            "divergence",
            ("the leader alone loads", STUCK, "wait full"),
            ("both wait", STUCK, "wait full"),
            ("the leader alone tells", STUCK, "wait ready"),
        ),
        *rows("arrivals", ("nobody tells", STUCK, "wait ready")),
        *rows("slots", ("one slot", RACE, "read")),
    ),
    variants=("rows", "columns"),
)
