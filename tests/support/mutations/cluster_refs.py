# SPDX-License-Identifier: Apache-2.0
"""CTAs of a cluster write, read and update each other's SMEM: a ring, and a sum."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.mutations.mutant import Launch, Subject, Switches, Wrong, rows

CTAS = 4
N = 256


def make(m: Switches) -> Launch:
    def meet(barrier, name, last):
        if m(f"one CTA arrives on {name}"):
            plgpu.when(lax.axis_index("x") == 0)(lambda: plgpu.barrier_arrive(barrier))
        elif not m(f"no arrival on {name}"):
            plgpu.barrier_arrive(barrier)
        if not m(f"no wait for {name}"):
            last()

    def body(x, o, total, sums, ready, sent, done, added):
        cta = lax.axis_index("x")

        @plgpu.when(cta == 0)
        def _():
            if not m("sums are not cleared"):
                sums[...] = jnp.zeros((N,), jnp.float32)  # at: clear

        meet(ready, "ready", lambda: plgpu.barrier_wait(ready))  # at: wait ready
        first = plgpu.cluster_ref(sums, {"x": 0})
        plgpu.atomic_add(first, x[cta])  # at: first sum

        def ring(inbox):
            right, left = lax.rem(cta + 1, CTAS), lax.rem(cta + CTAS - 1, CTAS)
            if m("sent to the left"):
                right = left
            if m("sent to itself"):
                right = cta
            if m("all send to one"):
                right = lax.rem(cta, 1)
            if m("sent beyond the last"):
                right = cta + 1
            if not m("nothing is sent"):
                there = plgpu.cluster_ref(inbox, {"x": right})
                there[...] = 2 * x[cta]  # at: send
            meet(sent, "sent", lambda: plgpu.barrier_wait(sent))  # at: wait sent
            other = (
                inbox if m("read at home") else plgpu.cluster_ref(inbox, {"x": left})
            )
            value = other[...]  # at: fetch
            o[cta] = inbox[...] + value  # at: receive
            if m("cleared too early"):
                inbox[...] = jnp.zeros((N,), jnp.float32)  # at: spoil
            meet(done, "done", lambda: plgpu.barrier_wait(done))  # at: wait done

        plgpu.run_scoped(ring, plgpu.SMEM((N,), jnp.float32))
        if m("a sum that is not atomic"):
            first[...] += x[cta]  # at: plain sum
        else:
            plgpu.atomic_add(first, x[cta])  # at: add
        meet(added, "added", lambda: plgpu.barrier_wait(added))  # at: wait added

        @plgpu.when(cta == 1)
        def _():
            total[...] = (sums if m("another sum") else first)[...]  # at: result

    def barrier(name):
        if m(f"{name} is the CTA's own"):
            return plgpu.Barrier()
        return plgpu.ClusterBarrier(collective_axes="x")

    x = np.arange(CTAS * N, dtype=np.float32).reshape(CTAS, N)
    names = ("ready", "sent", "done", "added")

    inboxes = 2 * np.roll(x, 1, axis=0)
    return Launch.of(
        body,
        [x],
        [inboxes + np.roll(inboxes, 1, axis=0), 2 * x.sum(0)],
        plgpu.SMEM((N,), jnp.float32),
        *map(barrier, names),
        cluster={"x": CTAS},
    )


def _each(kind, text, error, **marks):
    """A row for each barrier."""
    return rows(kind, *((text.format(n), error, *where) for n, where in marks.items()))


def _without_order(text):
    """Rows for what lacks the order that a barrier gives."""
    ready, sent, done, added = map(text.format, ("ready", "sent", "done", "added"))
    return (
        (ready, errors.RaceError, "clear", "first sum"),
        (ready, errors.UninitializedReadError, "first sum"),
        (sent, errors.RaceError, "send", "fetch"),
        (sent, errors.RaceError, "send", "receive"),
        (sent, errors.UninitializedReadError, "receive"),
        (done, errors.KernelError, "fetch"),
        (added, errors.RaceError, "add", "result"),
    )


_WAITS = {name: (f"wait {name}",) for name in ("ready", "sent", "done", "added")}
SUBJECT = Subject(
    make,
    (
        *rows("waits", *_without_order("no wait for {}")),
        *rows("arrivals", *_without_order("{} is the CTA's own")),
        *_each("arrivals", "no arrival on {}", errors.DeadlockError, **_WAITS),
        *_each("divergence", "one CTA arrives on {}", errors.DeadlockError, **_WAITS),
        *rows(
            "axes",
            ("sent to the left", Wrong),
            ("sent to itself", Wrong),
            ("read at home", Wrong),
            ("another sum", errors.UninitializedReadError, "result"),
        ),
        *rows("bounds", ("sent beyond the last", errors.OutOfBoundsError, "send")),
        *rows(
            "two writers",
            ("all send to one", errors.RaceError, "send"),
            ("a sum that is not atomic", errors.RaceError, "plain sum"),
            ("cleared too early", errors.RaceError, "spoil", "fetch"),
        ),
        *rows(
            "initialisation",
            ("sums are not cleared", errors.UninitializedReadError, "first sum"),
            ("nothing is sent", errors.UninitializedReadError, "receive"),
        ),
    ),
)
