# SPDX-License-Identifier: Apache-2.0
"""TMA: copies in flight, their groups, and the fence between threads and copies.

A copy moves its data when it completes, not when it is issued. Its accesses are
recorded as those of its barrier's phase (a load) or of its group (a store), so every
conflicting access in between is an error in every run; the seed only decides which
values an incorrect kernel reads.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from pallas_gpu import layouts, types
from pallas_gpu.emulator.engine.execution import report
from pallas_gpu.emulator.engine.memory import Region
from pallas_gpu.emulator.engine.ordering import Box, Fence
from pallas_gpu.emulator.engine.poison import Origin, Poisoned, poison
from pallas_gpu.emulator.engine.reinterpreted import ReinterpretedArray
from pallas_gpu.emulator.engine.steps import Location
from pallas_gpu.emulator.engine.streams import Stream
from pallas_gpu.emulator.engine.tables import Key
from pallas_gpu.emulator.engine.threads import Thread
from pallas_gpu.emulator.engine.waits import Run
from pallas_gpu.emulator.gpu import cluster
from pallas_gpu.emulator.gpu.copies.pairs import Pair
from pallas_gpu.emulator.gpu.copies.reductions import combine
from pallas_gpu.emulator.gpu.gmem import GlobalArray, of_each
from pallas_gpu.emulator.gpu.machine.cta import Warp, Warpgroup
from pallas_gpu.emulator.gpu.mbarrier import Barrier, barrier_of, skipped
from pallas_gpu.layouts.gmem.tma_order import paired_axes
from pallas_gpu.layouts.gmem.tma_start import require_start
from pallas_gpu.layouts.smem.window import contiguous_layout
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives import tma
from pallas_gpu.types.copies.reductions import lacks_tensor_map

_EMULATE = registry.RuleKind.EMULATE


# --- GMEM to SMEM ---------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class Load:
    """A copy to SMEM that has been issued.

    Attributes:
      src: what it copies.
      targets: where it has not arrived; one for each CTA of a multicast.
      pair: the two CTAs whose leader's barrier counts the bytes.
    """

    src: Region
    targets: list[cluster.Target]
    mode: types.OOBFillMode | None
    location: Location | None
    pair: Pair | None = None

    def advance(self) -> bool:
        """Moves the data to half of the targets and completes the bytes there."""
        shape = self.targets[0].dst.shape
        value = arriving(self.src, shape, self.mode, self.location)
        for _ in range((len(self.targets) + 1) // 2):
            target = self.targets.pop(0)
            target.dst.store(value)
            if self.pair is None:
                target.barrier.complete_bytes(size_bytes(target.dst))
            else:
                self.pair.complete_bytes(size_bytes(target.dst), self.location)
        return not self.targets


def arriving(
    src: Region,
    shape: tuple[int, ...],
    mode: types.OOBFillMode | None,
    location: Location | None,
) -> Any:
    """Returns what a copy brings; elements outside the array are as the mode says."""
    undefined = mode is types.OOBFillMode.UNDEFINED
    fill: Any = poison(src.dtype) if undefined else 0
    if mode is types.OOBFillMode.NAN:
        fill = np.nan
    missing = src.missing(outside=undefined)
    if missing is None and src.outside() is None:
        return src.peek().reshape(shape)
    value = src.load_clipped(fill).reshape(shape)
    if missing is None:
        return value
    where = location.where if location is not None else None
    inside = src.missing()
    origin = _undefined(src, where) if inside is None else src.origin(inside, where)
    return Poisoned(value, missing.reshape(shape), origin)


def _undefined(src: Region, where: str | None) -> Origin:
    return Origin(
        f"{src.memory.name} is copied from outside its bounds, and the copy leaves "
        "those elements undefined",
        f"the part {src.window.starts} of sizes {src.window.sizes}",
        "select the elements inside with jnp.where, or use OOBFillMode.ZEROS",
        where,
    )


def _words(src: Region, dst: Region) -> str:
    return f"a copy from {src.memory.name} to {dst.memory.name}"


def size_bytes(region: Region) -> int:
    """Returns the size of a region, parts outside the array included."""
    return math.prod(region.window.sizes) * _bits(region.dtype) // 8


_bits = functools.cache(types.itemsize_bits)


@registry.register(tma.copy_gmem_to_smem_p, _EMULATE)
def _copy_gmem_to_smem(
    wg: Warpgroup,
    operands: dict[str, Any],
    oob_mode: types.OOBFillMode | None,
    collective_axes: tuple[str, ...] = (),
    leader_tracked: types.CopyPartition | None = None,
    **_: Any,
) -> None:
    barrier, pair = barrier_of(operands["barrier"]), None
    if leader_tracked is not None:
        pair = Pair.of(wg, operands["barrier"], collective_axes)
        barrier = pair.barrier
    if skipped(operands):
        _arrive(wg, barrier, pair, 0)
        return
    src, dst = operands["src"], operands["dst"]
    dst.require_inside("the destination of a copy")
    dst.memory.require_aligned(dst.window, "the destination of a copy")
    if oob_mode is types.OOBFillMode.PROMISE_IN_BOUNDS:
        src.require_inside("the source of a copy that promises to be in bounds,")
    require_start(src.window, _bits(src.dtype), _words(src, dst), store=False)
    _require_representable(src, dst, "copied")
    if oob_mode is None and is_outside(src):
        src.require_inside(
            "copied entirely",
            "check the index, guard the copy with plgpu.when, or pass "
            "oob_mode=plgpu.OOBFillMode.ZEROS if zeros are meant",
        )
    # The source of a partitioned copy is the part of this CTA.
    if collective_axes and not isinstance(
        leader_tracked, types.CopyPartition.PARTITIONED
    ):
        parts = cluster.multicast(
            wg, src, dst, operands["barrier"], tuple(collective_axes), pair
        )
    else:
        parts = [(src, [cluster.Target(dst, barrier)])]
        cluster.record_write(wg, src, dst, barrier)
    phase = (barrier.actor, barrier.phase + 1)
    what = f"the copy to {dst.memory.name}"
    loads = []
    for source, targets in parts:
        wg.access(source, writes=False, what=what, by=phase, hint=cluster.WAIT)
        loads.append(Load(source, targets, oob_mode, wg.location, pair))
    _arrive(wg, barrier, pair, size_bytes(dst))
    for load in loads:
        wg.group.in_flight.submit(load)


def _arrive(wg: Warpgroup, barrier: Barrier, pair: Pair | None, count: int) -> None:
    """Arrives for a copy, and announces its bytes."""
    if pair is None:
        barrier.arrive(wg.release(), wg.location, count)
    else:
        barrier.last_copy = wg.location
        pair.arrive(wg, count)


def is_outside(region: Region) -> bool:
    """True when no element of a region is inside the array."""
    return any(low >= high for low, high in region.box())


def _require_representable(gmem: Region, smem: Region, verb: str) -> None:
    """Reports where the hardware would not see the array's bounds.

    An index must be in bounds, and so must a range of a dimension without a dim of its
    own in the tensor map: the copy would access another row.
    """
    if gmem.outside() is None:
        return
    window = gmem.window
    indexed = [a for a in window.over_the_edge() if a not in window.axes]
    if indexed:
        gmem.require_inside(verb)
    array = smem.memory.layout
    plan = layouts.plan_copy(
        window.array_shape,
        _bits(gmem.dtype),
        window.sizes,
        window.squeezed,
        contiguous_layout(array, smem.window),
        inside=window.known_inside(),
        axes=paired_axes(window, smem.window),
    )
    if not set(window.over_the_edge()) <= plan.bounded:
        gmem.require_inside(
            verb,
            "too many dimensions share a tensor map for a bound on each: index it, or "
            "check the range",
        )


# --- SMEM to GMEM ---------------------------------------------------------------------


class StoreStream(Stream):
    """The copies to GMEM that one thread issues, in groups.

    Groups belong to the thread (PTX ISA, cp.async.bulk.commit_group). A warpgroup
    issues through the elected lane of its warp 0, so it shares the stream of that warp;
    each other warp has one for the copies that it issues in `warp_map`.

    Attributes:
      reading, writing: when the sources have been read, when the destinations have been
        written.
    """

    def __init__(self, thread: Thread):
        super().__init__(thread, milestones=2)
        self.reading, self.writing = self.milestones

    @classmethod
    def of(cls, wg: Warpgroup) -> StoreStream:
        """Returns the stream in which a warpgroup, or a warp, issues."""
        if isinstance(wg, Warp) and wg.number == 0:
            wg = wg.warpgroup
        return _STORES.of(wg)

    @classmethod
    def all_of(cls, wg: Warpgroup) -> list[StoreStream]:
        """Returns the streams whose groups a warpgroup, or a warp, closes and awaits.

        All threads of a warpgroup do, each for its own copies.
        """
        others = [_STORES.find(warp) for warp in wg.warps]
        others.append(_BY_ALL.find(wg))
        return [cls.of(wg), *(stream for stream in others if stream is not None)]

    @classmethod
    def by_all(cls, wg: Warpgroup) -> StoreStream:
        """Returns the stream of copies that all threads of a warpgroup issue.

        No warp alone can wait for them.
        """
        return _BY_ALL.of(wg)


_STORES: Key[Thread, StoreStream] = Key("copies to GMEM", StoreStream)
_BY_ALL: Key[Thread, StoreStream] = Key("copies to GMEM by all", StoreStream)


@dataclasses.dataclass(slots=True, eq=False)
class Store:
    """A copy to GMEM that has been issued: first it reads, then it writes.

    Attributes:
      src, dst: what it copies to where.
      stream, group: the group of copies that it belongs to.
      reduction: how it combines its elements with those of the destination, if it does.
      value, missing: what it has read, and which elements of that have no value.
      done: whether it has written.
    """

    src: Region
    dst: Region
    stream: StoreStream
    group: int
    reduction: str | None = None
    value: Any = None
    missing: np.ndarray | None = None
    done: bool = False

    def advance(self) -> bool:
        """Reads the source, or writes the destination."""
        if self.done:
            return True
        if self.value is None:
            self.value = self.src.load().reshape(self.dst.shape)
            missing = self.src.missing()
            if missing is not None:
                self.missing = missing.reshape(self.dst.shape)
            self.stream.reading.passed(self.group)
            return False
        value = self.value
        if self.reduction is not None:
            value = combine(self.reduction, self.dst.load_clipped(0), value)
        self.dst.store_clipped(value, True if self.missing is None else ~self.missing)
        self.stream.writing.passed(self.group)
        self.done = True
        del _stores_to(self.dst)[self]
        return True


# The copies to an array in GMEM that are in flight.
_PENDING: Key[GlobalArray, dict[Store, None]] = Key("pending copies", lambda array: {})


def _stores_to(dst: Region) -> dict[Store, None]:
    array = dst.memory
    while isinstance(array, ReinterpretedArray):
        array = array.base
    return _PENDING.of(array)


def _leaves_unchanged(src: Region, dst: Region, box: Box) -> bool:
    """True if a copy writes what a part of its destination contains.

    Copies to it that are in flight, without an order with this one, complete first.
    """
    if src.missing() is not None:
        return False
    for store in list(_stores_to(dst)):
        while not store.advance():
            pass
    return dst.holds(src.load().reshape(dst.shape), box)


@registry.register(tma.copy_smem_to_gmem_p, _EMULATE)
def _copy_smem_to_gmem(
    wg: Warpgroup,
    operands: dict[str, Any],
    commit_group: bool,
    reduction_op: str | None = None,
    **_: Any,
) -> None:
    if not skipped(operands):
        for dst in of_each(operands["dst"]):
            _issue_store(wg, operands["src"], dst, reduction_op)
    if commit_group:
        commit(wg)


def commit(wg: Warpgroup) -> None:
    """Closes the groups of copies to GMEM of a warpgroup, or a warp."""
    for stream in StoreStream.all_of(wg):
        stream.close_group()


def _issue_store(
    wg: Warpgroup, src: Region, dst: Region, reduction: str | None
) -> None:
    stream = StoreStream.of(wg)
    src.require_inside("the source of a copy")
    src.memory.require_aligned(src.window, "the source of a copy")
    require_start(dst.window, _bits(dst.dtype), _words(src, dst), store=True)
    _require_representable(dst, src, "written by a copy")
    if is_outside(dst):
        dst.require_inside("written by a copy entirely")
    if reduction is not None and lacks_tensor_map(dst.dtype):
        dst.require_inside("written by a sum of float64, which is in bounds,")
    start_store(wg, stream, src, dst, reduction)


def start_store(
    wg: Warpgroup,
    stream: StoreStream,
    src: Region,
    dst: Region,
    reduction: str | None = None,
) -> None:
    """Records the accesses of a copy to GMEM, and submits it."""
    group = stream.open_group
    wg.access(
        src,
        writes=False,
        what=f"the copy to {dst.memory.name}",
        by=(stream.reading.actor, group),
        hint="call wait_smem_to_gmem(0), or wait_smem_to_gmem(0, wait_read_only=True) "
        f"for the source alone, in the {wg.kind} that started the copy first",
    )
    wg.access(
        dst,
        writes=True,
        what=f"the copy from {src.memory.name}",
        by=(stream.writing.actor, group),
        hint=f"call wait_smem_to_gmem(0) in the {wg.kind} that started the copy first",
        atomic=reduction is not None,
        unchanged=functools.partial(_leaves_unchanged, src, dst)
        if reduction is None
        else None,
    )
    require_values(src, dst)
    if reduction is not None:
        _require_initial_values(dst, wg.where())
    stream.issue()
    store = Store(src, dst, stream, group, reduction)
    _stores_to(dst)[store] = None
    wg.group.in_flight.submit(store)


def require_values(src: Region, dst: Region) -> None:
    """Reports poison that a copy stores to a result."""
    missing = src.missing()
    if missing is None or dst.memory.admits_poison:
        return
    if dst.outside() is not None:
        missing &= dst.inside_mask().reshape(missing.shape)
    if missing.any():
        report(src.origin(missing, None).error())


def _require_initial_values(dst: Region, where: str | None) -> None:
    """Reports where a reduction finds no value."""
    missing = dst.missing()
    if missing is not None:
        report(dst.origin(missing, where).error())


@registry.register(tma.commit_group_p, _EMULATE)
def _commit_group(wg: Warpgroup, *_: Any, **__: Any) -> None:
    commit(wg)


@registry.register(tma.wait_smem_to_gmem_p, _EMULATE)
def _wait_smem_to_gmem(
    wg: Warpgroup, _: Any, n: int, wait_read_only: bool, used: Any
) -> Run:
    passed = 1 if wait_read_only else 2
    for stream in StoreStream.all_of(wg):
        yield from stream.wait(wg, n, passed, "copies to GMEM")


@registry.register(tma.commit_smem_p, _EMULATE)
def _commit_smem(wg: Warpgroup, *_: Any, **__: Any) -> None:
    wg.fence(Fence.SMEM)


@registry.register(tma.fence_smem_p, _EMULATE)
def _fence_smem(wg: Warpgroup, *_: Any, **__: Any) -> None:
    wg.fence(Fence.SMEM_WRITES)


@registry.register(tma.commit_gmem_p, _EMULATE)
def _commit_gmem(wg: Warpgroup, *_: Any, **__: Any) -> None:
    wg.fence(Fence.GMEM)
