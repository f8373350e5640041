# SPDX-License-Identifier: Apache-2.0
"""One warpgroup stages operands of tcgen05 and stores results, another multiplies.

The first tile is added to values stored in TMEM, the second one overwrites it.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.mutations.mutant import Launch, Subject, Switches, Wrong, rows
from tests.support.tensor_products import BLACKWELL, F16, F32, storage

TILES, M, N, K = 2, 128, 16, 32
SWIZZLE = 64


def stage(m, x, a, acc, tile, ready):
    source = 0 if m("stage the first tile again") else tile
    a[...] = x[source]  # at: stage
    if not m("no commit_smem"):
        plgpu.commit_smem()
    if tile == 0 and not m("no values stored"):
        ones = plgpu.layout_cast(jnp.ones((M, N), F32), plgpu.Layout.TCGEN05)
        if m("arrive before the store"):
            plgpu.barrier_arrive(ready)
        plgpu.async_store_tmem(acc, ones)  # at: store
        if not m("no commit_tmem"):
            plgpu.commit_tmem()
        if m("arrive before the store"):
            return
    if not (m("no arrival") and tile):
        plgpu.barrier_arrive(ready)  # at: arrive
    if m("stage again"):
        a[...] = x[source]  # at: stage again
    if m("store again") and tile == 0:
        plgpu.async_store_tmem(acc, jnp.ones((M, N), F32))  # at: store again
        plgpu.commit_tmem()


def result(m, o, acc, tile, done):
    if not m("no wait for the product"):
        plgpu.barrier_wait(done)  # at: wait done
    value = plgpu.async_load_tmem(acc)  # at: load
    if not m("no wait_load"):
        plgpu.wait_load_tmem()
    o[0 if m("result of the first tile again") else tile] = value  # at: result


def multiply(m, a, b, acc, tile, ready, done):
    if not m("no wait for the operands"):
        plgpu.barrier_wait(ready)  # at: wait ready
    if m("commit before the product"):
        plgpu.tcgen05_commit_arrive(done)
    accumulate = tile == 0
    if m("adds to the tile before"):
        accumulate = True
    if m("overwrites the values"):
        accumulate = False
    right = b.at[:N] if not m("other columns of b") else b.at[N:]
    plgpu.tcgen05_mma(acc, a, right.T, accumulate=accumulate)  # at: mma
    if m("commit before the product") or m("no commit"):
        return
    plgpu.tcgen05_commit_arrive(done)  # at: commit
    if m("commit twice"):
        plgpu.tcgen05_commit_arrive(done)  # at: second commit


def make(m: Switches) -> Launch:
    def body(x, y, o, a, b, acc, loaded, ready, done):
        wg = lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def _():
            for tile in range(TILES):
                stage(m, x, a, acc, tile, ready)
                result(m, o, acc, tile, done)

        @plgpu.when(wg == 1)
        def _():
            plgpu.copy_gmem_to_smem(y, b, loaded)  # at: fetch
            if not m("no wait for the fetch"):
                plgpu.barrier_wait(loaded)
            for tile in range(TILES):
                multiply(m, a, b, acc, tile, ready, done)

    rng = np.random.default_rng(0)
    x = rng.integers(-3, 4, (TILES, M, K)).astype(np.float16)
    y = rng.integers(-3, 4, (2 * N, K)).astype(np.float16)
    products = x.astype(np.float32) @ y[:N].astype(np.float32).T
    orders = not m("ready does not order the tensor core")
    arrivals = 2 if m("two arrivals expected") else 1
    transforms = storage(F16, SWIZZLE)
    return Launch.of(
        body,
        [x, y],
        products + np.array([1, 0], np.float32)[:, None, None],
        plgpu.SMEM((M, K), F16, transforms=transforms),
        plgpu.SMEM((2 * N, K), F16, transforms=transforms),
        plgpu.TMEM((M, N), F32),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=arrivals, orders_tensor_core=orders),
        plgpu.Barrier(orders_tensor_core=True),
        threads={"wg": 2},
        compiler_params=BLACKWELL,
    )


SUBJECT = Subject(
    make,
    (
        *rows(
            "waits",
            ("no wait for the product", errors.RaceError, "load", "mma"),
            ("no wait for the product", errors.BarrierError, "wait ready"),
            ("no wait for the operands", errors.RaceError, "mma"),
            ("no wait for the operands", errors.UninitializedReadError, "mma"),
            ("no wait for the fetch", errors.RaceError, "mma", "fetch"),
            ("no wait_load", errors.RaceError, "mma", "load"),
        ),
        *rows(
            "commits",
            ("no commit_smem", errors.RaceError, "mma", "stage"),
            ("no commit_tmem", errors.RaceError, "mma", "store"),
            ("no commit", errors.DeadlockError, "wait done"),
            ("commit before the product", errors.RaceError, "load", "mma"),
            ("commit twice", errors.RaceError, "load", "mma"),
            ("commit twice", errors.BarrierError, "wait done"),
        ),
        *rows(
            "arrivals",
            ("no arrival", errors.DeadlockError, "wait ready"),
            ("arrive before the store", errors.RaceError, "mma", "store"),
        ),
        *rows(
            "fences", ("ready does not order the tensor core", errors.RaceError, "mma")
        ),
        *rows("counts", ("two arrivals expected", errors.DeadlockError, "wait ready")),
        *rows(
            "two writers",
            ("stage again", errors.RaceError, "mma", "stage again"),
            ("store again", errors.RaceError, "mma", "store again"),
        ),
        *rows(
            "initialisation", ("no values stored", errors.UninitializedReadError, "mma")
        ),
        *rows(
            "offsets",
            ("stage the first tile again", Wrong),
            ("result of the first tile again", errors.UnwrittenResultError, "result"),
            ("adds to the tile before", Wrong),
            ("overwrites the values", Wrong),
            ("other columns of b", Wrong),
        ),
    ),
)
