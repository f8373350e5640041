# SPDX-License-Identifier: Apache-2.0
"""Copies by all threads of a warpgroup or a warp: cp.async, and the way back.

A load of 4, 8 or 16 bytes is asynchronous. Narrower ones go through registers.
"""

from __future__ import annotations

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_gpu.emitters import addressing, control, mbarrier, module, tma
from pallas_gpu.emitters.addressing import global_pointer
from pallas_gpu.emitters.control import predicated
from pallas_gpu.emitters.copies.chunks import Chunk, over_chunks
from pallas_gpu.emitters.elements import dtypes, predication
from pallas_gpu.emitters.gmem import GmemView
from pallas_gpu.emitters.smem import SmemView
from pallas_gpu.layouts.gmem.thread_copy import ThreadCopy, plan_threads

_INTEGERS = {8: dtypes.I64, 4: dtypes.I32, 2: dtypes.I16, 1: dtypes.I8}


def plan_transfer(gmem: GmemView, smem_view: SmemView, *, store: bool) -> ThreadCopy:
    """The chunks of a copy between two views."""
    return plan_threads(gmem.window, smem_view.layout, smem_view.window, store=store)


def copy_gmem_to_smem(
    gmem: GmemView,
    smem_view: SmemView,
    barrier_pointer: ir.Value | None,
    predicate: ir.Value | None = None,
) -> ThreadCopy:
    """Starts a copy of a GMEM slice into SMEM; out-of-bounds elements become zero.

    PTX: `cp.async.cg.shared.global` of 16 bytes, `.ca` of 4 or 8; `ld.global` and
    `st.shared` of less. Then `cp.async.mbarrier.arrive` and one `mbarrier.arrive`, or
    `cp.async.commit_group`. Since: sm_80. All threads of the issuer synchronize first.

    Args:
      gmem: a slice of an array.
      smem_view: of the same shape, in any layout.
      barrier_pointer: `!llvm.ptr<3>`; the copy counts as one arrival. None: the copy is
        a group of its own.
      predicate: i1; where it is false nothing is copied, and the arrival remains.

    Returns:
      How the copy is divided.
    """
    plan = plan_transfer(gmem, smem_view, store=False)
    mbarrier.synchronize()
    with predicated(predicate):
        over_chunks(plan, gmem, smem_view, lambda chunks: load_chunks(plan, chunks))
        if barrier_pointer is not None and plan.is_asynchronous:
            arrive_when_copied(barrier_pointer)
    finish_load(barrier_pointer)
    return plan


def finish_load(barrier_pointer: ir.Value | None) -> None:
    """Ends a copy to SMEM: one arrival for all threads, or a group."""
    if barrier_pointer is None:
        assembly("cp.async.commit_group;", [], "")
        return
    # The threads' arrivals are pending before the one that counts: it alone completes
    # the phase, in this order.
    mbarrier.arrive(barrier_pointer)


def wait_group(n: int) -> None:
    """Waits until at most the `n` most recent groups are pending.

    PTX: `cp.async.wait_group`, `fence.proxy.async.shared::cta`. Since: sm_80. All
    threads of the issuer issue it and then synchronize.
    """
    assembly(f"cp.async.wait_group {n};", [], "")
    # The copies are of the generic proxy, and their data may be for another.
    tma.fence_proxy_async()
    mbarrier.synchronize()


def copy_smem_to_gmem(
    smem_view: SmemView, gmem: GmemView, predicate: ir.Value | None = None
) -> ThreadCopy:
    """Copies SMEM into a GMEM slice; drops out-of-bounds elements.

    PTX: `ld.shared`, `st.global` of up to 16 bytes, `fence.proxy.async.global`. All
    threads of the issuer synchronize before and after it.

    Args:
      smem_view: a slice of an array in any layout.
      gmem: a slice of the same shape.
      predicate: i1; where it is false nothing is copied.

    Returns:
      How the copy is divided.
    """
    plan = plan_transfer(gmem, smem_view, store=True)
    mbarrier.synchronize()
    with predicated(predicate):
        over_chunks(plan, gmem, smem_view, lambda chunks: store_chunks(plan, chunks))
    tma.fence_proxy_async_global()
    mbarrier.synchronize()
    return plan


# --- chunks ---------------------------------------------------------------------------


def load_chunks(plan: ThreadCopy, chunks: list[Chunk]) -> None:
    """Loads chunks of each thread into SMEM, asynchronously if cp.async can."""
    (_start if plan.is_asynchronous else _load)(plan, chunks)


def _start(plan: ThreadCopy, chunks: list[Chunk]) -> None:
    size = plan.chunk_bytes
    cache = "cg" if size == 16 else "ca"
    i32 = ir.IntegerType.get_signless(32)
    for chunk in chunks:
        operands = [llvm.ptrtoint(i32, chunk.smem), global_pointer(chunk.gmem)]
        constraints, text = ["r", "l"], f"cp.async.{cache}.shared.global [$0], [$1], "
        text += str(size)
        if chunk.bytes_inside is not None:
            # The rest is filled with zeros.
            operands.append(chunk.bytes_inside)
            constraints.append("r")
            text += f", ${len(operands) - 1}"
        if chunk.present is not None:
            operands.append(chunk.present)
            constraints.append("b")
            text = f"@${len(operands) - 1} {text}"
        assembly(f"{text};", operands, ",".join(constraints))


def _load(plan: ThreadCopy, chunks: list[Chunk]) -> None:
    type_ = _vector(plan)
    zero = dtypes.splat(dtypes.constant(0, _integer(plan)), 1)
    # All loads first: they are under way at the same time.
    values = [
        predication.load(
            type_, global_pointer(c.gmem), control.both(c.present, _inside(c)), zero
        )
        for c in chunks
    ]
    for chunk, value in zip(chunks, values, strict=True):
        predication.store(value, chunk.smem, chunk.present)


def store_chunks(plan: ThreadCopy, chunks: list[Chunk]) -> None:
    """Stores chunks of each thread from SMEM."""
    type_, dtype = _vector(plan), _integer(plan)
    count = plan.chunk_bytes // dtype.itemsize
    zero = dtypes.splat(dtypes.constant(0, dtype), count)
    values = [predication.load(type_, c.smem, c.present, zero) for c in chunks]
    for chunk, value in zip(chunks, values, strict=True):
        pointer, inside = global_pointer(chunk.gmem), _inside(chunk)
        if plan.is_cut:
            inside = _compared(chunk.bytes_inside, "eq", plan.chunk_bytes)
            _store_elements(plan, chunk, value, pointer, inside)
        predication.store(value, pointer, control.both(chunk.present, inside))


def _store_elements(
    plan: ThreadCopy, chunk: Chunk, value: ir.Value, pointer: ir.Value, whole: ir.Value
) -> None:
    """Stores the elements inside of the array of a chunk that is not whole."""
    size = plan.chunk_bytes // plan.chunk_elems
    elements = dtypes.bitcast(value, _INTEGERS[size])
    zero = module.current().i32(0)
    inside = arith.select(whole, zero, chunk.bytes_inside)
    for i in range(plan.chunk_elems - 1):
        element = dtypes.pack([dtypes.extract(elements, i)])
        place = addressing.offset_pointer(pointer, i * size)
        condition = _compared(inside, "sgt", i * size)
        predication.store(element, place, control.both(chunk.present, condition))


def _integer(plan: ThreadCopy):
    return _INTEGERS[min(plan.chunk_bytes, 4)]


def _vector(plan: ThreadCopy) -> ir.Type:
    dtype = _integer(plan)
    return dtypes.vector_type(dtype, plan.chunk_bytes // dtype.itemsize)


def _inside(chunk: Chunk) -> ir.Value | None:
    if chunk.bytes_inside is None:
        return None
    return _compared(chunk.bytes_inside, "ne", 0)


def _compared(value: ir.Value, relation: str, number: int) -> ir.Value:
    predicate = arith.CmpIPredicate[relation]
    return arith.cmpi(predicate, value, module.current().i32(number))


def arrive_when_copied(barrier_pointer: ir.Value) -> None:
    """The thread's arrival, pending at once, done when its copies are.

    Without `.noinc` the two cancel each other out: the count is that of the kernel's
    author, whatever the number of threads.
    """
    text = "cp.async.mbarrier.arrive.shared::cta.b64 [$0];"
    assembly(text, [barrier_pointer], "r")


def assembly(text: str, operands: list[ir.Value], constraints: str) -> None:
    """One instruction without a result, ordered with all other accesses."""
    joined = ",".join(filter(None, [constraints, "~{memory}"]))
    llvm.inline_asm(None, operands, text, joined, has_side_effects=True)
