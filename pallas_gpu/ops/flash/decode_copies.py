# SPDX-License-Identifier: Apache-2.0
"""Decode: copies of queries, keys and values to SMEM; narrow ones are widened"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.ops.flash.decode_work import (
    ENTRIES,
    QUERIES,
    WIDE_STAGES,
    Piece,
    Problem,
)
from pallas_gpu.ops.folded import divide, maximum, minus, plus, split, times
from pallas_gpu.ops.memory import Memory
from pallas_gpu.ops.tiles import tiles


def scratch(p: Problem) -> dict[str, Any]:
    """Returns the declarations of rings, of queries and of blocks of K and V.

    `v_ring` is that of V as the tensor core reads it; `narrow_v` that of V as it is in
    GMEM, where it has to be widened.
    """
    c, pages = p.config, 1
    declared: dict[str, Any] = {}
    if p.page_size is not None:
        pages = max(c.block_kv // p.page_size, 1)
        declared["table_smem"] = plgpu.SMEM((ENTRIES,), jnp.int32)

    def ring(copies: int, dtype: Any, *shape: int) -> plgpu.Ring:
        buffers = tiles((*shape, p.dims), dtype)
        return plgpu.Ring.of(buffers, copies=copies, consumers=c.consumers)

    declared["queries"] = ring(p.runs, p.dtype, QUERIES, p.columns)
    copied = ring(pages, p.kv_dtype, c.stages, c.block_kv)
    declared |= {"k_ring": copied, "v_ring": copied}
    if p.is_narrow:
        wide = ring(c.consumers, p.wide, WIDE_STAGES, c.block_kv)
        declared |= {"narrow_v": copied, "v_ring": wide}
    return declared


# --- the warpgroup that copies --------------------------------------------------------


def produce(p: Problem, mem: Memory, piece: Piece) -> None:
    head = p.head(piece.unit)[0]
    # Unless other tiles read the same rows, nothing reads them again in this launch.
    hint = "evict_first" if p.tiles_of_head == 1 else None

    def copy_block(block, sources):
        v_ring = mem.narrow_v if p.is_narrow else mem.v_ring
        for which, ring in enumerate((mem.k_ring, v_ring)):
            slot = ring.fill(piece.read(block))
            for outer, source, rows in sources:
                plgpu.copy_gmem_to_smem(
                    _part(p, mem, which, outer, source, head),
                    slot.buffers.at[rows],
                    slot.full,
                    cache_hint=hint,
                )

    start = p.first_block(piece.length)
    if p.page_size is None:

        @plgpu.loop(piece.first, piece.last)
        def _(block):
            row = times(plus(start, block), p.config.block_kv)
            rows = plgpu.ds(row, p.config.block_kv)
            copy_block(block, [(piece.sequence, rows, plgpu.ds(0, p.config.block_kv))])

        return
    size = p.blocks_of_entries
    reads = divide(plus(minus(piece.last, piece.first), size - 1), size)

    @plgpu.loop(0, reads)
    def _(read):
        begin = plus(piece.first, times(read, size))
        entries = _Entries.read(
            p, mem, piece, times(plus(start, begin), p.config.block_kv)
        )

        @plgpu.loop(begin, lax.min(plus(begin, size), piece.last))
        def _(block):
            row = times(plus(start, block), p.config.block_kv)
            copy_block(block, list(entries.pages(row)))


def copy_queries(p: Problem, mem: Memory, piece: Piece) -> None:
    head, first_head = p.head(piece.unit)
    slot = mem.queries.fill(piece.number)
    for i in range(p.runs):
        queries, heads = i, plgpu.ds(first_head, p.run)
        if not p.heads_within:
            queries, heads = plgpu.ds(0, p.run), plus(first_head, i)
        plgpu.copy_gmem_to_smem(
            mem.q.at[piece.sequence, queries, head, heads, plgpu.ds(0, p.dims)],
            slot.buffers.at[plgpu.ds(i * p.run, p.run)],
            slot.full,
        )


@dataclasses.dataclass(frozen=True)
class _Entries:
    """Entries of the page table in SMEM, which are read with one latency.

    Attributes:
      p: sizes.
      smem: the entries.
      begin: the index of the first of them.
      first, last: pages that some query sees.
      length: of the sequence.
    """

    p: Problem
    smem: Any
    begin: Any
    first: Any
    last: Any
    length: Any

    @classmethod
    def read(cls, p: Problem, mem: Memory, piece: Piece, row: Any) -> _Entries:
        """Reads those of the rows of a sequence from one on."""
        begin = divide(row, p.page_size)
        index = plgpu.broadcasted_iota(jnp.int32, (ENTRIES,), 0)
        index = jnp.minimum(index + begin, mem.table.shape[1] - 1)
        mem.table_smem[...] = plgpu.load(mem.table.at[piece.sequence, index])
        first = divide(p.first_row(piece.length), p.page_size)
        last = divide(maximum(plus(piece.length, -1), 0), p.page_size)
        return cls(p, mem.table_smem, begin, first, last, piece.length)

    def pages(self, row: Any) -> Iterator[tuple[Any, Any, Any]]:
        """Yields the copies of a block that begins at a row.

        Each is: the page, the rows of it, and the rows of a buffer that they go to. In
        place of a page that no query sees, whose entry in the table may be anything,
        the nearest one that some query sees is copied.
        """
        p = self.p
        assert p.page_size is not None
        step = min(p.page_size, p.config.block_kv)
        for i in range(p.config.block_kv // step):
            index, within = split(plus(row, i * step), p.page_size)
            index = lax.clamp(self.first, index, self.last)
            page = self.smem[minus(index, self.begin)]
            page = lax.select(lax.gt(self.length, np.int32(0)), page, jnp.int32(0))
            rows = plgpu.ds(0 if step == p.page_size else within, step)
            yield page, rows, plgpu.ds(i * step, step)


def _part(p: Problem, mem: Memory, which: int, outer: Any, rows: Any, head: Any) -> Any:
    middle = (head, rows) if p.heads_first else (rows, head)
    place = (outer, *middle, plgpu.ds(0, p.dims))
    if p.kv_axis is None:
        return (mem.k, mem.v)[which].at[place]
    # One array has both.
    return mem.k.at[(*place[: p.kv_axis], which, *place[p.kv_axis :])]


# --- the warpgroups that widen --------------------------------------------------------


def widen(p: Problem, mem: Memory, index: Any, piece: Piece) -> None:
    """Stores a warpgroup's rows of V again, as the tensor core reads them."""
    rows = plgpu.ds(times(index, p.rows), p.rows)

    @plgpu.loop(piece.first, piece.last)
    def _(block):
        step = piece.read(block)
        elements = mem.narrow_v.take(step).buffers[rows].astype(p.wide)
        mem.narrow_v.release(step)
        slot = mem.v_ring.fill(step)
        slot.buffers[rows] = elements
        plgpu.commit_smem()
        plgpu.barrier_arrive(slot.full)
