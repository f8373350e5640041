# SPDX-License-Identifier: Apache-2.0
"""TMA: asynchronous tensor copies between GMEM and SMEM.

One thread issues a copy for its warpgroup or its warp, depending on the builder's
issuer. A load completes on an mbarrier; a thread that observes the completed phase also
observes the data. Stores complete in bulk async-groups.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm

from pallas_gpu import errors
from pallas_gpu.emitters import (
    addressing,
    control,
    elected,
    mbarrier,
    module,
    smem,
    tensor_map,
)
from pallas_gpu.emitters.cluster import Group
from pallas_gpu.emitters.control import predicated
from pallas_gpu.emitters.copies import bulk, instructions
from pallas_gpu.emitters.elements import dtypes, packed
from pallas_gpu.emitters.gmem import GmemView, slice_pointer
from pallas_gpu.emitters.smem import SmemView
from pallas_gpu.layouts.gmem.tma_order import paired_axes
from pallas_gpu.layouts.gmem.tma_plan import TmaInstruction, TmaPlan, plan_copy
from pallas_gpu.layouts.smem.window import contiguous_layout
from pallas_gpu.types import OOBFillMode
from pallas_gpu.types.copies.reductions import REDUCTIONS, CopyReduction

# More copies than this are emitted as a loop, for code size and lowering time.
_MAX_UNROLLED = 8


def transfer_bytes(view: SmemView | GmemView) -> int:
    """The tx-count of a copy of the view on its mbarrier, padding included."""
    return math.prod(view.window.sizes) * dtypes.stored_bits(view.dtype) // 8


def copy_gmem_to_smem(
    kb: module.KernelBuilder,
    gmem: GmemView,
    smem_view: SmemView,
    barrier_pointer: ir.Value,
    *,
    sync: bool = True,
    arrive: bool = True,
    multicast: Group | None = None,
    pair: Group | None = None,
    predicate: ir.Value | None = None,
    cache_hint: str | None = None,
    oob_mode: OOBFillMode | None = None,
) -> None:
    """Starts a copy of a GMEM slice into SMEM; out-of-bounds elements become zero.

    With `OOBFillMode.NAN` they become NaN.

    PTX: `mbarrier.arrive.expect_tx`, `cp.async.bulk.tensor.shared::cluster.global`, or
    `cp.async.bulk.shared::cluster.global` of adjacent bytes that are in bounds. Since:
    sm_90. The threads of the warpgroup synchronize, then the elected one arrives on the
    mbarrier and issues the copy. It completes with the mbarrier's phase.

    Args:
      kb: the open builder.
      gmem: a slice of a kernel buffer.
      smem_view: of the same shape, contiguous in SMEM.
      barrier_pointer: `!llvm.ptr<3>`; the copy counts as one arrival.
      sync: False if no other thread can still be accessing the SMEM.
      arrive: False if the caller has added the bytes to the tx-count already.
      predicate: i1; where it is false, nothing is copied and the arrival has 0 bytes.
      multicast: blocks of the cluster that all call this with the same slice and the
        same SMEM offsets: each copies its part to all of them, and the mbarrier of each
        counts the bytes of the whole (`.multicast::cluster`). Their SMEM must be free
        and their mbarriers initialized before any of them issues its part.
      pair: the two blocks of which both call this, and of which the first one's
        mbarrier counts the bytes of both (`.cta_group::2`, since sm_100a).
      cache_hint: see `instructions.cache_policy`.
      oob_mode: what the author says about elements outside of the array.

    Raises:
      LayoutError: no tensor map can describe the copy.
    """
    if multicast is not None and multicast.count == 1:
        multicast = None
    found: TmaPlan | int
    if multicast is not None or pair is not None:
        found = plan_transfer(gmem, smem_view, multicast.count if multicast else 1)
    else:
        line = bulk.size_bytes(gmem, smem_view, oob_mode)
        found = line or _mapped_or_line(gmem, smem_view, oob_mode)
    nan_fill = oob_mode is OOBFillMode.NAN and not all(gmem.window.known_inside())
    base = smem.slice_pointer(smem_view)
    ready = Transfer.of(gmem, found, base, transfer_bytes(smem_view), nan_fill)
    policy = instructions.cache_policy(cache_hint)
    if sync:
        mbarrier.synchronize()
    with elected.thread() as by:
        if arrive:
            expect(ready, barrier_pointer, pair=pair, predicate=predicate, by=by)
        with predicated(predicate):
            start_load(
                ready, barrier_pointer, multicast=multicast, pair=pair, policy=policy,
                by=by,
            )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A copy that is planned, and what its instructions need.

    Attributes:
      gmem: the slice of GMEM.
      found: the plan of tensor copies, or the size in bytes of adjacent ones.
      tensor: address of the tensor map; None without one.
      base: `!llvm.ptr<3>` of the slice of SMEM.
      size_bytes: that an mbarrier counts.
    """

    gmem: GmemView
    found: TmaPlan | int
    tensor: ir.Value | None
    base: ir.Value
    size_bytes: int

    @classmethod
    def of(
        cls,
        gmem: GmemView,
        found: TmaPlan | int,
        base: ir.Value,
        size_bytes: int = 0,
        nan_fill: bool = False,
        element: np.dtype | None = None,
    ) -> Transfer:
        """Emits the tensor map of a plan; see `descriptor`."""
        tensor = None
        if isinstance(found, TmaPlan):
            tensor = descriptor(gmem, found, element, nan_fill=nan_fill)
        return cls(gmem, found, tensor, base, size_bytes)


def expect(
    transfer: Transfer,
    barrier_pointer: ir.Value,
    *,
    pair: Group | None = None,
    predicate: ir.Value | None = None,
    by: ir.Value | None = None,
) -> None:
    """Arrives for a load and adds its bytes to the tx-count, in one thread.

    Args:
      transfer, barrier_pointer: of the load.
      pair, predicate: see `copy_gmem_to_smem`.
      by: i1, the predicate of the threads that issue it; None is all.
    """
    kernel = module.current()
    with predicated(_leads(pair)):
        num_bytes: int | ir.Value = transfer.size_bytes
        num_bytes *= 1 if pair is None else pair.count
        if predicate is not None:
            num_bytes = arith.select(predicate, kernel.i32(num_bytes), kernel.i32(0))
        mbarrier.emit_arrive_expect_tx(barrier_pointer, num_bytes, by)


def start_load(
    transfer: Transfer,
    barrier_pointer: ir.Value,
    *,
    multicast: Group | None = None,
    pair: Group | None = None,
    policy: ir.Value | None = None,
    by: ir.Value | None = None,
) -> None:
    """Emits the instructions of a load, for one thread.

    Args:
      transfer: the load.
      barrier_pointer, multicast, pair: see `copy_gmem_to_smem`.
      policy: i64, of `instructions.cache_policy`.
      by: i1, the predicate of the threads that issue it; None is all.
    """
    gmem, found, tracked = transfer.gmem, transfer.found, barrier_pointer
    if pair is not None:
        tracked = addressing.map_shared(barrier_pointer, pair.ranks[0])
    if not isinstance(found, TmaPlan):
        source = slice_pointer(gmem)
        instructions.load_line(
            transfer.base, source, found, tracked, policy=policy, by=by
        )
        return
    tensor, mask = transfer.tensor, multicast.mask if multicast else None
    assert tensor is not None
    load = functools.partial(
        instructions.load, of_pair=pair is not None, mask=mask, policy=policy, by=by
    )
    issue(
        found, gmem.window.starts, transfer.base,
        lambda to, at: load(to, tensor, at, tracked), multicast,
    )  # fmt: skip


def _leads(pair: Group | None) -> ir.Value | None:
    """i1: whether this block is the first of a pair; None without one."""
    if pair is None:
        return None
    return arith.cmpi(arith.CmpIPredicate.eq, pair.index, module.current().i32(0))


def copy_smem_to_gmem(
    kb: module.KernelBuilder,
    smem_view: SmemView,
    gmem: GmemView,
    *,
    reduction: str | None = None,
    sync: bool = True,
    commit: bool = True,
    cache_hint: str | None = None,
) -> None:
    """Starts a copy of SMEM into a GMEM slice; drops out-of-bounds elements.

    PTX: `cp.async.bulk.tensor.global.shared::cta`, or `cp.reduce.async.bulk.tensor`, or
    these without `.tensor` of adjacent bytes that are in bounds, then
    `cp.async.bulk.commit_group`. Since: sm_90. Each thread that wrote the SMEM issues
    `fence_proxy_async` before. The threads of the warpgroup synchronize, then the
    elected one issues the copy. `wait_group` waits for its completion.

    Args:
      kb: the open builder.
      smem_view: contiguous in SMEM.
      gmem: a slice of a kernel buffer, of the same shape.
      reduction: combine with the contents of GMEM, atomically per element: a name of
        `REDUCTIONS`.
      sync: False if the threads that wrote the SMEM have synchronized already.
      commit: commit the group; False adds the copy to the next copy's group.
      cache_hint: see `instructions.cache_policy`.

    Raises:
      LayoutError: no tensor map can describe the copy.
    """
    policy = instructions.cache_policy(cache_hint)
    combines = REDUCTIONS[reduction] if reduction else None
    measure = bulk.size_bytes if combines is None else bulk.reduced_bytes
    found = measure(gmem, smem_view) or _mapped_or_line(gmem, smem_view)
    element = combines.element(gmem.dtype) if combines else None
    base = smem.slice_pointer(smem_view)
    ready = Transfer.of(gmem, found, base, element=element)
    if sync:
        mbarrier.synchronize()
    with predicated(kb.elected):
        start_store(ready, combines, policy)
        if commit:
            commit_group()


def start_store(
    transfer: Transfer,
    combines: CopyReduction | None = None,
    policy: ir.Value | None = None,
) -> None:
    """Emits the instructions of a store, for code that one thread executes.

    Args:
      transfer: the store.
      combines: how it combines with the contents of GMEM.
      policy: i64, of `instructions.cache_policy`.
    """
    gmem, found, base = transfer.gmem, transfer.found, transfer.base
    if not isinstance(found, TmaPlan):
        if combines is None:
            instructions.store_line(base, slice_pointer(gmem), found, policy)
            return
        suffix, to = bulk.suffix(combines, gmem.dtype), slice_pointer(gmem)
        instructions.reduce_line(suffix, base, to, found, policy)
        return
    tensor = transfer.tensor
    assert tensor is not None

    def copy(pointer: ir.Value, coordinates: list[ir.Value]) -> None:
        if combines is None:
            instructions.store(pointer, tensor, coordinates, policy)
        else:
            operation = combines.operation
            instructions.reduce(operation, pointer, tensor, coordinates, policy)

    issue(found, gmem.window.starts, base, copy)


def commit_group() -> None:
    """Commits the thread's stores since the last commit to a new group.

    PTX: `cp.async.bulk.commit_group`. Since: sm_90.
    """
    nvvm.cp_async_bulk_commit_group()


def wait_group(n: int, wait_read_only: bool = False, *, sync: bool = True) -> None:
    """Waits until at most the `n` most recent groups of stores are pending.

    PTX: `cp.async.bulk.wait_group{.read}`. Since: sm_90. All threads of the warpgroup,
    or of the warp, issue it and then synchronize. Groups belong to the thread that
    issued their copies: each warp has its own.

    Args:
      n: 0 waits for all.
      wait_read_only: wait only until the SMEM has been read and may be overwritten.
      sync: False if the caller synchronizes its threads.
    """
    nvvm.cp_async_bulk_wait_group(n, read=wait_read_only)
    if sync:
        mbarrier.synchronize()


def fence_proxy_async(remote: bool = False) -> None:
    """Orders the thread's accesses to SMEM before those of asynchronous work.

    That reads what the thread has written, or overwrites what it has read or written.

    PTX: `fence.proxy.async.shared::cta`. Since: sm_90. Each thread issues it, then the
    threads synchronize.

    Args:
      remote: whether the thread has accessed the SMEM of other CTAs, too:
        `.shared::cluster`.
    """
    spaces = nvvm.SharedSpace
    space = spaces.shared_cluster if remote else spaces.shared_cta
    nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=space)


def fence_proxy_async_global() -> None:
    """Makes the thread's GMEM writes visible to asynchronous copies.

    PTX: `fence.proxy.async.global`. Since: sm_90. Each writing thread issues it, then
    the threads synchronize.
    """
    nvvm.fence_proxy(nvvm.ProxyKind.async_global)


# --- the plan -------------------------------------------------------------------------


def _mapped_or_line(
    gmem: GmemView, smem_view: SmemView, mode: OOBFillMode | None = None
) -> TmaPlan | int:
    """The tensor copy of a copy, or its bytes if that would be several or none.

    Raises:
      LayoutError: no tensor map describes it, nor are the bytes adjacent and in bounds.
    """
    line = bulk.size_bytes(gmem, smem_view, mode, is_box=False)
    if line is None:
        return plan_transfer(gmem, smem_view)
    try:
        plan = plan_transfer(gmem, smem_view)
    except errors.LayoutError:
        return line
    return plan if len(plan.instructions) == 1 else line


def plan_transfer(gmem: GmemView, smem_view: SmemView, pieces: int = 1) -> TmaPlan:
    """The tensor map and instructions of a copy between two views.

    Args:
      pieces: the number of equal parts that the instructions must divide into.
    """
    if gmem.shape != smem_view.shape or gmem.dtype != smem_view.dtype:
        raise errors.ShapeError(
            "Source and destination of the copy differ",
            expected=f"{smem_view.dtype}{list(smem_view.shape)} as in SMEM",
            got=f"{gmem.dtype}{list(gmem.shape)} in GMEM",
        )
    window = gmem.window
    axes = paired_axes(window, smem_view.window, pieces)
    return plan_copy(
        window.array_shape,
        dtypes.stored_bits(gmem.dtype),
        window.sizes,
        window.squeezed,
        contiguous_layout(smem_view.layout, smem_view.window),
        start_multiples=window.multiples,
        inside=window.known_inside(),
        pieces=pieces,
        axes=axes,
    )


def descriptor(
    gmem: GmemView,
    plan: TmaPlan,
    element: np.dtype | None = None,
    *,
    nan_fill: bool = False,
) -> ir.Value:
    """The address of the tensor map of a plan.

    Args:
      gmem: a slice of a kernel buffer.
      plan: of a copy of the slice.
      element: the element type that the map states; None: that of the array.
      nan_fill: whether a load reads NaN outside of the array, not zero.
    """
    if gmem.buffer_index is None:
        raise errors.MemorySpaceError(
            "A tensor copy requires an operand or result of the kernel",
            expected="a slice of a GMEM reference that is a kernel parameter",
            got="an address that is not in a kernel buffer",
        )
    itemsize_bytes = plan.element_bits // 8
    strides = [dim.stride_bytes // itemsize_bytes for dim in plan.dims[:-1]]
    return tensor_map.tensor_map_pointer(
        tensor_map.TensorMap(
            buffer_index=gmem.buffer_index,
            dtype=(element or packed.item_dtype(gmem.dtype)).name,
            sizes=tuple(dim.size for dim in plan.dims),
            strides=(*strides, 1),
            box=tuple(dim.box for dim in plan.dims),
            swizzle=plan.swizzle,
            nan_fill=nan_fill,
            **tensor_map.owned_by(gmem.owner),
        ),
        gmem.owner,
    )


# --- issuing --------------------------------------------------------------------------

Copy = Callable[[ir.Value, list[ir.Value]], None]


def issue(
    plan: TmaPlan,
    starts: Sequence[int | ir.Value],
    base: ir.Value,
    copy: Copy,
    shared_by: Group | None = None,
) -> None:
    """Emits the copies of a plan; coordinates are innermost first, as in PTX.

    Args:
      plan: the copies.
      starts: of the slice, one for each dimension of the array.
      base: `!llvm.ptr<3>` of the slice of SMEM.
      copy: emits one copy.
      shared_by: blocks each of which issues one of equal runs of the copies.
    """
    if shared_by is not None:
        _issue_piece(plan, starts, base, copy, shared_by)
        return
    origin = [_coordinate(dim.sources, starts) for dim in plan.dims]
    steps = plan.instructions
    period = _period(steps) if len(steps) > _MAX_UNROLLED else None
    if period is None:
        _issue_each(steps, origin, base, copy)
        return
    with control.counting(len(steps)) as counter:
        _issue_one(plan, origin, base, counter, period, copy)


def _issue_piece(
    plan: TmaPlan,
    starts: Sequence[int | ir.Value],
    base: ir.Value,
    copy: Copy,
    blocks: Group,
) -> None:
    """Emits this block's share of the copies: one of as many runs as blocks."""
    kernel = module.current()
    origin = [_coordinate(dim.sources, starts) for dim in plan.dims]
    steps = plan.instructions
    share, period = len(steps) // blocks.count, _period(steps)
    if period is None:
        for piece in range(blocks.count):
            run = steps[piece * share : (piece + 1) * share]
            mine = arith.cmpi(arith.CmpIPredicate.eq, blocks.index, kernel.i32(piece))
            with predicated(mine):
                _issue_each(run, origin, base, copy)
        return
    first = arith.muli(blocks.index, kernel.i32(share))
    if share > _MAX_UNROLLED:
        with control.counting(share) as counter:
            number = arith.addi(first, counter)
            _issue_one(plan, origin, base, number, period, copy)
        return
    for i in range(share):
        number = arith.addi(first, kernel.i32(i))
        _issue_one(plan, origin, base, number, period, copy)


def _issue_each(
    steps: Sequence[TmaInstruction],
    origin: Sequence[int | ir.Value],
    base: ir.Value,
    copy: Copy,
) -> None:
    for step in steps:
        pointer = addressing.offset_pointer(base, step.smem_offset_bytes)
        pairs = zip(origin, step.addends, strict=True)
        at = [module.current().i32(smem.add_index(o, a)) for o, a in pairs]
        copy(pointer, at[::-1])


def _issue_one(
    plan: TmaPlan,
    origin: Sequence[int | ir.Value],
    base: ir.Value,
    counter: ir.Value,
    period: int,
    copy: Copy,
) -> None:
    kernel, steps = module.current(), plan.instructions
    offset = arith.muli(counter, kernel.i32(steps[1].smem_offset_bytes))
    inner, outer = counter, None
    if period < len(steps):
        inner = arith.remui(counter, kernel.i32(period))
        outer = arith.divui(counter, kernel.i32(period))
    at: list[ir.Value] = []
    for i, start in enumerate(origin):
        index = start
        if steps[1].addends[i]:
            index = smem.add_index(
                arith.muli(inner, kernel.i32(steps[1].addends[i])), index
            )
        if outer is not None and steps[period].addends[i]:
            index = smem.add_index(
                arith.muli(outer, kernel.i32(steps[period].addends[i])), index
            )
        at.append(module.current().i32(index))
    copy(addressing.offset_pointer(base, offset), at[::-1])


def _period(steps: Sequence[TmaInstruction]) -> int | None:
    """The p such that instruction n is n // p outer and n % p inner steps away.

    len(steps) means a single loop; None means that the copies are irregular.
    """
    count, box_bytes = len(steps), steps[1].smem_offset_bytes
    if any(s.smem_offset_bytes != n * box_bytes for n, s in enumerate(steps)):
        return None
    for period in (count, *(p for p in range(2, count) if count % p == 0)):
        outer = steps[period].addends if period < count else steps[0].addends
        if all(
            s.addends[i] == (n // period) * outer[i] + (n % period) * inner
            for n, s in enumerate(steps)
            for i, inner in enumerate(steps[1].addends)
        ):
            return period
    return None


def _coordinate(sources, starts: Sequence[int | ir.Value]) -> int | ir.Value:
    """The sum of `start * multiplier // divisor` over the sources."""
    kernel = module.current()
    total: int | ir.Value = 0
    for source in sources:
        term = starts[source.gmem_dim]
        if isinstance(term, int):
            term = term * source.multiplier // source.divisor
        else:
            if source.multiplier != 1:
                term = arith.muli(term, kernel.i32(source.multiplier))
            if source.divisor != 1:
                # Exact: the plan divides only multiples of the divisor.
                term = arith.divsi(term, kernel.i32(source.divisor))
        total = smem.add_index(total, term)
    return total
