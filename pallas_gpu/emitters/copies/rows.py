# SPDX-License-Identifier: Apache-2.0
"""Copies of rows that an array of indices names.

The indices are in registers, in any layout: the thread that holds an index issues the
copy of that row, so that all warps issue in parallel. Since sm_100a TMA copies four
rows at a time, if they are adjacent in SMEM: `four_rows`. Else a row that is adjacent
and a multiple of 16 bytes in both memories is one bulk copy, and any other one is
copied chunk by chunk: by its thread, or, if the chunks of a row divide the lanes of a
warp, or are a multiple of them, by adjacent lanes, so that they access adjacent memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_gpu.emitters import (
    control,
    elected,
    gmem,
    indexed,
    masking,
    mbarrier,
    module,
    smem,
    tma,
)
from pallas_gpu.emitters.control import predicated
from pallas_gpu.emitters.copies import chunks, cp_async, four_rows, instructions
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.moves import shuffle
from pallas_gpu.emitters.registers import Array, Deferred, Iota, RegisterArray
from pallas_gpu.layouts import LinearLayout
from pallas_gpu.layouts.gmem.line import UNIT_BYTES
from pallas_gpu.layouts.gmem.thread_copy import ThreadCopy
from pallas_gpu.layouts.registers.placement import Placement, default_placement

# Chunks that a thread transfers in the body of a loop.
_UNROLLED = 4
_LANES = 32


def gather(
    source: gmem.GmemView,
    rows: Array,
    target: smem.SmemView,
    barrier_pointer: ir.Value | None,
    predicate: ir.Value | None = None,
    arrive: bool = True,
) -> ThreadCopy | None:
    """Starts copies of rows to SMEM.

    PTX: `mbarrier.arrive.expect_tx` of all bytes and, for each row,
    `cp.async.bulk.shared::cluster.global`, or for four of them
    `cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4` (sm_100a); or as
    `cp_async.copy_gmem_to_smem`. Since: sm_90. All threads of the warpgroup synchronize
    first.

    Args:
      source: all rows, along its first axis.
      rows: i32 indices, one for each row of the target.
      target: a row for each index.
      barrier_pointer: `!llvm.ptr<3>`; the copy counts as one arrival. None: the copy is
        a group of cp.async.
      predicate: i1, uniform; where it is false nothing is copied.
      arrive: False if the caller arrives, with the bytes of bulk copies.

    Returns:
      The chunks of a row, if threads copy them.
    """
    index = _in_registers(rows)
    plan = _plan(source, target, store=False)
    fours = four_rows.plan(source, target, index)
    mbarrier.synchronize()
    if barrier_pointer is None or not (fours or _is_bulk(plan)):
        with predicated(predicate):
            if _by_lanes(plan):
                _load_by_lanes(plan, source, target, index)
            else:
                for from_, to, present in _each(source, target, index):
                    _copy_row(plan, from_, to, present, store=False)
            if barrier_pointer is not None and plan.is_asynchronous:
                cp_async.arrive_when_copied(barrier_pointer)
        if arrive or barrier_pointer is None:
            cp_async.finish_load(barrier_pointer)
        return plan
    kernel = module.current()
    total: ir.Value = kernel.i32(math.prod(target.shape[:1]) * _row_bytes(plan))
    if predicate is not None:
        total = arith.select(predicate, total, kernel.i32(0))
    # Bytes may arrive before they are expected: until then the phase lacks an arrival.
    if arrive:
        with elected.thread() as by:
            mbarrier.emit_arrive_expect_tx(barrier_pointer, total, by)
    with predicated(predicate):
        if fours is not None:
            four_rows.load(fours, source, target, index, barrier_pointer)
            return None
        for from_, to, present in _each(source, target, index):
            with predicated(present):
                instructions.load_line(
                    smem.slice_pointer(to),
                    gmem.slice_pointer(from_),
                    _row_bytes(plan),
                    barrier_pointer,
                )
    return None


def scatter(
    source: smem.SmemView,
    target: gmem.GmemView,
    rows: Array,
    predicate: ir.Value | None = None,
) -> None:
    """Starts copies of the rows of SMEM to rows of GMEM; the caller closes the group.

    PTX: `cp.async.bulk.global.shared::cta.bulk_group` for each row, or for four of them
    `cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4` (sm_100a); or as
    `cp_async.copy_smem_to_gmem`. Since: sm_90. All threads of the warpgroup synchronize
    first.

    Args:
      source: a row for each index.
      target: all rows, along its first axis.
      rows: i32 indices.
      predicate: i1, uniform; where it is false nothing is copied.
    """
    index = _in_registers(rows)
    plan = _plan(target, source, store=True)
    fours = four_rows.plan(target, source, index)
    mbarrier.synchronize()
    if fours is not None:
        with predicated(predicate):
            four_rows.store(fours, target, source, index)
        return
    with predicated(predicate):
        for to, from_, present in _each(target, source, index):
            if _is_bulk(plan):
                with predicated(present):
                    instructions.store_line(
                        smem.slice_pointer(from_),
                        gmem.slice_pointer(to),
                        _row_bytes(plan),
                    )
            else:
                _copy_row(plan, to, from_, present, store=True)
    if not _is_bulk(plan):
        tma.fence_proxy_async_global()
        mbarrier.synchronize()


# --- who copies which row -------------------------------------------------------------


def _in_registers(rows: Array) -> RegisterArray:
    if isinstance(rows, Deferred):
        return rows.materialize(default_placement(rows.shape, dtypes.bits(dtypes.I32)))
    assert isinstance(rows, RegisterArray)
    return rows


def _each(
    all_rows: gmem.GmemView, part: smem.SmemView, index: RegisterArray
) -> Iterator[tuple[gmem.GmemView, smem.SmemView, ir.Value | None]]:
    """The rows that each thread copies, and whether there is one."""
    for row, number, present in _own_rows(index):
        yield _row(all_rows, row), _row(part, number), present


def _own_rows(
    index: RegisterArray,
) -> Iterator[tuple[ir.Value, ir.Value, ir.Value | None]]:
    """Index and number of each thread's rows, and whether there is one."""
    layout: Placement = index.layout
    numbers = Iota(dtypes.I32, index.shape, 0).materialize(layout)
    own = indexed.issuing_threads(layout)
    places = [
        (r, v) for r in range(layout.num_registers) for v in range(layout.vector_length)
    ]
    inside = masking.conditions(layout, places, None)
    for (register, lane), present in zip(places, inside, strict=True):
        row = dtypes.extract(index.values[register], lane)
        number = dtypes.extract(numbers.values[register], lane)
        yield row, number, control.both(present, own)


def _row[View: (gmem.GmemView, smem.SmemView)](view: View, index: ir.Value) -> View:
    rest: tuple[int, ...] = view.shape[1:]
    return view.slice([index, *[0] * len(rest)], [None, *rest], [1] + [0] * len(rest))


# --- rows -----------------------------------------------------------------------------


def _plan(source: gmem.GmemView, part: smem.SmemView, *, store: bool) -> ThreadCopy:
    """The chunks of a row that starts anywhere."""
    zero = module.current().i32(0)
    return cp_async.plan_transfer(_row(source, zero), _row(part, zero), store=store)


def _is_bulk(plan: ThreadCopy) -> bool:
    return plan.is_line and not plan.bounds and plan.chunk_bytes == UNIT_BYTES


def _row_bytes(plan: ThreadCopy) -> int:
    return plan.chunks * plan.chunk_bytes


def _by_lanes(plan: ThreadCopy) -> bool:
    return plan.chunks % _LANES == 0 or plan.chunks in (2, 4, 8, 16)


def _load_by_lanes(
    plan: ThreadCopy,
    source: gmem.GmemView,
    target: smem.SmemView,
    index: RegisterArray,
) -> None:
    """Adjacent lanes load the chunks of a row, whose index they get by a shuffle."""
    kernel = module.current()
    lane = kernel.threads.lane
    lanes = min(plan.chunks, _LANES)
    own_chunk = arith.andi(lane, kernel.i32(lanes - 1))
    first = arith.divui(lane, kernel.i32(lanes))
    # Of each so many rows, which the warp copies at the same time, so many parts.
    together, parts_of_row = _LANES // lanes, plan.chunks // lanes
    rounds = -(-_lanes_with_rows(index.layout) // together) * parts_of_row
    unrolled = math.gcd(rounds, _UNROLLED)
    for row, number, present in _own_rows(index):
        if present is not None:
            # A number that no row has.
            number = arith.select(present, number, kernel.i32(-1))

        def some(start: ir.Value | None, row=row, number=number, present=present):
            parts = []
            for i in range(unrolled):
                turn = kernel.i32(i)
                turn = turn if start is None else arith.addi(start, turn)
                chunk = own_chunk
                if parts_of_row > 1:
                    part = arith.remui(turn, kernel.i32(parts_of_row))
                    chunk = arith.addi(chunk, arith.muli(part, kernel.i32(lanes)))
                    turn = arith.divui(turn, kernel.i32(parts_of_row))
                place = arith.addi(arith.muli(turn, kernel.i32(together)), first)
                own_row, own_number = (
                    shuffle.from_lane(x, place) for x in (row, number)
                )
                exists = None
                if present is not None:
                    sge = arith.CmpIPredicate.sge
                    exists = arith.cmpi(sge, own_number, kernel.i32(0))
                views = _row(source, own_row), _row(target, own_number)
                parts.append(chunks.chunk(plan, *views, chunk, exists))
            cp_async.load_chunks(plan, parts)

        if rounds == unrolled:
            some(None)
            continue
        with control.counting(rounds, unrolled) as start:
            some(start)


def _lanes_with_rows(layout: Placement) -> int:
    """The lanes of a warp that have rows are below this power of 2."""
    copies = layout.replication_bits if isinstance(layout, LinearLayout) else ()
    return 1 << max((b + 1 for b in range(5) if b not in copies), default=0)


def _copy_row(
    plan: ThreadCopy,
    row: gmem.GmemView,
    part: smem.SmemView,
    present: ir.Value | None,
    *,
    store: bool,
) -> None:
    """One thread copies a row, chunk by chunk."""
    kernel = module.current()
    transfer = cp_async.store_chunks if store else cp_async.load_chunks
    unrolled = math.gcd(plan.chunks, _UNROLLED)

    def some(first: ir.Value | None) -> None:
        numbers = [kernel.i32(i) for i in range(unrolled)]
        if first is not None:
            numbers = [arith.addi(first, number) for number in numbers]
        parts = [chunks.chunk(plan, row, part, n, present) for n in numbers]
        transfer(plan, parts)

    if plan.chunks == unrolled:
        some(None)
        return
    with control.counting(plan.chunks, unrolled) as first:
        some(first)
