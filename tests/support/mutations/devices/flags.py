# SPDX-License-Identifier: Apache-2.0
"""Atomic operations hand rows over: places in an inbox, and flags that are polled."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.mutations.mutant import Launch, Subject, Switches, rows

DEVICES, N = 3, 128
I32 = jnp.int32


def make(m: Switches) -> Launch:
    def poll(flag, count):
        sem = "relaxed" if m("a relaxed poll") else "acquire"
        scope = None if m("the scope of one device") else "sys"

        def read(_):
            return plgpu.atomic_add(flag.at[0], 0, sem=sem, scope=scope)  # at: poll

        lax.while_loop(lambda seen: seen < count, read, I32(0))

    def body(x, o, inbox, taken, stored, done):
        i = lax.axis_index("x")
        sem = "relaxed" if m("a relaxed addition") else "release"
        place = plgpu.atomic_add(plgpu.remote_ref(taken, 0).at[0], 1)
        place = 0 if m("no place is taken") else place
        plgpu.remote_ref(inbox, 0)[place] = x[0]  # at: send
        plgpu.atomic_add(plgpu.remote_ref(stored, 0).at[0], 1, sem=sem)
        if m("the row after the flag"):
            plgpu.remote_ref(inbox, 0)[place] = x[0] + 1  # at: late

        @plgpu.when(i == 0)
        def _():
            poll(stored, DEVICES)
            total = jnp.zeros((N,), jnp.float32)
            for d in range(DEVICES):
                total += inbox[d]  # at: read
            for d in range(DEVICES):
                to = (d - m("the previous device")) % DEVICES
                plgpu.remote_ref(o, to)[0] = total  # at: push
                plgpu.atomic_add(plgpu.remote_ref(done, d).at[0], 1, sem=sem)

        if not m("no poll at the end"):
            poll(done, 1)

    x = np.arange(DEVICES * N, dtype=np.float32).reshape(-1, N)
    counter = plgpu.GMEM((1,), I32, init=0)
    return Launch.on_mesh(
        {"x": DEVICES},
        body,
        [x],
        np.tile(x.sum(0), (DEVICES, 1)),
        plgpu.GMEM((DEVICES, N), jnp.float32),
        counter,
        counter,
        counter,
    )


RACE = errors.RaceError
SUBJECT = Subject(
    make,
    (
        *rows("fences", ("a relaxed addition", RACE, "send"),
              ("a relaxed poll", RACE, "send"),
              ("the scope of one device", RACE, "poll")),
        *rows("two writers", ("no place is taken", RACE, "send")),
        *rows("signals", ("the row after the flag", RACE, "late")),
        *rows("peers", ("the previous device", RACE, "push")),
        *rows("waits", ("no poll at the end", RACE, "push")),
    ),
)  # fmt: skip
