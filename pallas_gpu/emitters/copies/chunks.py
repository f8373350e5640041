# SPDX-License-Identifier: Apache-2.0
"""The loop of threads over the chunks of a copy: addresses, bounds, who copies what.

Chunk i belongs to thread i modulo the number of threads, so that adjacent threads
access adjacent memory. All arithmetic is on constants and the number of the chunk.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_gpu.emitters import addressing, control, gmem, indexed, module, smem
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.registers import Splat
from pallas_gpu.layouts.gmem.thread_copy import Bound, ThreadCopy

# Chunks that a thread has in flight in the body of the loop, which is unrolled: with 16
# or 8 of 4 bytes each a copy took 7 or 9 % more time on an H200. Where a bound may cut
# a chunk, its elements have stores of their own.
_UNROLLED, _UNROLLED_IF_CUT = 32, 8
_WARP_THREADS = 32


@dataclasses.dataclass(frozen=True)
class Chunk:
    """One chunk, for each thread another one.

    Attributes:
      gmem, smem: pointers to it; the first is not valid where `bytes_inside` is 0.
      present: i1, false in threads without a chunk; None: all have one.
      bytes_inside: i32, how much of it is inside of the array, from its start; None:
        all of it.
    """

    gmem: ir.Value
    smem: ir.Value
    present: ir.Value | None
    bytes_inside: ir.Value | None


def over_chunks(
    plan: ThreadCopy,
    source: gmem.GmemView,
    part: smem.SmemView,
    emit: Callable[[list[Chunk]], None],
) -> None:
    """Emits the loop over the chunks of a copy.

    Args:
      plan: the chunks.
      source, part: the slices in GMEM and SMEM.
      emit: emits the transfer of several chunks of each thread.
    """
    kernel = module.current()
    in_warp = kernel.issuer == "warp"
    threads = _WARP_THREADS if in_warp else module.WARPGROUP_THREADS
    rounds = -(-plan.chunks // threads)
    unrolled = min(rounds, _UNROLLED_IF_CUT if plan.is_cut else _UNROLLED)
    mine = _thread_index(threads)

    def body(first_round: ir.Value | None) -> None:
        chunks = []
        for i in range(unrolled):
            number = arith.addi(mine, kernel.i32(i * threads)) if i else mine
            if first_round is not None:
                step = arith.muli(first_round, kernel.i32(threads))
                number = arith.addi(number, step)
            even = plan.chunks % (unrolled * threads) == 0
            present = None if even else _below(number, plan.chunks)
            chunks.append(chunk(plan, source, part, number, present))
        emit(chunks)

    if rounds == unrolled:
        body(None)
        return
    with control.counting(rounds, unrolled) as first_round:
        body(first_round)


def _thread_index(threads: int) -> ir.Value:
    """The index of the thread in its warpgroup, or in its warp."""
    bits = int(math.log2(threads))
    columns = [1 << b if b < bits else 0 for b in range(7)]
    return addressing.thread_sum(columns)


def _below(value: ir.Value, limit: int) -> ir.Value:
    bound = module.current().i32(limit)
    return arith.cmpi(arith.CmpIPredicate.ult, value, bound)


def chunk(
    plan: ThreadCopy,
    source: gmem.GmemView,
    part: smem.SmemView,
    number: ir.Value,
    present: ir.Value | None,
) -> Chunk:
    """The chunk of a number, which may differ between threads.

    Args:
      plan, source, part: the copy; starts of slices may differ between threads, too.
      number: i32.
      present: i1, whether the thread has it; None: yes.
    """
    places = _places(plan, number)
    if plan.is_line:
        bits = dtypes.stored_bits(source.dtype)
        offset = _offset_bytes(places[0], bits)
        pointers = (
            addressing.offset_pointer(gmem.slice_pointer(source), offset),
            addressing.offset_pointer(smem.slice_pointer(part), offset),
        )
    else:
        pointers = _element(source, places), _element(part, places)
    inside = _bytes_inside(plan, source, places)
    return Chunk(*pointers, present, inside)


def _places(plan: ThreadCopy, number: ir.Value) -> list[ir.Value]:
    """The index of a chunk's first element along each axis of the copy."""
    kernel = module.current()
    places: list[ir.Value] = []
    rest = number
    for count in reversed(plan.counts[1:]):
        places.append(arith.remui(rest, kernel.i32(count)))
        rest = arith.divui(rest, kernel.i32(count))
    places.append(rest)
    if plan.chunk_elems > 1:
        places[0] = arith.muli(places[0], kernel.i32(plan.chunk_elems))
    return places[::-1]


def _offset_bytes(place: ir.Value, bits: int) -> ir.Value:
    kernel = module.current()
    if bits < 8:
        return arith.divui(place, kernel.i32(8 // bits))
    return arith.muli(place, kernel.i32(bits // 8))


def _element(view: gmem.GmemView | smem.SmemView, places: Sequence[ir.Value]):
    """A pointer to the element at some indices of a view."""
    if not view.window.axes:
        places = []
    indices = tuple(Splat(place, dtypes.I32, ()) for place in places)
    elements = indexed.Elements(view, None, view.dtype, indices)
    (pointer,) = indexed.pointers(elements, None)
    if not dtypes.is_packed(view.dtype):
        return pointer
    # Of packed elements it is an offset in bits, which a chunk starts at a byte.
    three = arith.constant(pointer.type, 3)
    return addressing.offset_pointer(view.pointer, arith.shrui(pointer, three))


# --- bounds ---------------------------------------------------------------------------


def _bytes_inside(
    plan: ThreadCopy, source: gmem.GmemView, places: Sequence[ir.Value]
) -> ir.Value | None:
    """How much of a chunk is inside of the array; None: it always is."""
    if not plan.bounds:
        return None
    kernel = module.current()
    last = len(plan.counts) - 1
    size: ir.Value = kernel.i32(plan.chunk_bytes)
    conditions = []
    for bound in plan.bounds:
        position = _position(bound, source, places)
        # A negative position is a large one.
        conditions.append(_below(position, bound.limit))
        if bound.axis == last and plan.chunk_elems > 1:
            left = arith.subi(kernel.i32(bound.limit), position)
            size = _fewer_bytes(plan, size, left)
    inside = conditions[0]
    for condition in conditions[1:]:
        inside = arith.andi(inside, condition)
    return arith.select(inside, size, kernel.i32(0))


def _fewer_bytes(plan: ThreadCopy, size: ir.Value, left: ir.Value) -> ir.Value:
    """At most the bytes of the elements that are left before the bound."""
    bits = 8 * plan.chunk_bytes // plan.chunk_elems
    kernel = module.current()
    whole = _below(left, plan.chunk_elems)
    part_bits = arith.muli(left, kernel.i32(bits))
    part = arith.shrui(arith.addi(part_bits, kernel.i32(7)), kernel.i32(3))
    return arith.select(whole, part, size)


def _position(
    bound: Bound, source: gmem.GmemView, places: Sequence[ir.Value]
) -> ir.Value:
    kernel = module.current()
    start = source.window.starts[bound.array_axis]
    place = places[bound.axis]
    if isinstance(start, int):
        first = start * bound.scale
        return arith.addi(place, kernel.i32(first)) if first else place
    if bound.scale != 1:
        start = arith.muli(start, kernel.i32(bound.scale))
    return arith.addi(place, start)
