# SPDX-License-Identifier: Apache-2.0
"""Index arrays that are ranges are accessed as wide as slices, masks included."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support.everywhere import check
from tests.support.indexed_programs import SWIZZLED, in_smem, kernel

BLOCK = 512


def widths(make, *args):
    """Returns the widths of the loads and stores, in elements."""
    (report,) = plgpu.offline.lower(make(None), *args)
    found = set()
    for text in report.mlir.splitlines():
        plain = re.search(r"llvm\.(load|store) ", text)
        under_a_mask = re.search(r"(ld|st)\.global(?:\.v(\d))?\.b32", text)
        if under_a_mask:
            found.add(int(under_a_mask[2] or 1))
        elif plain and "f32" in text:
            vector = re.search(r"vector<(\d+)xf32>", text)
            found.add(int(vector[1]) if vector else 1)
    return found


def masked(n):
    def body(x, o):
        offsets = lax.axis_index("i") * BLOCK + jnp.arange(BLOCK)
        mask = offsets < n
        value = plgpu.load(x, offsets, mask=mask, other=0.0)
        plgpu.store(o, offsets, 2 * value, mask=mask)

    return kernel(body, (n,), grid={"i": -(-n // BLOCK)})


def moves(make, args, expected, wanted):
    """What a kernel gives everywhere, and the widths of its accesses."""
    check(make, args, expected)
    assert widths(make, *args) == wanted


@pytest.mark.parametrize(
    ("n", "wanted"),
    [(1000, {4}), (1002, {4, 2}), (1001, {4, 1}), (1003, {4, 2, 1})],
)
def test_a_mask_leaves_wide_what_it_does_not_cut(n, wanted):
    x = np.arange(n, dtype=np.float32)
    moves(masked(n), [x], 2 * x, wanted)


CUTS = {
    "below": lambda i, n: i < 1005,
    "from": lambda i, n: i >= 3,
    "between": lambda i, n: (i >= 3) & (i < 62),
    "outside": lambda i, n: (i < 3) | (i >= 62),
    "below a value": lambda i, n: i < n,
    "from a value": lambda i, n: i > 1000 - n,
    "a shifted range": lambda i, n: i + n < 1016,
    "two values": lambda i, n: (i >= 3) ^ (i > n),
    "chosen": lambda i, n: jnp.where(n > 9, i < 3, i >= 62),
    "every third": lambda i, n: i % 3 == 0,
}


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
@pytest.mark.parametrize("size", [1024, 1019])
def test_vectors_that_a_mask_cuts(name, dtype, size):
    """An array of 1019 elements does not end with a vector."""
    i, x = np.arange(1024), (np.arange(size) % 7).astype(dtype)

    def body(x, n, o):
        i = jnp.arange(1024)
        o[...] = jnp.full(o.shape, 2, o.dtype)
        mask = CUTS[name](i, n[0]) & (i < size)
        part = plgpu.load(x, i, mask=mask, other=jnp.ones((), o.dtype))
        plgpu.store(o, i, part + part, mask=CUTS[name](i, n[0]))

    mask = np.asarray(CUTS[name](i, 13))
    loaded = np.where(mask & (i < size), np.resize(x, 1024), np.ones((), dtype))
    expected = np.where(mask, loaded + loaded, np.full((), 2, dtype))
    n = np.array([13], np.int32)
    check(kernel(body, (1024,), expected.dtype), [x, n], expected)


X = np.arange(2 * BLOCK, dtype=np.float32)


@pytest.mark.parametrize(("start", "width"), [(4, 4), (2, 2), (1, 1)])
def test_a_start_that_is_not_aligned_is_not_wide(start, width):
    def body(x, o):
        i = jnp.arange(BLOCK)
        o[i] = x[i + start]

    moves(kernel(body, (BLOCK,)), [X], X[start : start + BLOCK], {width, 4})


def test_rows_and_columns():
    def body(x, o):
        rows = (lax.axis_index("i") * 16 + jnp.arange(16))[:, None]
        columns = jnp.arange(64)[None]
        mask = (rows < 24) & (columns < 60)
        value = plgpu.load(x, (rows, columns), mask=mask, other=0.0)
        plgpu.store(o, (rows, columns), value, mask=mask)

    x = np.arange(24 * 60, dtype=np.float32).reshape(24, 60)
    moves(kernel(body, (24, 60), grid={"i": 2}), [x], x, {4})


def test_rows_that_an_array_names():
    def body(x, index, o):
        columns = jnp.arange(64)
        part = index[...][:, None], columns[None]
        o[...] = plgpu.load(x, part, mask=(columns < 60)[None], other=-1.0)

    x = np.arange(32 * 64, dtype=np.float32).reshape(32, 64)
    index = np.arange(16, dtype=np.int32)[::-1] * 2
    expected = np.where(np.arange(64) < 60, x[index], -1)
    moves(kernel(body, (16, 64)), [x, index], expected, {4})


def test_ranges_of_a_loop_that_adds_a_block():
    def body(x, o):
        def step(_, state):
            offsets, total = state
            mask = offsets < 1400
            total += plgpu.load(x, offsets, mask=mask, other=0.0)
            return offsets + BLOCK, total

        start = jnp.arange(BLOCK), jnp.zeros(BLOCK, jnp.float32)
        o[...] = lax.fori_loop(0, 3, step, start)[1]

    x = np.arange(1400, dtype=np.float32)
    expected = np.pad(x, (0, 136)).reshape(3, BLOCK).sum(0)
    moves(kernel(body, (BLOCK,)), [x], expected, {4})


@pytest.mark.parametrize("carries", [3, 9])
def test_what_a_loop_passes_through_many_carries(carries):
    """The start that is not aligned reaches the access after as many iterations."""

    def body(x, o):
        def step(i, starts):
            o[i] = x[starts[0] + jnp.arange(BLOCK)]
            return (*starts[1:], jnp.int32(3))

        starts = tuple(jnp.int32(4) for _ in range(carries))
        lax.fori_loop(0, carries + 1, step, starts)

    expected = np.stack([X[s : s + BLOCK] for s in (*[4] * carries, 3)])
    moves(kernel(body, expected.shape), [X], expected, {1, 4})


def test_a_function_that_is_called_with_different_starts():
    part = jax.jit(lambda x, start: x[start + jnp.arange(BLOCK)])

    def body(x, o):
        o[0] = part(x, 4)
        o[1] = part(x, 3)

    expected = np.stack([X[4:][:BLOCK], X[3:][:BLOCK]])
    moves(kernel(body, expected.shape), [X], expected, {1, 4})


@pytest.mark.parametrize("transforms", [(), SWIZZLED], ids=["plain", "tiled"])
def test_ranges_of_shared_memory(transforms):
    def body(x, o, s):
        s[...] = x[...]
        rows, columns = jnp.arange(64)[:, None], jnp.arange(128)[None]
        mask = columns >= 8
        o[...] = plgpu.load(s, (rows, columns), mask=mask, other=0.0)

    x = np.arange(64 * 128, dtype=np.float32).reshape(64, 128)
    expected = np.where(np.arange(128) >= 8, x, 0)
    check(kernel(body, (64, 128), **in_smem(transforms)), [x], expected)


def test_an_access_in_a_branch_that_is_never_taken():
    def body(x, o):
        o[...] = x[...]

        @plgpu.when(lax.eq(jnp.int32(0), 1))
        def _():
            plgpu.store(o, jnp.arange(BLOCK), x[...] + 1)

    x = np.arange(BLOCK, dtype=np.float32)
    check(kernel(body, (BLOCK,)), [x], x)
