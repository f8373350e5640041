# SPDX-License-Identifier: Apache-2.0
"""TMA: copies in flight, their groups, and the fence between threads and copies.

A copy moves its data when it completes, not when it is issued. Its accesses are
recorded as those of its barrier's phase (a load) or of its group (a store), so every
access in between that conflicts is an error in every run; the seed only decides which
values a wrong kernel would have seen.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from pallas_gpu import types
from pallas_gpu.emulator.engine import ordering, scheduler
from pallas_gpu.emulator.engine.memory import Region, poison
from pallas_gpu.emulator.gpu import cluster
from pallas_gpu.emulator.gpu.machine import Warp, Warpgroup, require_writable
from pallas_gpu.emulator.gpu.mbarrier import Barrier, barrier_of, skipped
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives import tma

_EMULATE = registry.RuleKind.EMULATE


# --- GMEM to SMEM ---------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class Load:
    """A copy to SMEM that has been issued; a multicast is one for each CTA."""

    src: Region
    dst: Region
    barrier: Barrier
    mode: types.OOBFillMode

    def advance(self) -> bool:
        """Moves the data and completes the bytes on the barrier."""
        undefined = self.mode is types.OOBFillMode.UNDEFINED
        fill = poison(self.src.dtype) if undefined else 0
        self.dst.store(self.src.load_clipped(fill).reshape(self.dst.shape))
        if undefined and self.src.outside() is not None:
            inside = self.src.inside_mask().reshape(self.dst.shape)
            _unwrite(self.dst, ~inside)
        self.barrier.complete_bytes(self.dst.bytes)
        return True


def _unwrite(region: Region, where: np.ndarray) -> None:
    memory = region.memory
    if memory.written is None:
        memory.written = np.ones(memory.shape, np.bool_)
    memory.written[region.key()] &= ~where


@registry.register(tma.copy_gmem_to_smem_p, _EMULATE)
def _copy_gmem_to_smem(
    wg: Warpgroup,
    operands: dict[str, Any],
    oob_mode: types.OOBFillMode,
    collective_axes: tuple[str, ...] = (),
    **_: Any,
) -> None:
    if skipped(operands):
        return
    src, dst = operands["src"], operands["dst"]
    dst.require_inside("the destination of a copy")
    dst.require_aligned("the destination of a copy")
    if oob_mode is types.OOBFillMode.PROMISE_IN_BOUNDS:
        src.require_inside("the source of a copy that promises to be in bounds,")
    barrier = barrier_of(operands["barrier"])
    copies = [cluster.Part(src, dst, barrier)]
    if collective_axes:
        copies = cluster.multicast(
            wg, src, dst, operands["barrier"], tuple(collective_axes)
        )
    for part in copies:
        _record(wg, part, barrier)
    barrier.arrive(wg.release(), announced_bytes=dst.bytes)
    for part in copies:
        load = Load(part.src, part.dst, part.barrier, oob_mode)
        wg.machine.in_flight.submit(load)


def _record(wg: Warpgroup, part: cluster.Part, own: Barrier) -> None:
    """Checks and records what a copy will read and write; its destination is poison."""
    src, dst = part.src, part.dst
    what = f"the copy from {src.memory.name}"
    hint = "call barrier_wait on the copy's barrier first"
    wg.access(src, writes=False, what=what, by=(own.actor, own.phase + 1), hint=hint)
    by = (part.barrier.actor, part.barrier.phase + 1)
    wg.access(dst, writes=True, what=what, by=by, hint=hint)
    _forget_unfenced(dst)
    if dst.memory.written is not None or dst.dtype.kind not in "iub":
        dst.memory.data[dst.key()] = poison(dst.dtype)


def _forget_unfenced(dst: Region) -> None:
    box = dst.box()
    unfenced = dst.memory.unfenced
    for key in [key for key in unfenced if ordering.overlap(key[1], box)]:
        del unfenced[key]


# --- SMEM to GMEM ---------------------------------------------------------------------


class StoreStream:
    """The copies to GMEM that one thread issues, in groups.

    Groups belong to the thread (PTX ISA, cp.async.bulk.commit_group). A warpgroup
    issues in the elected lane of its warp 0, so it shares the stream of that warp; each
    other warp has one for what it issues by itself.

    Attributes:
      reading, writing: numbers in clocks of the sources' reads and the destinations'
        writes; their time is a number of groups.
      committed: groups that are closed.
    """

    def __init__(self, wg: Warpgroup):
        self.reading = wg.machine.new_actor()
        self.writing = wg.machine.new_actor()
        self.committed = 0
        self.unread: dict[int, int] = {}
        self.unwritten: dict[int, int] = {}

    @classmethod
    def of(cls, wg: Warpgroup) -> StoreStream:
        """Returns the stream in which a warpgroup, or a warp, issues."""
        if isinstance(wg, Warp) and wg.number == 0:
            wg = wg.warpgroup
        if wg.stores is None:
            wg.stores = cls(wg)
        return wg.stores

    @classmethod
    def all_of(cls, wg: Warpgroup) -> list[StoreStream]:
        """Returns the streams whose groups a warpgroup, or a warp, closes and awaits.

        All threads of a warpgroup do, each for its own copies.
        """
        others = [one.stores for one in wg.warps if one.stores is not None]
        return [cls.of(wg), *others]

    def left(self, upto: int, read_only: bool) -> int:
        """Counts copies of the first `upto` groups that are not done."""
        open_ = self.unread if read_only else self.unwritten
        return sum(n for group, n in open_.items() if group < upto)


@dataclasses.dataclass(slots=True)
class Store:
    """A copy to GMEM that has been issued: first it reads, then it writes."""

    src: Region
    dst: Region
    stream: StoreStream
    group: int
    value: Any = None
    written: Any = True

    def advance(self) -> bool:
        """Reads the source, or writes the destination."""
        if self.value is None:
            self.value = self.src.load().reshape(self.dst.shape)
            mask = self.src.memory.written
            if mask is not None:
                part = dataclasses.replace(self.src, memory=_Mask(mask)).load()
                self.written = part.reshape(self.dst.shape)
            self.stream.unread[self.group] -= 1
            return False
        self.dst.store_clipped(self.value, self.written)
        self.stream.unwritten[self.group] -= 1
        return True


@dataclasses.dataclass(slots=True)
class _Mask:
    """Lets a region read the mask of its array."""

    data: np.ndarray


@registry.register(tma.copy_smem_to_gmem_p, _EMULATE)
def _copy_smem_to_gmem(
    wg: Warpgroup, operands: dict[str, Any], commit_group: bool, **_: Any
) -> None:
    if not skipped(operands):
        stream = StoreStream.of(wg)
        _issue_store(wg, stream, operands["src"], operands["dst"])
    if commit_group:
        _commit(wg)


def _commit(wg: Warpgroup) -> None:
    for stream in StoreStream.all_of(wg):
        stream.committed += 1


def _issue_store(wg: Warpgroup, stream: StoreStream, src: Region, dst: Region) -> None:
    src.require_inside("the source of a copy")
    src.require_aligned("the source of a copy")
    require_writable(dst.memory)
    if any(low >= high for low, high in dst.box()):
        dst.require_inside("the destination of a copy that lies outside as a whole,")
    src.require_fenced("a copy")
    group = stream.committed
    wg.access(
        src,
        writes=False,
        what=f"the copy to {dst.memory.name}",
        by=(stream.reading, group + 1),
        hint="call wait_smem_to_gmem(0), or wait_smem_to_gmem(0, wait_read_only=True) "
        f"for the source alone, in the {wg.kind} that started the copy first",
    )
    wg.access(
        dst,
        writes=True,
        what=f"the copy from {src.memory.name}",
        by=(stream.writing, group + 1),
        hint=f"call wait_smem_to_gmem(0) in the {wg.kind} that started the copy first",
    )
    stream.unread[group] = stream.unread.get(group, 0) + 1
    stream.unwritten[group] = stream.unwritten.get(group, 0) + 1
    wg.machine.in_flight.submit(Store(src, dst, stream, group))


@registry.register(tma.commit_group_p, _EMULATE)
def _commit_group(wg: Warpgroup, *_: Any, **__: Any) -> None:
    _commit(wg)


@registry.register(tma.wait_smem_to_gmem_p, _EMULATE)
def _wait_smem_to_gmem(
    wg: Warpgroup, _: Any, n: int, wait_read_only: bool, used: Any
) -> scheduler.Run:
    for stream in StoreStream.all_of(wg):
        yield from _wait_for_groups(wg, stream, n, wait_read_only)


def _wait_for_groups(
    wg: Warpgroup, stream: StoreStream, n: int, wait_read_only: bool
) -> scheduler.Run:
    done = max(0, stream.committed - n)
    if stream.left(done, wait_read_only):
        yield scheduler.Wait(
            lambda: not stream.left(done, wait_read_only),
            f"copies to GMEM, all but {n} groups",
            lambda: f"{stream.left(done, wait_read_only)} copies are under way",
        )
    actors = [stream.reading] if wait_read_only else [stream.reading, stream.writing]
    ordering.join(wg.clock, dict.fromkeys(actors, done))
    for groups in (stream.unread, stream.unwritten):
        for group in [g for g, left in groups.items() if not left and g < done]:
            del groups[group]


@registry.register(tma.commit_smem_p, _EMULATE)
def _commit_smem(wg: Warpgroup, *_: Any, **__: Any) -> None:
    # Each thread fences its own writes: the whole warpgroup those of its warps too.
    actors = {wg.actor, *(one.actor for one in wg.warps)}
    for memory in wg.cta.memories:
        if memory.unfenced:
            mine = [key for key in memory.unfenced if key[0] in actors]
            for key in mine:
                del memory.unfenced[key]
