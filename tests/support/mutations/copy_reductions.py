# SPDX-License-Identifier: Apache-2.0
"""CTAs add their parts of a sum to one result by copies, all at once."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support import everywhere
from tests.support.mutations.mutant import Launch, Subject, Switches, Wrong, rows

CTAS, STEPS = 3, 2
TILE = (8, 128)


def make(m: Switches) -> Launch:
    shape = (1024,) if m("a row") else TILE  # a row needs no tensor map

    def body(total, x, tiles, full):
        cta = lax.axis_index("i")
        for step in range(STEPS):
            tile = tiles.at[0 if m("one buffer") else step]
            row = 0 if m("one part for all CTAs") else cta
            plgpu.copy_gmem_to_smem(x.at[row, step], tile, full)  # at: fetch
            if not m("no wait for the part"):
                plgpu.barrier_wait(full)
            tile[...] = 2 * tile[...]  # at: double
            if not m("no commit"):
                plgpu.commit_smem()
            op = None if m("not combined") else "add"
            op = "max" if m("the largest") else op
            plgpu.copy_smem_to_gmem(tile, total, reduction_op=op)  # at: add
            if m("overwritten too early"):
                tile[...] = tile[...] * 0  # at: overwrite
        if m("read without an order"):
            tiles[0] = total[...]  # at: read
        if m("added by threads too"):
            plgpu.atomic_add(total, 1)  # at: atomic
        plgpu.wait_smem_to_gmem(0)

    x = np.arange(CTAS * STEPS * 1024, dtype=np.int32).reshape(CTAS, STEPS, *shape)
    start = np.full(shape, 5, np.int32)

    tiles = plgpu.SMEM((STEPS, *shape), jnp.int32)
    call = everywhere.in_place(body, (), tiles, plgpu.Barrier(), grid={"i": CTAS})
    return Launch(call, [start, x], start + 2 * x.sum((0, 1)))


SUBJECT = Subject(
    make,
    (
        *rows("offsets", ("one part for all CTAs", Wrong), ("the largest", Wrong)),
        *rows(
            "waits",
            ("one buffer", errors.RaceError, "fetch", "add"),
            ("no wait for the part", errors.RaceError, "fetch", "double"),
            ("overwritten too early", errors.RaceError, "add", "overwrite"),
            ("read without an order", errors.RaceError, "add", "read"),
        ),
        *rows("commits", ("no commit", errors.RaceError, "double", "add")),
        *rows(
            "two writers",
            ("not combined", errors.RaceError, "add"),
            ("added by threads too", errors.RaceError, "add", "atomic"),
        ),
    ),
    variants=("a row",),
)
