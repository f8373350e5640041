# SPDX-License-Identifier: Apache-2.0
"""Two products as in attention: the first one's result is an operand, through SMEM."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.mutations.mutant import Launch, Subject, Switches, Wrong, rows

F16, F32 = jnp.float16, jnp.float32
SIZE = 64
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def make(m: Switches) -> Launch:
    def product(left, right, wait=True):
        def scope(acc):
            plgpu.wgmma(acc, left, right)  # at: wgmma
            if wait:
                plgpu.wgmma_wait(0)
            return acc[...]  # at: accumulator

        return plgpu.run_scoped(scope, plgpu.ACC((SIZE, SIZE)))

    def body(q, k, v, o, sq, sk, sv, sp, first, second):
        plgpu.copy_gmem_to_smem(q, sq, first)  # at: fetch q
        plgpu.copy_gmem_to_smem(k, sk, second if m("k signals the second") else first)
        source = k if m("k twice") else v
        plgpu.copy_gmem_to_smem(source, sv, second)  # at: fetch v
        if not m("no wait for q and k"):
            plgpu.barrier_wait(first)  # at: wait first
        keys = sk if m("keys not transposed") else sk.T
        scores = product(sq, keys)
        axis = 0 if m("maximum along the queries") else 1
        largest = scores.max(axis=axis)
        shifted = scores - (
            largest[None, :] if m("maximum along the queries") else largest[:, None]
        )
        weights = jnp.exp(shifted).astype(F16)
        if m("weights over the keys"):
            sk[...] = weights  # at: weights over k
        elif m("half of the weights"):
            sp[:32] = weights[:32]
        else:
            sp[...] = weights  # at: weights
        if not m("no commit"):
            plgpu.commit_smem()
        if not m("no wait for v"):
            awaited = first if m("wait for the first again") else second
            plgpu.barrier_wait(awaited)  # at: wait second
        left = sq if m("queries for weights") else sp
        left = sk if m("weights over the keys") else left
        total = product(left, sv, wait=not m("no wait for the second product"))
        sums = weights.astype(F32).sum(axis=1)
        if not m("not normalised"):
            total = total / sums[:, None]
        o[...] = total  # at: result

    rng = np.random.default_rng(0)
    q, k, v = (rng.integers(-1, 2, (SIZE, SIZE)).astype(np.float16) for _ in range(3))

    scores = q.astype(np.float32) @ k.T.astype(np.float32)
    weights = np.exp(scores - scores.max(1, keepdims=True)).astype(np.float16)
    weights = weights.astype(np.float32)
    expected = weights @ v.astype(np.float32) / weights.sum(1, keepdims=True)
    return Launch.of(
        body,
        [q, k, v],
        expected,
        *[plgpu.SMEM((SIZE, SIZE), F16, transforms=TILED) for _ in range(4)],
        plgpu.Barrier(num_arrivals=3 if m("three copies expected") else 2),
        plgpu.Barrier(num_arrivals=2 if m("two copies expected") else 1),
        tolerance=1e-3,
    )


SUBJECT = Subject(
    make,
    (
        *rows(
            "arrivals",
            ("k signals the second", errors.BarrierError, "fetch v"),
            ("k signals the second", errors.DeadlockError, "wait first"),
        ),
        *rows(
            "offsets",
            ("k twice", Wrong),
            ("queries for weights", Wrong),
            ("not normalised", Wrong),
        ),
        *rows(
            "waits",
            ("no wait for q and k", errors.RaceError, "fetch q", "wgmma"),
            ("no wait for v", errors.RaceError, "fetch v", "wgmma"),
        ),
        *rows(
            "axes", ("keys not transposed", Wrong), ("maximum along the queries", Wrong)
        ),
        *rows(
            "initialisation",
            ("half of the weights", errors.UninitializedReadError, "wgmma"),
        ),
        *rows("commits", ("no commit", errors.RaceError, "weights", "wgmma")),
        *rows(
            "phases", ("wait for the first again", errors.DeadlockError, "wait second")
        ),
        *rows(
            "counts",
            ("three copies expected", errors.DeadlockError, "wait first"),
            ("two copies expected", errors.DeadlockError, "wait second"),
        ),
    ),
    variants=("weights over the keys", "no wait for the second product"),
)
