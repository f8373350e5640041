# SPDX-License-Identifier: Apache-2.0
"""The softmax of rows by `pallas_call`: the last block is over the array's edge."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.mutations.mutant import Launch, Subject, Switches, Wrong, rows

ROWS, COLUMNS, BLOCK = 40, 128, 16
STEPS = -(-ROWS // BLOCK)


def make(m: Switches) -> Launch:
    def body(x, o):
        value = x[...]
        axis = 0 if m("along the columns") else 1
        largest = value.max(axis=axis, keepdims=True)
        if m("largest of the first row"):
            largest = jnp.broadcast_to(largest[:1], (BLOCK, 1))
        weights = jnp.exp(value - (0 * largest if m("not shifted") else largest))
        sums = weights.sum(axis=axis, keepdims=True)
        if m("maximum for the sum"):
            sums = weights.max(axis=axis, keepdims=True)
        result = weights if m("not normalised") else weights / sums  # at: result
        if m("the result is read first"):
            result = o[...] + result  # at: read result
        if m("half a block"):
            o[:8] = result[:8]  # at: half
        elif m("one row twice"):
            o[...] = jnp.broadcast_to(result[:1], (BLOCK, COLUMNS))
        elif not m("nothing stored"):
            o[...] = result  # at: store
        if m("a row beyond the block"):
            o[BLOCK] = result[0]  # at: beyond
        if m("added to the result"):
            o[...] = o[...] + result

    def rows(i):  # at: map of the argument
        return (i + 1 if m("input of the next block") else i), 0

    def out(i):  # at: map of the result
        if m("one block of the result"):
            return 0, 0
        if m("two CTAs for a block"):
            return i // 2, 0  # at: half the blocks
        return (i + 1 if m("result of the next block") else i), 0  # at: next block

    x = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    x = 100 * x if m("not shifted") else x

    def call(interpret):
        return plgpu.pallas_call(
            body,
            out_shape=jax.ShapeDtypeStruct(x.shape, jnp.float32),
            grid=(STEPS - 1 if m("one block too few") else STEPS,),
            in_specs=[plgpu.BlockSpec((BLOCK, COLUMNS), rows)],
            out_specs=plgpu.BlockSpec((BLOCK, COLUMNS), out),
            interpret=interpret,
        )

    weights = np.exp(x - x.max(1, keepdims=True))
    return Launch(call, [x], weights / weights.sum(1, keepdims=True), tolerance=1e-6)


SUBJECT = Subject(
    make,
    (
        *rows("axes", ("along the columns", Wrong)),
        *rows(
            "offsets",
            ("not shifted", Wrong),
            ("maximum for the sum", Wrong),
            ("not normalised", Wrong),
            ("one row twice", Wrong),
            ("added to the result", Wrong),
        ),
        *rows(
            "initialisation",
            (
                "the result is read first",
                errors.UninitializedReadError,
                "read result",
                "store",
            ),
            ("half a block", errors.UninitializedReadError, "half"),
            ("nothing stored", errors.UninitializedReadError, "result"),
        ),
        *rows(
            "bounds",
            ("a row beyond the block", errors.OutOfBoundsError, "beyond"),
            ("input of the next block", errors.OutOfBoundsError, "map of the argument"),
            ("result of the next block", errors.OutOfBoundsError, "next block"),
        ),
        *rows(
            "two writers",
            ("one block of the result", errors.ArgumentError, "map of the result"),
            ("two CTAs for a block", errors.RaceError, "half the blocks"),
        ),
        *rows("counts", ("one block too few", errors.UnwrittenResultError, "store")),
    ),
    variants=("largest of the first row",),
)
