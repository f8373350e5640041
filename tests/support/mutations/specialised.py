# SPDX-License-Identifier: Apache-2.0
"""A producer fetches tiles for two consumers: full and empty barriers for each slot."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.mutations.mutant import Launch, Subject, Switches, Wrong, rows

STEPS, SLOTS, ROWS, CONSUMERS = 5, 2, 16, 2
SHARE = ROWS // CONSUMERS


def produce(m: Switches, x, y, tiles, more, full, empty):
    def turn(k, _):
        slot = lax.rem(k, SLOTS)
        first = SLOTS + 1 if m("empty awaited a round late") else SLOTS
        if m("empty awaited from the start"):
            first = 0

        if not m("no wait for empty"):

            @plgpu.when(k >= first)
            def _():
                plgpu.barrier_wait(empty.at[slot])  # at: wait empty

        rows = plgpu.ds(k * ROWS, ROWS)
        plgpu.copy_gmem_to_smem(x.at[rows], tiles.at[slot], full.at[slot])  # at: x
        if not m("second copy missing"):
            target = 1 - slot if m("second copy into the other slot") else slot
            source = x if m("second copy of the first array") else y
            part, place = source.at[rows], more.at[target]
            plgpu.copy_gmem_to_smem(part, place, full.at[slot])  # at: y

    steps = STEPS - 1 if m("producer stops early") else STEPS
    steps = STEPS + 1 if m("producer goes on") else steps
    lax.fori_loop(0, steps, turn, None)


def consume(m: Switches, o, tiles, more, full, empty, wg):
    share = 0 if m("consumers of one half") else wg
    mine = plgpu.ds(share * SHARE, SHARE)

    def turn(k, total):
        slot = lax.rem(k, SLOTS)
        if m("phase skipped"):

            @plgpu.when(k != 1)
            def _():
                plgpu.barrier_wait(full.at[slot])

        elif not m("no wait for full"):
            plgpu.barrier_wait(full.at[slot])  # at: wait full
        if m("empty before the read"):
            plgpu.barrier_arrive(empty.at[slot])
        total = total + tiles[slot, mine] * more[slot, mine]  # at: read
        if m("arrive on the other slot"):
            plgpu.barrier_arrive(empty.at[1 - slot])
        elif m("one consumer arrives"):

            @plgpu.when(wg == 0)
            def _():
                plgpu.barrier_arrive(empty.at[slot])

        elif m("one consumer arrives twice"):

            @plgpu.when(wg == 0)
            def _():
                plgpu.barrier_arrive(empty.at[slot])
                plgpu.barrier_arrive(empty.at[slot])

        elif not m("no arrival") and not m("empty before the read"):
            plgpu.barrier_arrive(empty.at[slot])  # at: arrive
        return total

    start = jnp.zeros((SHARE, 128), jnp.float32)
    steps = STEPS + 1 if m("consumer goes on") else STEPS
    total = lax.fori_loop(0, steps, turn, start)
    o[plgpu.ds(share * SHARE, SHARE)] = total  # at: result


def make(m: Switches) -> Launch:
    def body(x, y, o, tiles, more, full, empty):
        wg = lax.axis_index("wg")

        @plgpu.when(wg == CONSUMERS)
        def _():
            produce(m, x, y, tiles, more, full, empty)

        consumers = wg <= CONSUMERS if m("the producer consumes, too") else None

        @plgpu.when(wg < CONSUMERS if consumers is None else consumers)
        def _():
            consume(m, o, tiles, more, full, empty, wg)

    rng = np.random.default_rng(0)
    shape = (STEPS * ROWS, 128)
    x, y = (rng.integers(-4, 5, shape).astype(np.float32) for _ in range(2))
    full_count = 1 if m("full counts one copy") else 3 if m("full counts three") else 2
    empty_count = CONSUMERS - 1 if m("empty counts one") else CONSUMERS
    return Launch.of(
        body,
        [x, y],
        (x * y).reshape(STEPS, ROWS, 128).sum(0),
        plgpu.SMEM((SLOTS, ROWS, 128), jnp.float32),
        plgpu.SMEM((SLOTS, ROWS, 128), jnp.float32),
        plgpu.Barrier(num_barriers=SLOTS, num_arrivals=full_count),
        plgpu.Barrier(
            num_barriers=SLOTS,
            num_arrivals=CONSUMERS + 1 if m("empty counts three") else empty_count,
        ),
        threads={"wg": CONSUMERS + 1},
    )


SUBJECT = Subject(
    make,
    (
        *rows(
            "phases",
            ("empty awaited a round late", errors.RaceError, "x"),
            (
                "empty awaited from the start",
                errors.DeadlockError,
                "wait empty",
                "wait full",
            ),
            ("phase skipped", errors.RaceError, "read", "x"),
        ),
        *rows(
            "waits",
            ("no wait for empty", errors.RaceError, "x"),
            ("no wait for full", errors.RaceError, "read", "x"),
        ),
        *rows(
            "arrivals",
            ("second copy missing", errors.DeadlockError, "wait empty", "wait full"),
            ("empty before the read", errors.RaceError, "read", "x"),
            ("one consumer arrives", errors.DeadlockError, "wait empty", "wait full"),
            ("one consumer arrives twice", errors.RaceError, "read", "x"),
            ("no arrival", errors.DeadlockError, "wait empty", "wait full"),
        ),
        *rows(
            "slots",
            ("second copy into the other slot", errors.RaceError, "read", "y"),
            ("arrive on the other slot", errors.BarrierError, "wait empty"),
        ),
        *rows(
            "offsets",
            ("second copy of the first array", Wrong),
            ("consumers of one half", errors.UnwrittenResultError, "result"),
        ),
        *rows(
            "counts",
            ("producer stops early", errors.DeadlockError, "wait full"),
            ("consumer goes on", errors.DeadlockError, "wait full"),
            ("full counts one copy", errors.BarrierError, "wait full"),
            ("full counts one copy", errors.RaceError, "read", "y"),
            ("full counts one copy", errors.BarrierError, "y"),
            ("full counts three", errors.DeadlockError, "wait empty", "wait full"),
            ("empty counts one", errors.RaceError, "read", "x"),
            ("empty counts one", errors.BarrierError, "wait empty"),
            ("empty counts three", errors.DeadlockError, "wait empty", "wait full"),
        ),
        *rows("bounds", ("producer goes on", errors.OutOfBoundsError, "x")),
        *rows(
            "divergence",
            ("the producer consumes, too", errors.BarrierError, "wait full"),
        ),
    ),
)
