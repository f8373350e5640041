# SPDX-License-Identifier: Apache-2.0
"""Loops with `num_stages`: loads from GMEM become copies that are issued before."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.everywhere import gives
from tests.support.semantics import BOTH, under

RNG = np.random.default_rng(0)
X = RNG.integers(-9, 9, size=(128, 64)).astype(np.float32)
# Rows of 4 bytes more than multiples of 16.
ODD = RNG.integers(-9, 9, size=(128, 65)).astype(np.float32)
TABLE = RNG.integers(0, 16, size=(12,)).astype(np.int32)
ROWS = RNG.integers(0, 128, size=(6, 32)).astype(np.int32)
ZEROS = np.zeros((8, 64), np.float32)


def summed(n, load, shape=(8, 64), **options):
    """The sum of what `load(i)` loads, as a loop."""
    start = jnp.zeros(shape, jnp.float32)
    return plgpu.loop(0, n, init_carry=start, **options)(lambda i, c: c + load(i))


def tiles(x, trips):
    return x[: 8 * trips, :64].reshape(trips, 8, 64).sum(0)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("trips", [0, 1, 2, 3, 4, 11])
@pytest.mark.parametrize("array", [X, ODD], ids=["tma", "cp_async"])
def test_a_loop_of_any_length_copies_tiles(num_stages, trips, array):
    def body(x, o):
        o[...] = summed(
            trips,
            lambda i: x[plgpu.ds(i * 8, 8), plgpu.ds(0, 64)],
            num_stages=num_stages,
        )

    everywhere.run(body, [array], tiles(array, trips))


@pytest.mark.parametrize("trips", [0, 1, 2, 3, 9])
@pytest.mark.parametrize("array", [X, ODD], ids=["tma", "cp_async"])
def test_the_number_of_iterations_may_be_a_value(trips, array):
    def body(n, x, o):
        o[...] = summed(
            n[0], lambda i: x[plgpu.ds(i * 8, 8), plgpu.ds(0, 64)], num_stages=3
        )

    n = np.array([trips], np.int32)
    everywhere.run(body, [n, array], tiles(array, trips))


@pytest.mark.parametrize("trips", [0, 1, 2, 9])
def test_an_index_that_is_loaded_is_loaded_before(trips):
    def body(n, table, x, o):
        def tile(i):
            start = plgpu.multiple_of(table[i] * 8, 8)
            return x[plgpu.ds(start, 8), :]

        o[...] = summed(n[0], tile, num_stages=3)

    n = np.array([trips], np.int32)
    blocks = X.reshape(16, 8, 64)[TABLE[:trips]]
    everywhere.run(body, [n, TABLE, X], blocks.sum(0))


@gives([TABLE, X], X[TABLE].sum(0)[None].repeat(8, 0))
def test_rows_of_loaded_indices_are_added(table, x, o):
    o[...] = summed(12, lambda i: x[table[i], :][None], num_stages=4)


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("array", [X, ODD], ids=["wide", "narrow"])
def test_rows_that_an_array_of_indices_names_are_gathered(num_stages, array):
    def body(rows, x, o):
        o[...] = summed(6, lambda i: x[rows[i]], o.shape, num_stages=num_stages)

    everywhere.run(body, [ROWS, array], array[ROWS].sum(0))


def test_rows_and_columns_may_be_computed_by_element():
    def body(rows, x, o):
        def part(i):
            columns = 16 + jnp.arange(32)
            return plgpu.load(x, (rows[i][:, None] // 2 + 1, columns[None]))

        o[...] = summed(6, part, (32, 32), num_stages=3)

    everywhere.run(body, [ROWS, X], X[ROWS // 2 + 1, 16:48].sum(0))


@pytest.mark.parametrize(
    "start", [np.uint8([250, 3]), np.float32([0.5, -0.5])], ids=["wraps", "rounds"]
)
@pytest.mark.parametrize("further", [0, 1])
def test_indices_are_computed_in_their_own_type(start, further):
    def rows(arange, start):
        return (arange(8, dtype=start.dtype) + start).astype(np.int32) + further

    x = RNG.integers(-9, 9, size=(264, 64)).astype(np.float32)

    def body(start, x, o):
        o[...] = summed(2, lambda i: x[rows(jnp.arange, start[i])], num_stages=2)

    expected = sum(x[rows(np.arange, first)] for first in start)
    everywhere.run(body, [start, x], expected)


@pytest.mark.parametrize("other", [None, -5.0])
def test_under_a_mask_copies_may_exceed_the_array(other):
    def body(x, o):
        def part(i):
            rows = i * 24 + jnp.arange(24)
            mask = (rows < 100)[:, None]
            tile = x.at[plgpu.ds(i * 24, 24)]
            return plgpu.load(tile, mask=mask, other=other)

        o[...] = summed(6, part, (24, 64), num_stages=3)

    padded = np.full((144, 64), other or 0, np.float32)
    padded[:100] = X[:100]
    everywhere.run(body, [X], padded.reshape(6, 24, 64).sum(0))


def test_masked_rows_are_those_that_the_mask_names():
    def body(rows, x, o):
        def part(i):
            found = rows[i] * 2
            return plgpu.load(x, found, mask=(found < 128)[:, None])

        o[...] = summed(6, part, (32, 64), num_stages=2)

    found = ROWS * 2
    rows = np.where((found < 128)[..., None], X[found % 128], 0)
    everywhere.run(body, [ROWS, X], rows.sum(0))


def test_the_body_may_use_its_index_and_other_loads():
    def body(x, y, o):
        @plgpu.loop(2, 14, step=3, init_carry=(ZEROS, jnp.int32(0)), num_stages=2)
        def last(i, carry):
            total, count = carry
            y_tile = y[plgpu.ds(count * 8, 8), :]  # depends on the carry
            tile = x[plgpu.ds(i * 8, 8), :]
            return total + tile * i + y_tile, count + 1

        o[...] = last[0]

    tiled = X.reshape(16, 8, 64)
    expected = sum(tiled[i] * i + tiled[k] for k, i in enumerate(range(2, 14, 3)))
    everywhere.run(body, [X, X], expected)


def test_a_loop_without_a_carry_stores():
    def body(x, o):
        @plgpu.loop(0, 16, num_stages=3)
        def _(i):
            o[plgpu.ds(i * 8, 8), :] = x[plgpu.ds(i * 8, 8), :] + 1

    everywhere.run(body, [X], X + 1)


def test_a_loop_in_a_loop_with_stages_of_its_own():
    def body(x, y, o):
        def row(i):
            tile = x[plgpu.ds(i * 8, 8), :]

            def columns(j):
                return y[plgpu.ds(i * 8, 8), plgpu.ds(j * 16, 16)]

            return tile + summed(4, columns, (8, 16), num_stages=2).sum()

        o[...] = summed(5, row, num_stages=2)

    sums = X.reshape(16, 8, 64)[:5].sum((1, 2)).sum()
    everywhere.run(body, [X, X], tiles(X, 5) + sums)


@pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=str)
@pytest.mark.parametrize("start", [0, 0.0])
def test_a_carry_that_begins_as_a_number_gets_the_type_of_the_sum(start, dtype):
    def body(x, o):
        @plgpu.loop(0, 4, init_carry=start, num_stages=2)
        def total(i, total):
            return total + x[plgpu.ds(i * 8, 8), :].max()

        o[...] = total[None]

    x = X.astype(dtype)
    everywhere.run(body, [x], x[:32].reshape(4, -1).max(1).sum(keepdims=True))


@pytest.mark.parametrize("nested", [False, True])
def test_each_warpgroup_has_buffers_of_its_own(nested):
    def body(x, o):
        wg = lax.axis_index("wg")

        def tile(i):
            found = x[plgpu.ds((wg * 5 + i) * 8, 8), :]
            if nested:
                found += summed(
                    2, lambda j: x[plgpu.ds((wg + j) * 8, 8), :], num_stages=2
                )
            return found

        o[wg] = summed(5, tile, num_stages=3)

    tiled = X.reshape(16, 8, 64)
    inner = [5 * tiled[wg : wg + 2].sum(0) * nested for wg in range(2)]
    expected = np.stack([tiled[5 * g : 5 * g + 5].sum(0) + inner[g] for g in range(2)])
    everywhere.run(body, [X], expected, threads={"wg": 2})


def test_indices_may_depend_on_the_position_in_the_grid():
    def body(x, o):
        def tile(i):
            return x[plgpu.ds(lax.axis_index("i") * 32 + i * 8, 8), :]

        o[lax.axis_index("i")] = summed(4, tile, num_stages=3)

    everywhere.run(body, [X], X.reshape(4, 4, 8, 64).sum(1), grid={"i": 4})


def test_loops_that_follow_each_other_share_memory():
    def body(x, y, o):
        @plgpu.loop(0, 3)
        def _(j):
            first = summed(5, lambda i: x[plgpu.ds((i + j) * 8, 8), :], num_stages=3)
            parts = lambda i: y[plgpu.ds(i * 8, 8), :64]  # noqa: E731
            o[j] = first - summed(2, parts, num_stages=2)

    expected = [tiles(X[8 * j :], 5) - tiles(ODD, 2) for j in range(3)]
    everywhere.run(body, [X, ODD], np.stack(expected))


def test_one_of_several_warpgroups_may_run_it():
    def body(x, o):
        @plgpu.when(lax.axis_index("wg") == 1)
        def _():
            o[...] = summed(5, lambda i: x[plgpu.ds(i * 8, 8), :], num_stages=3)

    everywhere.run(body, [X], tiles(X, 5), threads={"wg": 2})


def test_a_warp_may_run_it():
    def body(x, o):
        @plgpu.warp_map
        def _(warp):
            def tile(i):
                return x[plgpu.ds((i * 4 + warp) * 8, 8), :]

            o[plgpu.ds(warp * 8, 8), :] = summed(4, tile, num_stages=3)

    everywhere.run(body, [X], X.reshape(4, 32, 64).sum(0))


@pytest.mark.parametrize("columns", [64, 65], ids=["tma", "cp_async"])
def test_instances_of_vmap_have_copies_of_their_own(columns):
    def body(x, o):
        o[...] = summed(3, lambda i: x[plgpu.ds(i * 8, 8), :64], num_stages=3)

    x = np.stack([ODD[:33, :columns], ODD[33:66, :columns]])
    make = everywhere.kernel(body, ZEROS)
    expected = np.stack([tiles(part, 3) for part in x])
    everywhere.check(lambda interpret: jax.vmap(make(interpret)), [x], expected)


def test_what_the_kernel_has_written_before_is_copied_by_threads():
    def body(x, o, twice):
        twice[...] = x[...] * 2
        o[...] = summed(5, lambda i: twice[plgpu.ds(i * 8, 8), :], num_stages=3)

    everywhere.run(body, [X], (tiles(2 * X, 5), 2 * X))


def test_waits_of_an_inner_loop_are_for_its_own_copies():
    def body(x, o, twice):
        twice[...] = x[...] * 2

        def tile(i):
            inner = summed(2, lambda j: x[plgpu.ds((i + j) * 8, 8), :], num_stages=2)
            return inner - twice[plgpu.ds(i * 8, 8), :]

        o[...] = summed(5, tile, num_stages=2)

    everywhere.run(body, [X], (tiles(X[8:], 5) - tiles(X, 5), 2 * X))


def test_buffers_that_tma_cannot_address_are_filled_by_threads():
    def body(rows, x, o):
        def load(i):
            found = plgpu.load(rows, (i, plgpu.ds(0, 8)))
            return x[plgpu.ds(i, 8), :] * x[found] + found[:, None]

        o[...] = summed(6, load, num_stages=4)

    found = ROWS[:, :8]
    parts = np.stack([X[i : i + 8] for i in range(6)])
    expected = (parts * X[found] + found[..., None]).sum(0)
    everywhere.run(body, [ROWS, X], expected.astype(np.float32))


@gives([X.reshape(-1), ROWS], X.reshape(-1)[ROWS].sum(0))
def test_elements_are_gathered(x, rows, o):
    o[...] = summed(6, lambda i: x[rows[i]], (32,), num_stages=3)


def test_an_unrolled_loop_has_copies_ahead():
    def body(x, o):
        load = lambda i: x[plgpu.ds(i * 8, 8), :]  # noqa: E731
        o[...] = summed(6, load, num_stages=3, unroll=2)

    everywhere.run(body, [X], tiles(X, 6))


def test_a_layout_is_that_of_the_load():
    def body(x, o):
        zeros = plgpu.layout_cast(jnp.zeros((64, 64)), plgpu.Layout.WGMMA)

        @plgpu.loop(0, 2, init_carry=zeros, num_stages=2)
        def total(i, total):
            part = plgpu.ds(i * 64, 64)
            return total + plgpu.load(x, part, layout=plgpu.Layout.WGMMA)

        o[...] = total

    everywhere.run(body, [X], X.reshape(2, 64, 64).sum(0))


# --- products -------------------------------------------------------------------------

D, KEYS = 64, 256
Q, K, V = (RNG.normal(size=(KEYS, D)).astype(jnp.bfloat16) for _ in range(3))
BLOCKS = np.array([[0, 2, 3], [1, 0, 2], [3, 1, 1], [2, 0, 1]], np.int32)
F32 = jnp.float32


def sparse_attention(blocks, q, k, v, o, *, num_stages):
    """Attention of 64 queries to the blocks of 64 keys that a table names."""
    i = lax.axis_index("queries")
    mine = plgpu.ds(i * 64, 64)
    start = (jnp.zeros((64, D)), jnp.full(64, -jnp.inf), jnp.zeros(64))

    @plgpu.loop(0, blocks.shape[1], init_carry=start, num_stages=num_stages)
    def last(j, carry):
        acc, high, total = carry
        rows = plgpu.ds(blocks[i, j] * 64, 64)
        scores = jnp.dot(q[mine, :], k[rows, :].T, preferred_element_type=F32) / 8
        new = jnp.maximum(high, scores.max(1))
        p, scale = jnp.exp(scores - new[:, None]), jnp.exp(high - new)
        part = jnp.dot(p.astype(v.dtype), v[rows, :], preferred_element_type=F32)
        return acc * scale[:, None] + part, new, total * scale + p.sum(1)

    acc, _, total = last
    o[mine, :] = (acc / total[:, None]).astype(o.dtype)


def attended():
    q, k, v = (np.asarray(x, np.float32).reshape(4, 64, D) for x in (Q, K, V))
    keys, values = (x[BLOCKS].reshape(4, -1, D) for x in (k, v))
    p = np.exp(np.einsum("bqd,bkd->bqk", q, keys) / 8)
    p /= p.sum(-1, keepdims=True)
    return np.einsum("bqk,bkd->bqd", p, values).reshape(KEYS, D)


def attention(num_stages):
    body = functools.partial(sparse_attention, num_stages=num_stages)
    return everywhere.kernel(body, Q, grid={"queries": 4})


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_sparse_attention_reads_the_blocks_of_a_table(num_stages):
    everywhere.check(attention(num_stages), [BLOCKS, Q, K, V], attended(), atol=0.03)


def product(num_stages, form="parts", k=64, dtype=jnp.float32):
    """A product in steps of k, from the last one to the first."""

    def body(a, b, o):
        start = jnp.zeros(o.shape, jnp.float32)
        inner, outer = jnp.arange(k), jnp.arange(o.shape[1])[None, :]

        @plgpu.loop(0, a.shape[1] // k, init_carry=start, num_stages=num_stages)
        def acc(i, acc):
            first = a.shape[1] - k - i * k
            part = plgpu.ds(first, k)
            match form:
                case "parts":
                    right = b[part, :]
                case "rows":
                    right = plgpu.load(b, first + jnp.arange(k))
                case "elements":
                    mask = first + inner < a.shape[1] - 8
                    right = plgpu.load(
                        b, ((first + inner)[:, None], outer), mask=mask[:, None]
                    )
                case "transposed":
                    right = b[:, part].T
            return acc + jnp.dot(a[:, part], right, preferred_element_type=jnp.float32)

        o[...] = acc

    return everywhere.kernel(body, jax.ShapeDtypeStruct((64, 128), dtype))


A = RNG.integers(-4, 4, size=(64, 320)).astype(jnp.bfloat16)
B = RNG.integers(-4, 4, size=(320, 128)).astype(jnp.bfloat16)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("form", ["parts", "rows", "transposed", "elements"])
def test_a_product_adds_parts_at_computed_offsets(num_stages, form):
    right = B.T.copy() if form == "transposed" else B
    k = 312 if form == "elements" else 320
    expected = A.astype(np.float32)[:, :k] @ B.astype(np.float32)[:k]
    everywhere.check(product(num_stages, form), [A, right], expected)


@pytest.mark.parametrize("dtype", [np.float32, jnp.float8_e4m3fn], ids=str)
def test_products_of_other_types(dtype):
    a, b = A.astype(dtype), B.astype(dtype)
    expected = A.astype(np.float32) @ B.astype(np.float32)
    everywhere.check(product(3, k=32), [a, b], expected, atol=1e-3)


# --- instructions ---------------------------------------------------------------------


def gathered(num_stages):
    def body(rows, x, o):
        o[...] = summed(6, lambda i: x[rows[i]], o.shape, num_stages=num_stages)

    return everywhere.kernel(body, jax.ShapeDtypeStruct((32, 64), jnp.float32))


def of_elements(num_stages):
    return product(num_stages, "elements")


@pytest.mark.offline
@pytest.mark.sass
@pytest.mark.parametrize("semantics", BOTH)
@pytest.mark.parametrize(
    ("make", "args", "copies"),
    [
        (attention, [BLOCKS, Q, K, V], {"UTMALDG": 3 * 2, "LDGSTS": 0}),
        (gathered, [ROWS, X], {"UTMALDG": 0, "LDGSTS": 3 * 16}),
        (product, [A, B], {"UTMALDG": 3 * 2, "LDGSTS": 0}),
        (of_elements, [A, B], {"UTMALDG": 3 * 2, "LDGSTS": 0}),
    ],
    ids=["blocks", "rows", "product", "elements"],
)
def test_the_instructions_of_copies_ahead(make, args, copies, semantics):
    (report,) = plgpu.offline.compile(under(semantics, make(3)()), *args)
    assert report.resources.spill_store_bytes == 0
    found = {name: len(re.findall(name, report.sass)) for name in copies}
    assert found == copies
