# SPDX-License-Identifier: Apache-2.0
"""What a Mosaic-level body is given besides its references: copies, and positions."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu

from pallas_gpu import errors
from pallas_gpu.emitters import cluster, elected, elementwise, mbarrier, module, tma
from pallas_gpu.emitters.control import predicated
from pallas_gpu.emitters.copies import chunks, cp_async, prefetch, rows
from pallas_gpu.emitters.debug.profiler import Recorder
from pallas_gpu.emitters.devices import peers
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.gmem import GmemView
from pallas_gpu.emitters.registers import Array
from pallas_gpu.emitters.smem import SmemView
from pallas_gpu.mosaic import copies, devices
from pallas_gpu.mosaic.barriers import group_along, scoped
from pallas_gpu.mosaic.devices import GLOBAL_BROADCAST as GLOBAL_BROADCAST
from pallas_gpu.mosaic.fragmented_array import FragmentedArray
from pallas_gpu.mosaic.memory import memrefs
from pallas_gpu.mosaic.transforms import Rounding as Rounding
from pallas_gpu.types import AsyncCopyImplementation, CopyPartition, OOBFillMode
from pallas_gpu.types import LoweringSemantics as LoweringSemantics
from pallas_gpu.types.copies.reductions import REDUCTIONS, CopyReduction
from pallas_gpu.types.profiling.threads import ThreadSubset

# How a store combines with the contents of GMEM: a name of `REDUCTIONS`.
TMAReductionOp = str
type Dimensions = Sequence[gpu.Dimension] | gpu.Dimension | None


class _Elected:
    """The default predicate: the elected thread of each warpgroup."""

    def __repr__(self) -> str:
        return "the elected thread"


_ELECTED: Any = _Elected()


@dataclasses.dataclass(frozen=True)
class LaunchContext:
    """The kernel in which a body emits its code.

    Attributes:
      builder: of the kernel's module.
      profiler: records spans; None in a kernel that is not profiled.
    """

    builder: module.KernelBuilder
    profiler: Recorder | None = None

    @classmethod
    def current(cls, profiler: Recorder | None = None) -> LaunchContext:
        """Returns the context of the kernel that is being lowered."""
        return cls(module.current(), profiler)

    @property
    def module(self) -> ir.Module:
        """The module of the kernel."""
        return self.builder.module

    @property
    def cluster_size(self) -> tuple[int, int, int]:
        """The blocks of a cluster along x, y and z."""
        return self.builder.spec.cluster

    @contextlib.contextmanager
    def named_region(self, name: str) -> Iterator[None]:
        """A context whose code is a span, if the kernel is profiled.

        Issued by the warpgroup, or each warp of it, that has a trace; nested spans end
        before those around them. It emits nothing where nobody profiles.

        Args:
          name: of the span.
        """
        if self.profiler is not None:
            self.profiler.begin(name)
        yield
        if self.profiler is not None:
            self.profiler.end(name)

    def cluster_idx(self, dim: Dimensions = None) -> ir.Value:
        """Returns the position of the block in its cluster, an index.

        It is one number along one dimension, or several, x fastest; None is all.
        """
        return arith.index_cast(ir.IndexType.get(), self._group(dim).index)

    def _group(self, dim: Dimensions) -> cluster.Group:
        """Returns the blocks of the cluster along some dimensions."""
        return group_along(
            self.cluster_size, tuple(gpu.Dimension) if dim is None else dim
        )

    # --- copies -----------------------------------------------------------------------

    def async_copy(
        self,
        *,
        src_ref: ir.Value,
        dst_ref: ir.Value,
        gmem_slice: Any = (),
        gmem_transform: Any = (),
        gmem_peer_id: Any = None,
        barrier: Any = None,
        swizzle: int | None = None,
        arrive: bool | None = None,
        collective: Dimensions = None,
        leader_tracked: CopyPartition | None = None,
        predicate: ir.Value | None = _ELECTED,
        reduction_op: str | None = None,
        implementation: AsyncCopyImplementation = AsyncCopyImplementation.TMA,
        oob_mode: OOBFillMode = OOBFillMode.ZEROS,
    ) -> None:
        """Starts a copy between GMEM and SMEM.

        PTX: `cp.async.bulk.tensor`, `cp.async.bulk` of adjacent bytes,
        `cp.reduce.async.bulk`, or `cp.async`. Since: sm_90.

        Issued by the thread that `predicate` selects; by all threads of a warpgroup
        with CP_ASYNC or indices. A load completes on `barrier`, a store in the
        async-group of its thread, which `await_async_copy` waits for.

        Args:
          src_ref, dst_ref: memrefs, one in GMEM (a parameter of the kernel) and one in
            SMEM (contiguous, of the shape of the slice after `gmem_transform`).
          gmem_slice: an index for each leading dimension in GMEM: an integer, an index
            value, a slice, or `ds(start, size)`; a `FragmentedArray` of row numbers for
            the first one. Starts of tiled dimensions are multiples of the tile.
          gmem_transform: how SMEM has the slice: one transform, or a tuple of them.
          gmem_peer_id: the logical id of the device whose array it is, or
            `GLOBAL_BROADCAST` for a store to all of them; None: this device.
          barrier: of a load: it counts the bytes.
          swizzle: that of SMEM: 32, 64 or 128 bytes, the last dimension there.
          arrive: whether a load arrives on the barrier with its bytes, or a store ends
            its async-group. True by default.
          collective: dimensions of the cluster whose blocks issue the same load; each
            copies a part of it to all of them.
          leader_tracked: whether the first block's barrier counts for a pair of blocks,
            and whether each of them gets a part of the slice, or all of it.
          predicate: i1, true in at most one thread of the warpgroup; None: all threads
            issue the copy, so the caller has selected one.
          reduction_op: combines a store with the contents of GMEM: `add`, `min`, …
          implementation: TMA or CP_ASYNC.
          oob_mode: what a load reads outside of the array.

        Raises:
          MemorySpaceError: not one reference in GMEM and one in SMEM.
          ShapeError, DTypeError, LayoutError: they do not fit each other, or no tensor
            map describes the copy.
          ArgumentError: arguments that exclude each other.
        """
        is_load = isinstance(memrefs.view_of(dst_ref), SmemView)
        gmem_ref, smem_ref = (src_ref, dst_ref) if is_load else (dst_ref, src_ref)
        gmem_ref = _of_peer(gmem_ref, gmem_peer_id)
        uses_tma = implementation is AsyncCopyImplementation.TMA
        whole = predicate is _ELECTED
        _check(is_load, uses_tma, whole, barrier, collective, leader_tracked,
               reduction_op)  # fmt: skip
        arrive = True if arrive is None else arrive
        chosen = _Chosen.of(gmem_slice)
        if chosen is not None:
            chosen.refuse(whole, collective, leader_tracked, reduction_op)
            all_rows = copies.sliced(gmem_ref, chosen.slice, ()).view
            chosen.copy(all_rows, gmem_transform, smem_ref, swizzle, barrier, arrive)
            return
        part = copies.sliced(gmem_ref, gmem_slice, gmem_transform)
        if not uses_tma:
            target = copies.target_of(smem_ref, part)
            view = copies.logical(target, part, swizzle)
            _copy_by_threads(part.view, view, barrier, arrive)
        elif is_load:
            group = None if collective is None else self._group(collective)
            _load(part, smem_ref, barrier.get_ptr(), swizzle, arrive, predicate,
                  oob_mode, group, leader_tracked)  # fmt: skip
        else:
            target = copies.target_of(smem_ref, part)
            _store(part, target, swizzle, arrive, predicate, reduction_op, oob_mode)

    def async_prefetch(
        self,
        *,
        gmem_ref: ir.Value,
        gmem_slice: Any = (),
        gmem_transform: Any = (),
        gmem_peer_id: Any = None,
        swizzle: int | None = None,
        collective: Dimensions = None,
        leader_tracked: CopyPartition | None = None,
        predicate: ir.Value | None = _ELECTED,
    ) -> None:
        """Starts to fetch a slice of GMEM to the L2 cache; nothing waits for it.

        PTX: `cp.async.bulk.prefetch.tensor`. Since: sm_90.

        Arguments are those of `async_copy`; transforms and swizzle change nothing.

        Raises:
          LayoutError: no tensor map describes the slice.
        """
        del swizzle
        gmem_ref = _of_peer(gmem_ref, gmem_peer_id)
        part = copies.sliced(gmem_ref, gmem_slice, gmem_transform)
        group = None if collective is None else self._group(collective)
        if isinstance(leader_tracked, CopyPartition.PARTITIONED) and group is not None:
            part = copies.part_of(part, leader_tracked.axis, group.index, group.count)
            group = None
        shared = group if group is not None and group.count > 1 else None
        by = _thread(predicate)
        prefetch.prefetch(self.builder, part.view, shared_by=shared, elected=by)

    def await_async_copy(
        self,
        allow_groups: int,
        await_read_only: bool = False,
        scope: ThreadSubset = ThreadSubset.WARPGROUP,
    ) -> None:
        """Waits for the stores of all but the most recent async-groups.

        PTX: `cp.async.bulk.wait_group`, then a barrier of the warpgroup or the warp.
        Since: sm_90.

        Args:
          allow_groups: how many of the most recent groups may be pending.
          await_read_only: wait only until their SMEM may be overwritten.
          scope: whose threads meet then.
        """
        tma.wait_group(allow_groups, await_read_only, sync=False)
        with scoped(scope):
            mbarrier.synchronize()

    def await_cp_async_copy(self, allow_groups: int) -> None:
        """Waits for the CP_ASYNC copies without barrier but the most recent ones.

        PTX: `cp.async.wait_group`, `fence.proxy.async`, then a barrier of the
        warpgroup. Since: sm_90.

        `allow_groups` of the most recent copies may be pending.
        """
        cp_async.wait_group(allow_groups)

    # --- several devices --------------------------------------------------------------

    def device_id(self, on_host: bool = False) -> ir.Value:
        """Returns the logical id of the executing device, an i32.

        Raises:
          UnsupportedError: the kernel reaches no other devices, or code for the host.
        """
        devices.require_device_code("device_id", on_host)
        return peers.rank()

    def to_remote(self, ref: ir.Value, peer: Any, on_host: bool = False) -> ir.Value:
        """Returns the memref of the same part of an array on another device.

        Args:
          ref: memref in GMEM, of a parameter of the kernel.
          peer: the logical id of the device, an integer or an i32.
          on_host: False.

        Raises:
          MemorySpaceError: other devices do not have the array.
          UnsupportedError: as `device_id`.
        """
        devices.require_device_code("to_remote", on_host)
        return devices.reference(ref, peer, "to_remote")

    def to_remote_multicast(
        self, ref: ir.Value, on_host: bool = False
    ) -> devices.MultimemRef:
        """Returns a reference to the same part of an array on all devices at once.

        Raises:
          MemorySpaceError, UnsupportedError: as `to_remote`.
        """
        devices.require_device_code("to_remote_multicast", on_host)
        all_of = devices.reference(ref, GLOBAL_BROADCAST, "to_remote_multicast")
        return devices.MultimemRef(all_of)


# --- checks ---------------------------------------------------------------------------


def _of_peer(ref: ir.Value, peer: Any) -> ir.Value:
    """Returns the memref in GMEM of a copy, in the memory of a device."""
    return ref if peer is None else devices.reference(ref, peer, "gmem_peer_id")


def _check(
    is_load: bool, uses_tma: bool, elects: bool, barrier: Any, collective: Any,
    leader_tracked: Any, reduction_op: Any,
) -> None:  # fmt: skip
    """Raises for arguments that exclude each other."""
    wrong = [
        (is_load and uses_tma and barrier is None, "a load by TMA without a barrier",
         "barrier=…: the load completes on it"),
        (not is_load and barrier is not None, "a store with a barrier",
         "no barrier: await_async_copy waits for stores"),
        (not is_load and collective is not None, "a store that is collective",
         "collective in copies to SMEM alone"),
        (is_load and reduction_op is not None, "a load with a reduction",
         "reduction_op in copies to GMEM alone"),
        (not uses_tma and not is_load, "a store by CP_ASYNC",
         "CP_ASYNC in loads alone"),
        (not uses_tma and collective is not None, "a collective copy by CP_ASYNC",
         "implementation=AsyncCopyImplementation.TMA"),
        (not uses_tma and not elects, "a predicate of a copy by CP_ASYNC",
         "no predicate: all threads of the warpgroup copy"),
        (leader_tracked is not None and collective is None,
         "leader_tracked without collective", "collective=…, along the pair of blocks"),
        (reduction_op is not None and reduction_op not in REDUCTIONS,
         f"the reduction {reduction_op!r}", f"one of {', '.join(REDUCTIONS)}"),
    ]  # fmt: skip
    for holds, what, expected in wrong:
        if holds:
            raise errors.ArgumentError(
                f"async_copy: invalid arguments: {what}", expected=expected, got=what
            )


def _thread(predicate: ir.Value | None) -> ir.Value:
    """i1: true in the thread that issues a copy."""
    if predicate is _ELECTED:
        return module.current().threads.elected
    return dtypes.constant(True, dtypes.BOOL) if predicate is None else predicate


@contextlib.contextmanager
def _issuing(predicate: ir.Value | None) -> Iterator[ir.Value | None]:
    """A context for the thread that issues; yields the instructions' predicate."""
    if predicate is not _ELECTED:
        yield predicate
        return
    with elected.thread() as by:
        yield by


# --- copies of a slice ----------------------------------------------------------------


def _load(
    part: copies.Slice, smem_ref: ir.Value, pointer: ir.Value, swizzle: int | None,
    arrive: bool, predicate: ir.Value | None, mode: OOBFillMode,
    group: cluster.Group | None, leader_tracked: CopyPartition | None,
) -> None:  # fmt: skip
    """Emits a load by TMA: the arrival, and the instructions."""
    multicast = group if group is not None and group.count > 1 else None
    pair = multicast if leader_tracked is not None else None
    if pair is not None and pair.count != 2:
        raise errors.UnsupportedError(
            "leader_tracked is for pairs of blocks",
            expected="collective along 2 blocks",
            got=f"{pair.count} blocks",
        )
    if pair is not None and isinstance(leader_tracked, CopyPartition.PARTITIONED):
        part = copies.part_of(part, leader_tracked.axis, pair.index, pair.count)
        multicast = None
    target = copies.target_of(smem_ref, part)
    pieces = 1 if multicast is None else multicast.count
    shared = multicast is not None or pair is not None
    found = copies.planned(part, target, swizzle, mode, pieces, shared)
    nan = mode is OOBFillMode.NAN and not all(part.view.window.known_inside())
    ready = copies.transfer(part, target, found, nan_fill=nan)
    with _issuing(predicate) as by:
        if arrive:
            tma.expect(ready, pointer, pair=pair, by=by)
        tma.start_load(ready, pointer, multicast=multicast, pair=pair, by=by)


def _store(
    part: copies.Slice, target: SmemView, swizzle: int | None, arrive: bool,
    predicate: ir.Value | None, reduction_op: str | None, mode: OOBFillMode,
) -> None:  # fmt: skip
    combines: CopyReduction | None = None
    element = None
    if reduction_op is not None:
        combines = REDUCTIONS[reduction_op]
        name = part.view.dtype.name
        if name not in combines.elements:
            raise errors.DTypeError(
                f"TMA does not combine {name} by {reduction_op!r}",
                expected=f"{', '.join(combines.elements)}",
                got=name,
            )
        element = combines.element(part.view.dtype)
    found = copies.planned(part, target, swizzle, mode)
    ready = copies.transfer(part, target, found, element=element)
    with predicated(_thread(predicate) if predicate is not None else None):
        tma.start_store(ready, combines)
    # Every thread ends the group, so that a skipped copy leaves an empty one.
    if arrive:
        tma.commit_group()


def _copy_by_threads(
    source: GmemView, target: SmemView, barrier: Any, arrive: bool
) -> None:
    plan = cp_async.plan_transfer(source, target, store=False)
    chunks.over_chunks(
        plan, source, target, lambda found: cp_async.load_chunks(plan, found)
    )
    if barrier is None:
        cp_async.finish_load(None)
        return
    pointer = barrier.get_ptr()
    if plan.is_asynchronous:
        cp_async.arrive_when_copied(pointer)
    if arrive:
        cp_async.finish_load(pointer)


@dataclasses.dataclass(frozen=True)
class _Chosen:
    """Rows whose numbers are in registers, and the slice of all rows."""

    index: Array
    slice: tuple[Any, ...]

    @classmethod
    def of(cls, gmem_slice: Any) -> _Chosen | None:
        """Returns the chosen rows of a slice; None if there are none."""
        given = copies.as_tuple(gmem_slice)
        arrays = [i for i, x in enumerate(given) if isinstance(x, FragmentedArray)]
        if not arrays:
            return None
        index = given[0]
        if arrays != [0] or len(index.shape) != 1:
            raise errors.UnsupportedError(
                "A copy takes row numbers along the first dimension alone",
                expected="one FragmentedArray of rank 1, the first index",
                got=f"arrays at {arrays} of {len(given)} indices",
            )
        array = index.array()
        if array.dtype.kind not in "iu" or array.dtype.itemsize > 4:
            raise errors.DTypeError(
                "Row numbers of a copy have another type",
                expected="integers of at most 32 bits",
                got=str(array.dtype),
                hint="convert them: indices.astype(i32)",
            )
        as_i32 = elementwise.astype(array, dtypes.I32)
        return cls(as_i32, (slice(None), *given[1:]))

    def refuse(
        self, elects: bool, collective: Any, leader_tracked: Any, reduction_op: Any
    ) -> None:
        """Raises for arguments that do not go with row numbers."""
        given = {
            "collective": collective,
            "leader_tracked": leader_tracked,
            "reduction_op": reduction_op,
            "predicate": None if elects else True,
        }
        for name, value in given.items():
            if value is not None:
                raise errors.UnsupportedError(
                    f"async_copy: {name} of a copy of rows by their numbers",
                    expected=f"no {name}",
                    got=f"{name} beside a FragmentedArray of row numbers",
                )

    def copy(
        self, view: GmemView, gmem_transform: Any, smem_ref: ir.Value,
        swizzle: int | None, barrier: Any, arrive: bool,
    ) -> None:  # fmt: skip
        """Emits the copies of the rows: to SMEM if there is a barrier."""
        sizes = (self.index.shape[0], *view.shape[1:])
        starts, transforms = (0,) * len(sizes), copies.as_tuple(gmem_transform)
        part = copies.arranged(view, starts, sizes, transforms)
        target = copies.target_of(smem_ref, part)
        rows_of = copies.logical(target, part, swizzle)
        if barrier is None:
            rows.scatter(rows_of, view, self.index)
            if arrive:
                tma.commit_group()
            return
        rows.gather(view, self.index, rows_of, barrier.get_ptr(), arrive=arrive)
