# SPDX-License-Identifier: Apache-2.0
"""Two CTAs of a cluster read the same tiles: each copies half of a tile to both."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.mutations.mutant import Launch, Subject, Switches, Wrong, rows

STEPS, SLOTS = 4, 2
TILE = (4, 128)


def make(m: Switches) -> Launch:
    def body(x, y, o, tiles, own, full, empty):
        cta = lax.axis_index("x")

        def turn(k, total):
            slot = lax.rem(k, SLOTS)

            if not m("no wait for empty"):
                first = SLOTS + 1 if m("empty awaited a round late") else SLOTS

                @plgpu.when(k >= first)
                def _():
                    plgpu.barrier_wait(empty.at[slot])  # at: wait empty

            step = k + cta if m("other steps in each CTA") else k
            axes = None if m("no multicast") else "x"

            def copy():
                plgpu.copy_gmem_to_smem(  # at: multicast
                    x.at[step], tiles.at[slot], full.at[slot], collective_axes=axes
                )

            if m("one CTA issues"):
                plgpu.when(cta == 0)(copy)
            else:
                copy()
            mine = 0 if m("one row for both") else cta
            part = y.at[k, mine]
            plgpu.copy_gmem_to_smem(part, own.at[slot], full.at[slot])  # at: own
            if not m("no wait for full"):
                plgpu.barrier_wait(full.at[slot])  # at: wait full
            total = total + tiles[slot] * own[slot]  # at: read
            if m("one CTA arrives"):
                plgpu.when(cta == 0)(lambda: plgpu.barrier_arrive(empty.at[slot]))
            elif not m("no arrival"):
                plgpu.barrier_arrive(empty.at[slot])  # at: arrive
            return total

        steps = STEPS + cta if m("one CTA goes on") else STEPS
        total = lax.fori_loop(0, steps, turn, jnp.zeros(TILE, jnp.float32))
        o[0 if m("both results in one place") else cta] = total  # at: result

    rng = np.random.default_rng(0)
    x = rng.integers(-4, 5, (STEPS, *TILE)).astype(np.float32)
    y = rng.integers(-4, 5, (STEPS, 2, *TILE)).astype(np.float32)
    empty = plgpu.ClusterBarrier(collective_axes="x", num_barriers=SLOTS)
    if m("empty is the CTA's own"):
        empty = plgpu.Barrier(num_barriers=SLOTS)
    if m("empty counts twice"):
        empty = plgpu.ClusterBarrier(
            collective_axes="x", num_barriers=SLOTS, num_arrivals=2
        )
    return Launch.of(
        body,
        [x, y],
        np.einsum("kij,kcij->cij", x, y),
        plgpu.SMEM((SLOTS, *TILE), jnp.float32),
        plgpu.SMEM((SLOTS, *TILE), jnp.float32),
        plgpu.Barrier(
            num_barriers=SLOTS, num_arrivals=1 if m("full counts one copy") else 2
        ),
        empty,
        cluster={"x": 2},
    )


SUBJECT = Subject(
    make,
    (
        *rows(
            "waits",
            ("no wait for empty", errors.RaceError, "multicast"),
            ("no wait for full", errors.RaceError, "multicast", "read"),
        ),
        *rows("phases", ("empty awaited a round late", errors.RaceError, "multicast")),
        *rows(
            "divergence",
            ("other steps in each CTA", errors.KernelError, "multicast"),
            ("one CTA issues", errors.DeadlockError, "wait full"),
            ("one CTA goes on", errors.OutOfBoundsError, "multicast"),
        ),
        *rows("offsets", ("one row for both", Wrong)),
        *rows(
            "arrivals",
            ("one CTA arrives", errors.DeadlockError, "wait empty"),
            ("no arrival", errors.DeadlockError, "wait empty"),
            ("empty is the CTA's own", errors.RaceError, "multicast"),
        ),
        *rows("two writers", ("both results in one place", errors.RaceError, "result")),
        *rows(
            "counts",
            ("empty counts twice", errors.DeadlockError, "wait empty"),
            ("full counts one copy", errors.BarrierError, "own"),
            ("full counts one copy", errors.BarrierError, "wait full"),
        ),
    ),
    variants=("no multicast",),
)
