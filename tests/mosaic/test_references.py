# SPDX-License-Identifier: Apache-2.0
"""References at the Mosaic level: memrefs of memrefs, and what they are to emitters."""

from __future__ import annotations

import numpy as np
import pytest
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from pallas_gpu import mosaic as mgpu
from pallas_gpu.mosaic.memory import memrefs
from tests.support import mosaic_bodies as bodies
from tests.support.refusal import refused_by

X = np.random.default_rng(0).normal(size=(64, 128)).astype(np.float32)


def index(n):
    return mgpu.c(n, ir.IndexType.get())


def thread(n):
    """A value that is n in every thread, of which nothing is known."""
    zero = arith.andi(mgpu.thread_idx(), mgpu.c(0, ir.IntegerType.get_signless(32)))
    return arith.addi(arith.index_cast(ir.IndexType.get(), zero), index(n))


# name: (of a reference, of NumPy)
VIEWS = {
    "a slice": (
        lambda r: mgpu.memref_slice(r, (mgpu.ds(16, 32), slice(64, None))),
        lambda x: x[16:48, 64:],
    ),
    "negative bounds": (
        lambda r: mgpu.memref_slice(r, (slice(-32, None), slice(0, -64))),
        lambda x: x[-32:, :-64],
    ),
    "a dynamic slice of a slice": (
        lambda r: mgpu.memref_slice(
            mgpu.memref_slice(r, mgpu.ds(thread(8), 48)), mgpu.ds(index(4), 32)
        ),
        lambda x: x[12:44],
    ),
    "a row": (lambda r: mgpu.memref_slice(r, thread(5)), lambda x: x[5]),
    "a transpose": (lambda r: mgpu.memref_transpose(r, (1, 0)), lambda x: x.T),
    "folded": (lambda r: mgpu.memref_fold(r, 0, 2), lambda x: x.reshape(-1)),
    "unfolded": (
        lambda r: mgpu.memref_unfold(r, 1, (4, None)), lambda x: x.reshape(64, 4, 32)
    ),
    "with axes of one element": (
        lambda r: mgpu.memref_unsqueeze(mgpu.memref_unsqueeze(r, 2), 0),
        lambda x: x[None, :, :, None],
    ),
    "reshaped": (
        lambda r: mgpu.memref_reshape(r, (8, 8, 2, 64)),
        lambda x: x.reshape(8, 8, 2, 64),
    ),
    "another grouping": (
        lambda r: mgpu.memref_reshape(r, (32, 256)), lambda x: x.reshape(32, 256)
    ),
    "part of what was unfolded, transposed": (
        lambda r: mgpu.memref_transpose(
            mgpu.memref_slice(
                mgpu.memref_reshape(r, (8, 8, 2, 64)), (slice(None), thread(3))
            ),
            (1, 0, 2),
        ),
        lambda x: x.reshape(8, 8, 2, 64)[:, 3].transpose(1, 0, 2),
    ),
    "folded rows of a part": (
        lambda r: mgpu.memref_fold(mgpu.memref_slice(r, mgpu.ds(thread(32), 32)), 0, 2),
        lambda x: x[32:].reshape(-1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("memory", ["gmem", "smem"])
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_numpys(name, memory):
    of_reference, of_numpy = VIEWS[name]

    def body(x, out):
        if memory == "smem":
            held = bodies.smem(0, X.shape, X.dtype)
            mgpu.FragmentedArray.load_strided(x).store_untiled(held)
            mgpu.warpgroup_barrier()
            x = held
        part = of_reference(x)
        mgpu.FragmentedArray.load_strided(part).store_untiled(out)

    bodies.check(body, [X], of_numpy(X), smem_bytes=X.nbytes)


def test_mlirs_own_accesses_see_the_same_elements():
    def body(x, out, lines):
        # One element for each thread, and vectors of four.
        thread = arith.index_cast(ir.IndexType.get(), mgpu.thread_idx())
        row = mgpu.memref_slice(x, index(3))
        doubled = memref.load(row, [thread])
        memref.store(arith.addf(doubled, doubled), out, [thread])
        four = ir.VectorType.get([4], ir.F32Type.get())
        column = arith.muli(arith.remui(thread, index(32)), index(4))
        line = arith.divui(thread, index(32))
        value = vector.load(four, x, [line, column])
        vector.store(value, lines, [line, column])

    bodies.check(body, [X], X[3] * 2, X[:4])


def test_memory_of_a_thread_keeps_its_values():
    def body(x, out):
        thread = arith.index_cast(ir.IndexType.get(), mgpu.thread_idx())
        own = memref.alloca(ir.MemRefType.get([2], ir.F32Type.get()), [], [])
        for i in range(2):
            memref.store(memref.load(x, [index(i), thread]), own, [index(i)])
        few = arith.cmpi(arith.CmpIPredicate.ult, thread, index(50))
        with mgpu.when(few):
            memref.store(mgpu.c(9.0, ir.F32Type.get()), own, [index(1)])
        total = arith.addf(*(memref.load(own, [index(i)]) for i in range(2)))
        memref.store(total, out, [thread])

    second = np.where(np.arange(128) < 50, np.float32(9), X[1])
    bodies.check(body, [X], X[0] + second)


# name: (shape in memory of X's tiles, how it becomes (rows, columns, 8, 32))
TILED = {
    "rows of tiles": ((8, 4, 8, 32), None),
    "columns of tiles": ((4, 8, 8, 32), (1, 0, 2, 3)),
}


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("swizzle", [128, 16])
@pytest.mark.parametrize("name", TILED)
def test_tiles_are_stored_in_any_order(name, swizzle, part):
    shape, order = TILED[name]

    def body(x, out, plain):
        layout = mgpu.WGMMA_LAYOUT
        tiles = bodies.smem(0, shape, X.dtype)
        if order:
            tiles = mgpu.memref_transpose(tiles, order)
        array = mgpu.FragmentedArray.load_untiled(x, layout=layout, optimized=False)
        array.store_tiled(tiles, swizzle, optimized=False)
        mgpu.warpgroup_barrier()
        bytes_ = bodies.smem(0, X.shape, X.dtype)
        mgpu.FragmentedArray.load_strided(bytes_).store_untiled(plain)
        if part:
            tiles = mgpu.memref_slice(tiles, (slice(None), mgpu.ds(thread(1), 2)))
        loaded = mgpu.FragmentedArray.load_tiled(
            tiles, swizzle, layout=layout, optimized=False
        )
        loaded.store_untiled(out, optimized=False)

    tiles = X.reshape(8, 8, 4, 32).transpose(0, 2, 1, 3)
    if order:
        tiles = tiles.transpose(order)
    chunks = tiles.reshape(-1, 8, 8, 4).copy()
    for row in range(8):
        exchanged = np.arange(8) ^ (row if swizzle == 128 else 0)
        chunks[:, row] = chunks[:, row, exchanged]
    expected = X[:, 32:96] if part else X
    bodies.check(body, [X], expected, chunks.reshape(X.shape), smem_bytes=X.nbytes)


@pytest.mark.parametrize("kind", ["add", "max"])
def test_a_store_combines_with_what_there_is(kind):
    ones = np.arange(64 * 128, dtype=np.int32).reshape(64, 128) % 7

    def body(x, out):
        held = bodies.smem(0, ones.shape, ones.dtype)
        load = mgpu.FragmentedArray.load_untiled
        array = load(x, layout=mgpu.WGMMA_LAYOUT, is_signed=True, optimized=False)
        (array * 0 + 3).store_untiled(held, optimized=False)
        mgpu.warpgroup_barrier()
        array.store_untiled(held, optimized=False, atomic=kind)
        mgpu.warpgroup_barrier()
        mgpu.FragmentedArray.load_strided(held, is_signed=True).store_untiled(out)

    expected = {"add": ones + 3, "max": np.maximum(ones, 3)}[kind]
    bodies.check(body, [ones], expected, smem_bytes=ones.nbytes)


def test_a_copy_between_tiles_and_rows_loses_nothing():
    def body(x, out):
        tiles = bodies.smem(0, (8, 4, 8, 32), X.dtype)
        mgpu.copy_tiled(x, tiles, 128)
        mgpu.warpgroup_barrier()
        mgpu.copy_tiled(tiles, out, 128)

    bodies.check(body, [X], X, smem_bytes=X.nbytes)


def test_a_memref_and_its_view_are_one_thing():
    def body(x):
        row = mgpu.memref_slice(x, (mgpu.ds(thread(8), 16), slice(32, 64)))
        view = memrefs.view_of(row)
        assert (view.buffer_index, view.shape) == (0, (16, 32))
        assert view.window.array_shape == X.shape
        again = memrefs.view_of(memrefs.memref_of(view))
        assert again.window.sizes == view.window.sizes
        assert again.window.starts[1] == 32
        assert (
            memrefs.view_of(mgpu.memref_slice(x, mgpu.ds(8, 16))).window.starts[0] == 8
        )

    bodies.run(body, [X], [])


# name: what is refused
REFUSED = {
    "index": lambda r: mgpu.memref_slice(r, (64,)),
    "step": lambda r: mgpu.memref_slice(r, (slice(0, 8, 2),)),
    "indices": lambda r: mgpu.memref_slice(r, (0, 0, 0)),
    "fold": lambda r: mgpu.memref_fold(mgpu.memref_transpose(r, (1, 0)), 0, 2),
    "axes": lambda r: mgpu.memref_fold(r, 1, 2),
    "unfold": lambda r: mgpu.memref_unfold(r, 0, (5, None)),
    "reshape": lambda r: mgpu.memref_reshape(r, (64, 64)),
    "rank": lambda r: mgpu.FragmentedArray.load_tiled(
        mgpu.memref_unsqueeze(r, 0), 128
    ),
    "swizzle": lambda r: mgpu.FragmentedArray.load_untiled(
        r, layout=mgpu.WGMMA_LAYOUT, swizzle=128
    ),
    "a value": lambda r: memrefs.view_of(index(0)),
    "ds": lambda r: mgpu.ds(-1, 4),
    "cluster": lambda r: mgpu.get_cluster_ref(r, 0, index(0)),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
@refused_by(lambda body: bodies.run(body, [X], []))
def test_a_mistake_is_refused(r, *, what):
    REFUSED[what](r)
