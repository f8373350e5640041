# SPDX-License-Identifier: Apache-2.0
"""A ring in a pair of CTAs: TMA fetches, the tensor core multiplies, threads store.

A warpgroup fetches: each CTA copies half of the left tile to both CTAs, and a right
tile of its own. Another one issues the products, a third one brings them from TMEM to
GMEM. Its mistakes are those that programmers of such rings make most.
"""

from __future__ import annotations

import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.mutations.mutant import Launch, Subject, Switches, rows
from tests.support.tensor_products import BLACKWELL, F16, F32, storage

CTAS, STEPS, SLOTS = 2, 5, 2
M, N, K = 128, 16, 32
FETCHER, ISSUER, STORER = range(3)


def fetch(m: Switches, x, y, a, b, full, empty):
    cta = lax.axis_index("c")
    steps = STEPS + 1 if m("a tile too many") else STEPS

    @plgpu.loop(0, steps)
    def _(k):
        slot = lax.rem(k, SLOTS)
        first = SLOTS if m("empty awaited a round late") else 0
        if not m("no wait for empty"):

            @plgpu.when(k >= first)
            def _():
                plgpu.barrier_wait(empty.at[slot])  # at: wait empty

        plgpu.copy_gmem_to_smem(  # at: x
            x.at[k], a.at[slot], full.at[slot], collective_axes="c"
        )
        plgpu.copy_gmem_to_smem(y.at[cta, k], b.at[slot], full.at[slot])  # at: y


def multiply(m: Switches, a, b, acc, full, done, drained):
    @plgpu.loop(0, STEPS)
    def _(k):
        slot = lax.rem(k, SLOTS)
        if m("full awaited but once"):

            @plgpu.when(k != 1)
            def _():
                plgpu.barrier_wait(full.at[slot])

        elif not m("no wait for full"):
            plgpu.barrier_wait(full.at[slot])  # at: wait full
        plgpu.barrier_wait(drained)  # at: wait drained
        left, right = a.at[slot], b.at[slot].T
        plgpu.tcgen05_mma(acc, left, right, accumulate=False)  # at: mma
        plgpu.tcgen05_commit_arrive(done)  # at: commit


def store(m: Switches, o, acc, staged, empty, done, drained):
    cta = lax.axis_index("c")

    @plgpu.loop(0, STEPS)
    def _(k):
        if not m("no wait for the product"):
            plgpu.barrier_wait(done)  # at: wait done
        value = plgpu.async_load_tmem(acc)  # at: load
        if not m("no wait_load"):
            plgpu.wait_load_tmem()
        plgpu.barrier_arrive(drained)  # at: drain
        if not m("no slot is released"):
            plgpu.barrier_arrive(empty.at[lax.rem(k, SLOTS)])  # at: release
        if not m("no wait for the store"):
            plgpu.wait_smem_to_gmem(0)
        staged[...] = value  # at: stage
        if not m("no commit"):
            plgpu.commit_smem()
        row = 0 if m("both CTAs store to one part") else cta
        step = k + 1 if m("stored a step ahead") else k
        plgpu.copy_smem_to_gmem(staged, o.at[row, step])  # at: store

    plgpu.wait_smem_to_gmem(0)


def make(m: Switches) -> Launch:
    def body(x, y, o, a, b, staged, acc, full, empty, done, drained):
        wg = lax.axis_index("wg")
        many = 240 if m("registers for two") else 40

        @plgpu.when(wg == FETCHER)
        def _():
            plgpu.set_max_registers(40, action="decrease")  # at: few
            fetch(m, x, y, a, b, full, empty)

        @plgpu.when(wg == ISSUER)
        def _():
            action = "increase" if many > 40 else "decrease"
            plgpu.set_max_registers(many, action=action)  # at: more
            multiply(m, a, b, acc, full, done, drained)

        @plgpu.when(wg == STORER)
        def _():
            plgpu.set_max_registers(240, action="increase")  # at: many
            store(m, o, acc, staged, empty, done, drained)

    rng = np.random.default_rng(0)
    x = rng.integers(-3, 4, (STEPS, M, K)).astype(np.float16)
    y = rng.integers(-3, 4, (CTAS, STEPS, N, K)).astype(np.float16)
    copies = 1 if m("full counts one copy") else 3 if m("full counts three") else 2
    free = {"num_barriers": SLOTS, "initially_complete": True}
    empty = plgpu.ClusterBarrier(collective_axes="c", **free)
    if m("empty is the CTA's own"):
        empty = plgpu.Barrier(**free)
    orders = not m("drained does not order the tensor core")
    transforms = storage(F16, 64)
    return Launch.of(
        body,
        [x, y],
        np.einsum("kmd,cknd->ckmn", x, y, dtype=np.float32),
        plgpu.SMEM((SLOTS, M, K), F16, transforms=transforms),
        plgpu.SMEM((SLOTS, N, K), F16, transforms=transforms),
        plgpu.SMEM((M, N), F32),
        plgpu.TMEM((M, N), F32),
        plgpu.Barrier(num_barriers=SLOTS, num_arrivals=copies),
        empty,
        plgpu.Barrier(orders_tensor_core=True),
        plgpu.Barrier(initially_complete=True, orders_tensor_core=orders),
        cluster={"c": CTAS},
        threads={"wg": 3},
        compiler_params=BLACKWELL,
    )


RACE, STUCK, LOST = errors.RaceError, errors.DeadlockError, errors.BarrierError
UNWRITTEN = errors.UninitializedReadError
SUBJECT = Subject(
    make,
    (
        *rows(
            "waits",
            ("no wait for full", RACE, "x", "mma"),
            ("no wait for full", UNWRITTEN, "mma"),
            ("no wait for empty", RACE, "x"),
            ("no wait for the product", UNWRITTEN, "load"),
            ("no wait for the product", LOST, "wait drained", "drain"),
            ("no wait for the product", LOST, "wait empty", "release"),
            ("no wait_load", RACE, "mma", "load"),
            ("no wait for the store", RACE, "stage", "store"),
        ),
        *rows(
            "phases",
            ("empty awaited a round late", RACE, "x"),
            ("full awaited but once", RACE, "x", "mma"),
        ),
        *rows(
            "counts",
            ("full counts one copy", LOST, "x", "y"),
            ("full counts three", STUCK, "wait full"),
            ("registers for two", errors.OutOfResources, "few", "more", "many"),
        ),
        *rows("arrivals", ("no slot is released", STUCK, "wait empty", "wait full")),
        *rows(
            "fences",
            ("no commit", RACE, "stage", "store"),
            ("drained does not order the tensor core", RACE, "mma", "load"),
        ),
        *rows("axes", ("empty is the CTA's own", RACE, "x")),
        *rows("two writers", ("both CTAs store to one part", RACE, "store")),
        *rows(
            "bounds",
            ("a tile too many", errors.OutOfBoundsError, "x"),
            ("stored a step ahead", errors.OutOfBoundsError, "store"),
        ),
    ),
)

_COPY = "call barrier_wait on the copy's barrier first"
_READERS = "wait instead for a barrier on which each of them arrives"
_IN_STEP = "wait for the readers of the previous phase before arriving"
_COUNT = "compare the arrivals with the barrier's num_arrivals"
_ORDERED = "wait_load_tmem.*waits for a barrier with orders_tensor_core"
# What the hint of each mistake says, whichever of its reports it is.
HINTS = {
    "no wait for full": f"{_COPY}|copy to it and wait for the barrier",
    "no wait for empty": _READERS,
    "no wait for the product": f"wait for a barrier on which .*commit|{_IN_STEP}",
    "no wait_load": r"call wait_load_tmem\(\)",
    "no wait for the store": r"call wait_smem_to_gmem\(0\)",
    "empty awaited a round late": _READERS,
    "full awaited but once": _COPY,
    "full counts one copy": "raise num_arrivals",
    "full counts three": _COUNT,
    "registers for two": "decrease the producer's count",
    "no slot is released": _COUNT,
    "no commit": r"call commit_smem\(\)",
    "drained does not order the tensor core": _ORDERED,
    "empty is the CTA's own": f"declare the barrier as a ClusterBarrier|{_READERS}",
    "both CTAs store to one part": "let each copy go to elements of its own",
    "a tile too many": "check the index",
    "stored a step ahead": "check the index",
}
