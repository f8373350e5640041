# SPDX-License-Identifier: Apache-2.0
"""Barriers of SMEM and semaphores of GMEM, as bodies get them.

A barrier counts the arrivals that its threads make, each for itself. Whose phase a wait
is for is a bit for each barrier, in memory of each thread that becomes a register.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Literal

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, memref

from pallas_gpu import errors
from pallas_gpu.emitters import addressing, cluster, elected, mbarrier, module
from pallas_gpu.emitters.sync import semaphore
from pallas_gpu.mosaic.memory import memrefs
from pallas_gpu.mosaic.scalars import (
    ThreadSubset,
    as_i32,
    barrier_index,
    i32,
    i32_value,
    single_thread_predicate,
    when,
)

# Phases are bits of one integer.
_MOST_BARRIERS = 32
_BARRIER_BYTES = 8
# The blocks of a cluster (PTX ISA, "Cluster of Cooperative Thread Arrays").
_MOST_BLOCKS = 16


def scoped(scope: ThreadSubset) -> contextlib.AbstractContextManager[None]:
    """Makes a warp or a warpgroup those who meet."""
    if scope == ThreadSubset.BLOCK:
        raise errors.ArgumentError(
            "The threads of a block do not meet at a barrier of one of its warpgroups",
            expected="ThreadSubset.WARP or ThreadSubset.WARPGROUP",
            got=scope,
        )
    if scope == ThreadSubset.WARP:
        return module.current().in_warp()
    return contextlib.nullcontext()


@dataclasses.dataclass(frozen=True)
class BarrierRef:
    """Some mbarriers, adjacent in SMEM; `barrier[i]` is one of them.

    Attributes:
      base_address: `!llvm.ptr<3>`, or `<7>` in the SMEM of another block.
      offset: i32, the first of them behind that address.
      phases: a memref of an i32: a bit for each, the parity that the next wait is for.
      num_barriers: at most 32.
    """

    base_address: ir.Value
    offset: ir.Value
    phases: ir.Value
    num_barriers: int

    @staticmethod
    def initialize(barrier_memref: ir.Value, arrival_count: int = 1) -> BarrierRef:
        """Initializes the mbarriers of a memref; all threads of the block issue it.

        They are known to other threads after a fence and a barrier of the block.
        `barrier_memref` has 64-bit integers in SMEM, and rank 1.
        """
        (count,) = barrier_memref.type.shape
        return BarrierRef.at(memrefs.memref_ptr(barrier_memref), count, arrival_count)

    @staticmethod
    def at(
        address: ir.Value,
        num_barriers: int,
        arrival_count: int | None = None,
        parities: ir.Value | None = None,
    ) -> BarrierRef:
        """Returns the barriers at an address; initializes them if a count is given.

        `parities`, an i32, has a bit for each; None: those of the first wait.
        """
        if num_barriers > _MOST_BARRIERS:
            raise errors.UnsupportedError(
                "A group of barriers is too large",
                expected=f"at most {_MOST_BARRIERS}",
                got=num_barriers,
                hint="declare several groups",
            )
        kernel = module.current()
        # In a loop it would be memory, and not become a register.
        phases = kernel.hoisted(
            object(), lambda: memref.alloca(ir.MemRefType.get((), i32()), [], [])
        )
        memref.store(kernel.i32(0) if parities is None else parities, phases, [])
        for i in range(num_barriers if arrival_count is not None else 0):
            place = addressing.offset_pointer(address, i * _BARRIER_BYTES)
            mbarrier.init(place, arrival_count)  # type: ignore[arg-type]
        return BarrierRef(address, kernel.i32(0), phases, num_barriers)

    def __iter__(self) -> Iterator[BarrierRef]:
        return iter([self[i] for i in range(self.num_barriers)])

    def __getitem__(self, offset: ir.Value | int) -> BarrierRef:
        offset = barrier_index(offset, self.num_barriers)
        moved = self.offset
        if offset != 0:
            moved = arith.addi(moved, i32_value(offset))
        return dataclasses.replace(self, offset=moved, num_barriers=1)

    @property
    def in_cluster(self) -> bool:
        """Whether it is in the SMEM of another block."""
        return str(self.base_address.type) == "!llvm.ptr<7>"

    def get_ptr(self) -> ir.Value:
        """Returns the address of the one barrier."""
        if self.num_barriers != 1:
            raise errors.ArgumentError(
                "This operation is one on a single barrier",
                expected="barrier[i]",
                got=f"{self.num_barriers} barriers",
            )
        offset = as_i32(self.offset)
        if isinstance(offset, int):
            return addressing.offset_pointer(self.base_address, offset * _BARRIER_BYTES)
        size = module.current().i32(_BARRIER_BYTES)
        return addressing.offset_pointer(self.base_address, arith.muli(offset, size))

    # --- waits ------------------------------------------------------------------------

    def wait_parity(self, parity: ir.Value, orders_tensor_core: bool = False) -> None:
        """Waits until the phase of a parity, an i1, has completed.

        With `orders_tensor_core` later tcgen05 operations follow it.
        """
        if self.in_cluster:
            raise errors.ArgumentError("A wait for a barrier of another block")
        mbarrier.wait(self.get_ptr(), i32_value(parity))
        if orders_tensor_core:
            mbarrier.fence_after_wait()

    def wait(self, orders_tensor_core: bool = False) -> None:
        """Waits for the next phase; arguments as of `wait_parity`."""
        parity, parities = self.update_parities(memref.load(self.phases, []))
        memref.store(parities, self.phases, [])
        self.wait_parity(parity, orders_tensor_core)

    def test_parity(
        self,
        parity: ir.Value,
        orders_tensor_core: bool = False,
        scope: ThreadSubset = ThreadSubset.WARPGROUP,
    ) -> ir.Value:
        """Returns an i1: whether the phase of a parity has completed.

        The threads of `scope` issue it, and get the same result; others as of
        `wait_parity`.
        """
        with scoped(scope):
            done = mbarrier.test(self.get_ptr(), i32_value(parity))
            done = mbarrier.agree(done)
        if orders_tensor_core:
            mbarrier.fence_after_wait()
        return done

    def test(
        self,
        orders_tensor_core: bool = False,
        scope: ThreadSubset = ThreadSubset.WARPGROUP,
    ) -> ir.Value:
        """Returns an i1: whether the next phase has completed; it is then over."""
        parity, parities = self.update_parities(memref.load(self.phases, []))
        done = self.test_parity(parity, orders_tensor_core, scope)
        with when(done):
            memref.store(parities, self.phases, [])
        return done

    def update_parities(self, parities: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Returns the parity that the next wait is for, i1, and the bits after it."""
        kernel = module.current()
        bit = arith.shli(kernel.i32(1), self.offset)
        differs = arith.CmpIPredicate.ne
        parity = arith.cmpi(differs, arith.andi(parities, bit), kernel.i32(0))
        return parity, arith.xori(parities, bit)

    # --- arrivals ---------------------------------------------------------------------

    def arrive(
        self,
        arrival_count: int = 1,
        can_complete: bool = True,
        orders_tensor_core: bool = False,
        predicate: ir.Value | None = None,
        scope: ThreadSubset = ThreadSubset.WARPGROUP,
    ) -> None:
        """Arrives, in each thread that executes it.

        PTX: `mbarrier.arrive.release`. Since: sm_90.

        Args:
          arrival_count: how many arrivals it counts as.
          can_complete: accepted for upstream's sake.
          orders_tensor_core, scope: whether earlier tcgen05 operations precede it; with
            a predicate the threads of the scope meet before.
          predicate: i1; threads in which it is false do not arrive.
        """
        if orders_tensor_core:
            mbarrier.fence_before_arrival()
            if predicate is not None:
                with scoped(scope):
                    mbarrier.synchronize()
        self._instruction("arrive.release", "_, ", [], arrival_count, predicate)

    def _instruction(
        self,
        name: str,
        sink: str,
        operands: Sequence[ir.Value],
        count: int,
        predicate: ir.Value | None,
    ) -> None:
        """Emits an instruction on the barrier, in the scope of where it is."""
        space = "cluster" if self.in_cluster else "cta"
        more = ", $1" if operands else mbarrier.counted(count)
        text = f"mbarrier.{name}.{space}.shared::{space}.b64 {sink}[$0]{more}"
        given = [self.get_ptr(), *operands]
        elected.instruction(text, given, "r" * len(given), predicate)

    def arrive_expect_tx(
        self, tx_count: int | ir.Value, predicate: ir.Value | None = None
    ) -> None:
        """Arrives in each thread, which adds bytes of copies to what a phase expects.

        PTX: `mbarrier.arrive.expect_tx.release`, below 2**20 bytes. Since: sm_90.
        """
        given = [i32_value(tx_count)]
        self._instruction("arrive.expect_tx.release", "_, ", given, 1, predicate)

    def complete_tx(
        self, tx_count: int | ir.Value, predicate: ir.Value | None = None
    ) -> None:
        """Completes bytes that the phase expects, in each thread that executes it.

        PTX: `mbarrier.complete_tx.relaxed`. Since: sm_90.
        """
        given = [i32_value(tx_count)]
        self._instruction("complete_tx.relaxed", "", given, 1, predicate)

    def remap_to_cluster(self, dim: gpu.Dimension, idx: ir.Value) -> BarrierRef:
        """Returns the barriers in the block of the cluster at `idx` along `dim`."""
        rank = rank_along(dim, idx)
        address = addressing.map_shared(self.base_address, rank)
        return dataclasses.replace(self, base_address=address)


def rank_along(dim: gpu.Dimension, idx: int | ir.Value) -> ir.Value:
    """i32: the rank of the block at a position along an axis of the cluster."""
    sizes = module.current().spec.cluster[::-1]
    return cluster.rank_at(sizes, {2 - int(dim): as_i32(idx)})


def group_along(
    sizes: tuple[int, ...], dims: gpu.Dimension | Sequence[gpu.Dimension]
) -> cluster.Group:
    """The blocks along some dimensions of a cluster of sizes (x, y, z)."""
    each = [dims] if isinstance(dims, gpu.Dimension) else dims
    # The axes of the cluster are z, y, x: ranks count x fastest.
    return cluster.group(sizes[::-1], sorted(2 - int(d) for d in each))


@dataclasses.dataclass(frozen=True)
class CollectiveBarrierRef:
    """Barriers on which warpgroups of several blocks of the cluster arrive.

    Attributes:
      barrier: this block's.
      cluster_mask: i32, a bit for each block that an arrival reaches; None: this one.
      leader_tracked: whether arrivals reach only the first block along the axis.
    """

    barrier: BarrierRef
    cluster_mask: ir.Value | None
    leader_tracked: bool = False

    @staticmethod
    def initialize(
        barrier_memref: ir.Value,
        arrival_count: int,
        dims: Sequence[gpu.Dimension | Sequence[gpu.Dimension]],
        cluster_shape: tuple[int, int, int],
        leader_tracked: bool = False,
    ) -> CollectiveBarrierRef:
        """Initializes barriers; all threads of the block issue it.

        As `BarrierRef.initialize`; `arrival_count` warpgroups of each block arrive, and
        an arrival reaches the blocks along each of `dims`, one if `leader_tracked`.
        """
        if leader_tracked and len(dims) != 1:
            raise errors.UnsupportedError(
                "A barrier of the leader is one along one axis",
                expected="one of dims",
                got=dims,
            )
        groups = [group_along(cluster_shape, x) for x in dims]
        total = sum(g.count for g in groups) - len(groups) + 1
        barrier = BarrierRef.initialize(barrier_memref, arrival_count * total)
        return CollectiveBarrierRef.of(barrier, groups, leader_tracked)

    @staticmethod
    def of(
        barrier: BarrierRef, groups: Sequence[cluster.Group], leader_tracked: bool
    ) -> CollectiveBarrierRef:
        """Returns barriers on which the blocks of each group arrive."""
        wide = [g for g in groups if g.count > 1]
        if not wide:
            return CollectiveBarrierRef(barrier, None, leader_tracked)
        if leader_tracked:
            mask = arith.shli(module.current().i32(1), groups[0].ranks[0])
        else:
            masks = (arith.extui(i32(), g.mask) for g in wide)
            mask = functools.reduce(arith.ori, masks)
        return CollectiveBarrierRef(barrier, mask, leader_tracked)

    def __iter__(self) -> Iterator[CollectiveBarrierRef]:
        return iter([dataclasses.replace(self, barrier=x) for x in self.barrier])

    def __getitem__(self, offset: ir.Value | int) -> CollectiveBarrierRef:
        return dataclasses.replace(self, barrier=self.barrier[offset])

    def arrive(
        self, *, orders_tensor_core: bool = False, predicate: ir.Value | None = None
    ) -> None:
        """Arrives once for the warpgroup, in each block that the mask has.

        The predicate is the same in all threads; arguments as of `BarrierRef.arrive`.
        """
        pointer = self.barrier.get_ptr()
        if self.cluster_mask is None:
            chosen = single_thread_predicate(ThreadSubset.WARPGROUP)
            if predicate is not None:
                chosen = arith.andi(predicate, chosen)
            self.barrier.arrive(orders_tensor_core=orders_tensor_core, predicate=chosen)
            return
        if orders_tensor_core:
            mbarrier.fence_before_arrival()
            mbarrier.synchronize()
        kernel = module.current()
        thread, less = kernel.threads.warpgroup_thread, arith.CmpIPredicate.ult
        few = arith.cmpi(less, thread, kernel.i32(_MOST_BLOCKS))
        # A shift by more than the width has no meaning: the other threads shift by 0.
        block = arith.select(few, thread, kernel.i32(0))
        bit = arith.andi(arith.shrui(self.cluster_mask, block), kernel.i32(1))
        reaches = arith.cmpi(arith.CmpIPredicate.ne, bit, kernel.i32(0))
        chosen = arith.andi(few, reaches)
        if predicate is not None:
            chosen = arith.andi(predicate, chosen)
        # Addresses of other ranks do not exist.
        block = arith.select(reaches, block, cluster.rank())
        # As upstream's: what is published is of this block. A release in the scope of
        # the cluster costs a fence at GPU scope (`cluster.arrive`).
        remote = addressing.map_shared(pointer, block)
        cluster.emit_arrive_remote(remote, "cta", by=chosen)

    def wait(self, orders_tensor_core: bool = False) -> None:
        """Waits for the next phase."""
        self.barrier.wait(orders_tensor_core)

    def wait_parity(self, parity: ir.Value, orders_tensor_core: bool = False) -> None:
        """Waits until the phase of a parity, an i1, has completed."""
        self.barrier.wait_parity(parity, orders_tensor_core)


@dataclasses.dataclass(frozen=True)
class SemaphoreRef:
    """A 32-bit counter in GMEM, at an `!llvm.ptr`."""

    ptr: ir.Value

    def signal(
        self,
        value: ir.Value | int,
        predicate: ir.Value | None = None,
        relaxed: bool = False,
        memory_scope: Literal["sys", "gpu"] = "sys",
    ) -> None:
        """Adds to the counter. PTX: `red.{release,relaxed}.global.add.u32`.

        The threads of `predicate` add, by default one of the warpgroup; if it is not
        `relaxed`, it orders their earlier accesses.
        """
        if predicate is None:
            predicate = single_thread_predicate(ThreadSubset.WARPGROUP)
        order = "relaxed" if relaxed else "release"
        text = f"red.{order}.{memory_scope}.global.add.u32 [$0], $1"
        elected.instruction(text, [self.ptr, i32_value(value)], "lr", predicate)

    def wait(
        self,
        value: ir.Value | int = 1,
        *,
        decrement: bool = True,
        scope: ThreadSubset = ThreadSubset.WARPGROUP,
        memory_scope: Literal["sys", "gpu"] = "sys",
    ) -> None:
        """Waits until the counter has reached a value, and subtracts it: `decrement`.

        The threads of `scope` wait, and meet.
        """
        with scoped(scope):
            semaphore.wait(
                self.ptr, i32_value(value), memory_scope, decrement=decrement
            )
