# SPDX-License-Identifier: Apache-2.0
"""A ring whose author fences what copies overwrite: nothing is automatic."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.mutations.mutant import Launch, Subject, Switches, rows

STEPS, SLOTS, N = 4, 2, 128
F32 = jnp.float32


def make(m: Switches) -> Launch:
    def body(x, o, ring, full, empty):
        @plgpu.when(lax.axis_index("wg") == 0)
        def _():
            for step in range(STEPS):
                slot = step % SLOTS
                if step >= SLOTS:
                    plgpu.barrier_wait(empty.at[slot])
                    if m("the copier fences"):
                        plgpu.commit_smem()
                source, target = x.at[step], ring.at[slot]
                plgpu.copy_gmem_to_smem(source, target, full.at[slot])  # at: copy

        @plgpu.when(lax.axis_index("wg") == 1)
        def _():
            total = jnp.zeros((N,), F32)
            for step in range(STEPS):
                slot = step % SLOTS
                plgpu.barrier_wait(full.at[slot])
                if m("a fence before the read"):
                    plgpu.commit_smem()
                total += ring[slot]  # at: read
                if step + SLOTS >= STEPS:
                    continue
                if not any(
                    [
                        m("no fence"),
                        m("the copier fences"),
                        m("a fence before the read"),
                        m("a fence after the arrival"),
                    ]
                ):
                    plgpu.commit_smem()
                plgpu.barrier_arrive(empty.at[slot])
                if m("a fence after the arrival"):
                    plgpu.commit_smem()
            o[...] = total

    x = np.arange(STEPS * N, dtype=np.float32).reshape(STEPS, N)
    return Launch.of(
        body,
        [x],
        x.sum(0),
        plgpu.SMEM((SLOTS, N), F32),
        plgpu.Barrier(num_barriers=SLOTS),
        plgpu.Barrier(num_barriers=SLOTS),
        threads={"wg": 2},
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )


RACE = errors.RaceError
SUBJECT = Subject(
    make,
    rows(
        "fences",
        ("no fence", RACE, "copy", "read"),
        ("a fence before the read", RACE, "copy", "read"),
        ("a fence after the arrival", RACE, "copy", "read"),
    ),
    variants=("the copier fences",),
)
