# SPDX-License-Identifier: Apache-2.0
"""Clusters: a block's rank, and accesses to the SMEM of the other blocks.

The blocks (CTAs) of a cluster are co-scheduled and can address each other's SMEM. A
block must not exit while others still write to its SMEM or arrive on its mbarriers:
`KernelBuilder.sync_before_exit` ensures that.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, nvvm

from pallas_gpu import errors
from pallas_gpu.emitters import addressing, elected, indexed, mbarrier, module
from pallas_gpu.emitters.control import predicated
from pallas_gpu.emitters.elements import arith, dtypes
from pallas_gpu.emitters.elements.convert import convert_value
from pallas_gpu.emitters.mbarrier import MemoryScope
from pallas_gpu.emitters.registers import Array
from pallas_gpu.layouts.registers.placement import Placement


@dataclasses.dataclass(frozen=True)
class Group:
    """The blocks of a cluster that differ from this one along some axes only.

    Attributes:
      index: i32, this block's index in the group, row-major over the axes.
      ranks: i32 each, the ranks of the group's blocks, by index.
      mask: i16, bit r is set if the block of rank r belongs to the group.
    """

    index: ir.Value
    ranks: tuple[ir.Value, ...]
    mask: ir.Value

    @property
    def count(self) -> int:
        """The number of blocks in the group."""
        return len(self.ranks)

    @property
    def leader(self) -> Group:
        """The block with index 0 alone; `index` is still that in the whole group."""
        return dataclasses.replace(self, ranks=self.ranks[:1])


def rank() -> ir.Value:
    """i32: the block's rank in its cluster, x fastest. PTX: `%cluster_ctarank`."""
    kernel = module.current()
    if not kernel.spec.has_cluster:
        return kernel.i32(0)
    i32 = ir.IntegerType.get_signless(32)
    return kernel.hoisted(
        "cluster rank", lambda: nvvm.read_ptx_sreg_cluster_ctarank(results=[i32])
    )


def group(sizes: Sequence[int], axes: Sequence[int]) -> Group:
    """The blocks along some axes of the cluster, this one included.

    Args:
      sizes: sizes of the cluster's axes, the last one fastest: x of the launch is last.
      axes: positions in `sizes`, in any order; the order defines the blocks' indices.
    """
    kernel = module.current()
    sizes, axes = tuple(sizes), tuple(axes)
    if math.prod(sizes) != math.prod(kernel.spec.cluster):
        raise errors.ArgumentError(
            "The sizes of the cluster's axes do not match the launched cluster",
            expected=f"sizes with the product {math.prod(kernel.spec.cluster)}",
            got=sizes,
        )
    if len(set(axes)) != len(axes) or any(not 0 <= a < len(sizes) for a in axes):
        raise errors.ArgumentError(
            "Invalid axes of the cluster",
            expected=f"distinct positions below {len(sizes)}",
            got=axes,
        )
    strides = [math.prod(sizes[a + 1 :]) for a in range(len(sizes))]
    chosen = tuple((sizes[a], strides[a]) for a in axes if sizes[a] > 1)
    offsets = [0]
    for size, stride in chosen:
        offsets = [o + i * stride for o in offsets for i in range(size)]
    whole = len(offsets) == math.prod(sizes)
    first = kernel.i32(0) if whole else _hoisted("first", chosen, _first)
    ranks = tuple(
        _hoisted("rank", (chosen, o), lambda key: _plus(first, key[1])) for o in offsets
    )
    bits = sum(1 << o for o in offsets)
    mask = _hoisted("mask", (chosen, bits), lambda key: _mask(first, key[1]))
    return Group(_hoisted("index", chosen, _index), ranks, mask)


def rank_at(sizes: Sequence[int], positions: Mapping[int, int | ir.Value]) -> ir.Value:
    """i32: the rank of the block at some positions; elsewhere those of this block.

    Args:
      sizes: sizes of the cluster's axes, the last one fastest.
      positions: of the block, i32, by axis.
    """
    kernel = module.current()
    result = kernel.i32(0) if len(positions) == len(sizes) else rank()
    for axis, position in positions.items():
        stride = math.prod(sizes[axis + 1 :])
        step = kernel.i32(position)
        if len(positions) < len(sizes):
            step = arith.subi(step, _along(sizes[axis], stride))
        result = arith.addi(result, arith.muli(step, kernel.i32(stride)))
    return result


def arrive(
    pointer: ir.Value,
    blocks: Group,
    *others: Group,
    elected: ir.Value | None = None,
    sync: bool = True,
    memory_scope: MemoryScope = "cluster",
    orders_tensor_core: bool = False,
    count: int = 1,
) -> None:
    """Arrives once on the same mbarrier of each block of some groups.

    PTX: `mbarrier.arrive.release.{cta,cluster}.shared::cluster.b64`. Since: sm_90. The
    SMEM accesses of the arriving warpgroup, or warp, are ordered before the arrivals.
    Waiters acquire in the scope of the arrivals.

    Args:
      pointer: `!llvm.ptr<3>` of this block's mbarrier.
      blocks: the blocks to arrive at.
      others: further groups, which have this block alone in common.
      elected: i1, true in the thread that arrives; None: the issuer's elected thread,
        or for several blocks a lane each of the issuer's first warp.
      sync: False if the caller has synchronized its threads already.
      memory_scope: "cluster" makes the threads' writes visible to the other blocks. It
        costs a fence at GPU scope for each instruction (MEMBAR.ALL.GPU in SASS, which
        halves the speed of a matrix product); "cta" suffices to release reads.
      orders_tensor_core: see `mbarrier.fence_before_arrival`; needs `sync`.
      count: how many arrivals it counts as, at each block.
    """
    if orders_tensor_core:
        mbarrier.fence_before_arrival()
    if sync:
        mbarrier.synchronize()
    kernel = module.current()
    ranks = blocks.ranks
    if elected is None and blocks.count > 1:
        # One instruction of several lanes has one fence, which precedes them all.
        rank_of_lane, arrives = _lane_ranks(blocks)
        remote = addressing.map_shared(pointer, rank_of_lane)
        emit_arrive_remote(remote, memory_scope, count, arrives)
        ranks = ()
    if not ranks and not others:
        return
    with predicated(kernel.elected if elected is None else elected):
        for block_rank in ranks:
            remote = addressing.map_shared(pointer, block_rank)
            emit_arrive_remote(remote, memory_scope, count)
        for group_ in others:
            for i, block_rank in enumerate(group_.ranks):
                unequal = arith.CmpIPredicate.ne
                with predicated(arith.cmpi(unequal, group_.index, kernel.i32(i))):
                    remote = addressing.map_shared(pointer, block_rank)
                    emit_arrive_remote(remote, memory_scope, count)


def _lane_ranks(blocks: Group) -> tuple[ir.Value, ir.Value]:
    """i32, i1: a block's rank in each of the first lanes, and whether it is one."""
    kernel = module.current()
    lane, equal = kernel.issuer_thread, arith.CmpIPredicate.eq
    rank_of_lane = blocks.ranks[0]
    for i, block_rank in enumerate(blocks.ranks[1:], 1):
        is_lane = arith.cmpi(equal, lane, kernel.i32(i))
        rank_of_lane = arith.select(is_lane, block_rank, rank_of_lane)
    less = arith.CmpIPredicate.ult
    return rank_of_lane, arith.cmpi(less, lane, kernel.i32(blocks.count))


def emit_arrive_remote(
    remote: ir.Value,
    memory_scope: MemoryScope = "cluster",
    count: int = 1,
    by: ir.Value | None = None,
) -> None:
    """Emits only the instruction, for code that only the elected thread executes.

    Args:
      remote: `!llvm.ptr<7>` of the mbarrier, a result of `map_shared`.
      memory_scope, count: see `arrive`.
      by: i1, the predicate of the threads that arrive; None is all.
    """
    address = llvm.ptrtoint(ir.IntegerType.get_signless(32), remote)
    text = f"mbarrier.arrive.release.{memory_scope}.shared::cluster.b64 _, [$0]"
    elected.instruction(text + mbarrier.counted(count), [address], "r", by)


# --- asynchronous stores --------------------------------------------------------------

# The widest st.async (PTX ISA, st.async: .v4 of 32 bits).
_MAX_STORE_BYTES = 16
_COMPLETION = "shared::cluster.mbarrier::complete_tx::bytes"


def store_async(
    elements: indexed.Elements,
    layout: Placement | None,
    value: Array,
    barrier: ir.Value,
    atomic: str | None = None,
    sem: str = "release",
) -> None:
    """Stores an array to the SMEM of a block, which counts its bytes on an mbarrier.

    PTX: `mbarrier.arrive.expect_tx.{release,relaxed}.cluster.shared::cluster.b64`, then
    `st.async.weak.shared::cluster.mbarrier::complete_tx::bytes` or `red.async.relaxed.
    cluster`. Since: sm_90. All threads of the warpgroup issue it.

    Args:
      elements: what is stored to, with a rank.
      layout: of the value; None for a single element.
      value: of the elements' dtype.
      barrier: `!llvm.ptr<3>` of this block's mbarrier; the other block's counts.
      atomic: `add` and the like: combines elements with those in memory.
      sem: "relaxed": the arrival, for which threads do not meet, orders no accesses
        before it. Bytes that complete earlier are counted all the same: the arrival
        keeps the phase from completing (PTX ISA, expect-tx operation).
    """
    memory, kernel = elements.memory_dtype, module.current()
    assert elements.rank is not None
    i32 = ir.IntegerType.get_signless(32)
    target = addressing.map_shared(barrier, elements.rank)
    target = llvm.ptrtoint(i32, target)
    shape = () if layout is None else layout.shape
    if sem == "release":
        mbarrier.synchronize()
    with predicated(kernel.elected):
        llvm.inline_asm(
            None,
            [target, kernel.i32(math.prod(shape) * memory.itemsize)],
            f"mbarrier.arrive.expect_tx.{sem}.cluster.shared::cluster.b64 _, [$0], $1;",
            "r,r,~{memory}",
            has_side_effects=True,
        )
    values = indexed.lanes_of(value, layout)
    assert values is not None
    addresses = indexed.pointers(elements, layout)
    wanted = indexed.conditions(elements, layout)
    most = memory.itemsize if atomic else _MAX_STORE_BYTES
    parts = indexed.parts(elements, layout, wanted, most)
    if min(part.length for part in parts) * memory.itemsize < dtypes.I32.itemsize:
        raise errors.LayoutError(
            "async_store_smem: narrow elements do not fill words of 32 bits",
            expected="a layout in which a thread has whole words, and a start that is "
            "known to be a multiple of one",
            got=f"{memory.name} in {layout}",
            hint="cast the array with layout_cast, promise the start with multiple_of, "
            "or use cluster_ref(ref, ...)[...] = x",
        )
    with predicated(indexed.issuing_threads(layout)):
        for first, count, condition in parts:
            vector = dtypes.pack(values[first : first + count])
            vector = convert_value(vector, elements.dtype, memory)
            place = llvm.ptrtoint(i32, addresses[first])
            _store_async(vector, memory, place, target, condition, atomic)


def _store_async(
    vector: ir.Value,
    dtype: np.dtype,
    place: ir.Value,
    barrier: ir.Value,
    condition: ir.Value | None,
    atomic: str | None,
) -> None:
    """One instruction of a thread."""
    if atomic is None:
        whole = dtypes.bitcast(vector, dtypes.I32)
        words = [dtypes.extract(whole, i) for i in range(dtypes.length(whole) or 1)]
        suffix = ".b32" if len(words) == 1 else f".v{len(words)}.b32"
        name, register = f"st.async.weak.{_COMPLETION}{suffix}", "r"
    else:
        bits = 8 * dtype.itemsize
        word = dtypes.bitcast(vector, np.dtype(f"int{bits}"))
        words = [dtypes.extract(word, 0)]
        register = "r" if bits == 32 else "l"
        # A sum of signed integers has the bits of that of unsigned ones.
        sign = "s" if dtype.kind == "i" else "u"
        kind = {"max": sign, "min": sign, "add": "u"}.get(atomic, "b")
        name = f"red.async.relaxed.cluster.{_COMPLETION}.{atomic}.{kind}{bits}"
    count = len(words)
    names = [f"${i + 1}" for i in range(count)]
    source = names[0] if count == 1 else f"{{{', '.join(names)}}}"
    guard = "" if condition is None else f"@${count + 2} "
    predicate = [] if condition is None else [condition]
    llvm.inline_asm(
        None,
        [place, *words, barrier, *predicate],
        f"{guard}{name} [$0], {source}, [${count + 1}];",
        ",".join(["r", *[register] * count, "r", *["b"] * len(predicate), "~{memory}"]),
        has_side_effects=True,
    )


# --- pieces ---------------------------------------------------------------------------

Axes = tuple[tuple[int, int], ...]  # (size, stride in ranks) of each


def _hoisted(name: str, key, emit) -> ir.Value:
    return module.current().hoisted(("cluster", name, key), lambda: emit(key))


def _along(size: int, stride: int) -> ir.Value:
    """This block's position along one axis."""
    kernel = module.current()
    position = rank()
    if stride > 1:
        position = arith.divui(position, kernel.i32(stride))
    return arith.remui(position, kernel.i32(size))


def _index(axes: Axes) -> ir.Value:
    kernel = module.current()
    result = kernel.i32(0)
    for size, stride in axes:
        place = _along(size, stride)
        result = arith.addi(arith.muli(result, kernel.i32(size)), place)
    return result


def _first(axes: Axes) -> ir.Value:
    """The rank of the group's first block."""
    kernel = module.current()
    result = rank()
    for size, stride in axes:
        step = arith.muli(_along(size, stride), kernel.i32(stride))
        result = arith.subi(result, step)
    return result


def _plus(first: ir.Value, offset: int) -> ir.Value:
    return arith.addi(first, module.current().i32(offset))


def _mask(first: ir.Value, bits: int) -> ir.Value:
    i16 = ir.IntegerType.get_signless(16)
    return arith.trunci(i16, arith.shli(module.current().i32(bits), first))
