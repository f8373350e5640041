# SPDX-License-Identifier: Apache-2.0
"""A product of one tile: two slots, one wgmma in flight, the result by TMA."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.mutations.mutant import Launch, Subject, Switches, Wrong, rows

F16, F32 = jnp.float16, jnp.float32
SIZE, DEPTH, STEPS, SLOTS = 64, 64, 4, 2
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def make(m: Switches) -> Launch:
    def body(a, b, o, sa, sb, staged, full):
        def fetch(k, slot):
            at = plgpu.ds(k * DEPTH, DEPTH)
            columns = plgpu.ds(0, DEPTH) if m("columns of the first step") else at
            part = a.at[:, columns]
            plgpu.copy_gmem_to_smem(part, sa.at[slot], full.at[slot])  # at: fetch a
            plgpu.copy_gmem_to_smem(b.at[at], sb.at[slot], full.at[slot])  # at: fetch b

        for k in range(SLOTS):
            fetch(k, k)

        def scope(acc):
            def turn(k, _):
                slot = lax.rem(k, SLOTS)
                if not m("no wait for operands"):
                    plgpu.barrier_wait(full.at[slot])  # at: wait
                other = 1 - slot if m("operands of two slots") else slot
                right = (
                    sb.at[other].T if m("right operand transposed") else sb.at[other]
                )
                plgpu.wgmma(acc, sa.at[slot], right)  # at: wgmma
                if not m("no wait for the product"):
                    plgpu.wgmma_wait(1 if m("wait leaves a product") else 0)
                refilled = 1 - slot if m("refill the slot in use") else slot
                ahead = k + 1 if m("refill with the next") else k + SLOTS

                @plgpu.when(k + SLOTS < STEPS)
                def _():
                    fetch(ahead, refilled)

            steps = STEPS - 1 if m("one product too few") else STEPS
            lax.fori_loop(0, steps, turn, None)
            return acc[...]  # at: accumulator

        total = plgpu.run_scoped(scope, plgpu.ACC((SIZE, SIZE)))
        if m("stage half"):
            staged[:32] = total[:32]
        else:
            staged[...] = total  # at: stage
        if not m("no commit"):
            plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, o)  # at: store
        if m("reuse before the store has read"):
            staged[...] = jnp.zeros_like(total)  # at: reuse
        if not m("no wait for the store"):
            plgpu.wait_smem_to_gmem(0)

    rng = np.random.default_rng(0)
    a = rng.integers(-2, 3, (SIZE, STEPS * DEPTH)).astype(np.float16)
    b = rng.integers(-2, 3, (STEPS * DEPTH, SIZE)).astype(np.float16)
    count = 1 if m("one arrival for two copies") else 2
    count = 3 if m("three arrivals for two copies") else count
    return Launch.of(
        body,
        [a, b],
        a.astype(np.float32) @ b.astype(np.float32),
        plgpu.SMEM((SLOTS, SIZE, DEPTH), F16, transforms=TILED),
        plgpu.SMEM((SLOTS, DEPTH, SIZE), F16, transforms=TILED),
        plgpu.SMEM((SIZE, SIZE), F32),
        plgpu.Barrier(num_barriers=SLOTS, num_arrivals=count),
    )


SUBJECT = Subject(
    make,
    (
        *rows(
            "offsets",
            ("columns of the first step", Wrong),
            ("refill with the next", Wrong),
        ),
        *rows(
            "waits",
            ("no wait for operands", errors.RaceError, "fetch a", "wgmma"),
            ("no wait for the product", errors.RaceError, "fetch a", "wgmma"),
            ("no wait for the store", errors.KernelError, "store"),
        ),
        *rows(
            "slots",
            ("operands of two slots", errors.RaceError, "fetch b", "wgmma"),
            ("refill the slot in use", errors.RaceError, "fetch a"),
        ),
        *rows("axes", ("right operand transposed", Wrong)),
        *rows(
            "counts",
            ("wait leaves a product", errors.RaceError, "fetch a", "wgmma"),
            ("one product too few", errors.BarrierError, "fetch a"),
            ("one arrival for two copies", errors.BarrierError, "fetch b"),
            ("one arrival for two copies", errors.RaceError, "fetch b", "wgmma"),
            ("one arrival for two copies", errors.BarrierError, "wait"),
            ("three arrivals for two copies", errors.DeadlockError, "wait"),
        ),
        *rows("initialisation", ("stage half", errors.UninitializedReadError, "store")),
        *rows("commits", ("no commit", errors.RaceError, "stage", "store")),
        *rows(
            "two writers",
            ("reuse before the store has read", errors.RaceError, "reuse", "store"),
        ),
    ),
)
