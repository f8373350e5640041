# SPDX-License-Identifier: Apache-2.0
"""Copies by threads: cp.async in flight, on a barrier or in groups, and the way back.

As with TMA, a copy moves its data when it completes, and its accesses are recorded as
those of its barrier's phase or of its group. Unlike TMA it accesses memory as threads
do (PTX ISA, "cp.async": the generic proxy): no fence is needed after threads' stores.
The waits contain the fence for what the async proxy reads afterwards.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_gpu import types
from pallas_gpu.emulator.engine.memory import Region
from pallas_gpu.emulator.engine.ordering import Fence
from pallas_gpu.emulator.engine.steps import Location
from pallas_gpu.emulator.engine.streams import Stream
from pallas_gpu.emulator.engine.tables import Key
from pallas_gpu.emulator.engine.threads import Thread
from pallas_gpu.emulator.engine.waits import Run
from pallas_gpu.emulator.gpu import cluster, tma
from pallas_gpu.emulator.gpu.machine.cta import Warpgroup
from pallas_gpu.emulator.gpu.mbarrier import Barrier, barrier_of, skipped
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives import cp_async

_EMULATE = registry.RuleKind.EMULATE


class LoadStream(Stream):
    """The copies to SMEM of one thread that no barrier tracks, each a group."""

    def __init__(self, thread: Thread):
        super().__init__(thread, milestones=1)
        (self.arriving,) = self.milestones

    @classmethod
    def of(cls, wg: Warpgroup) -> LoadStream:
        """Returns the stream in which a warpgroup, or a warp, issues."""
        return _LOADS.of(wg)

    @classmethod
    def all_of(cls, wg: Warpgroup) -> list[LoadStream]:
        """Returns the streams whose groups a warpgroup, or a warp, awaits."""
        others = (_LOADS.find(warp) for warp in wg.warps)
        return [cls.of(wg), *(s for s in others if s is not None)]

    def tracked(self, barrier: Barrier | None) -> tuple[tuple[Any, int], str]:
        """Returns by what the next copy is known to be complete, and a hint."""
        if barrier is not None:
            return (barrier.actor, barrier.phase + 1), cluster.WAIT
        group = self.arriving.actor, self.open_group
        return group, "call wait_gmem_to_smem(0) first"

    def start(self, wg: Warpgroup, barrier: Barrier | None, size_bytes: int) -> None:
        """A copy is issued, which a barrier tracks or a group of its own."""
        if barrier is not None:
            barrier.arrive(wg.release(), wg.location, size_bytes)
        else:
            self.issue()
            self.close_group()

    @classmethod
    def begin(
        cls, wg: Warpgroup, operands: dict[str, Any]
    ) -> tuple[LoadStream, Barrier | None] | None:
        """Returns the stream of a copy, and the barrier that tracks it if one does.

        A skipped copy still arrives, or is an empty group; None then.
        """
        tracked = operands["barrier"] is not None
        barrier = barrier_of(operands["barrier"]) if tracked else None
        stream = cls.of(wg)
        if not skipped(operands):
            return stream, barrier
        if barrier is not None:
            barrier.arrive(wg.release(), wg.location)
        else:
            stream.close_group()
        return None


_LOADS: Key[Thread, LoadStream] = Key("copies to SMEM", LoadStream)


@dataclasses.dataclass(slots=True)
class Load:
    """Parts of an array on their way to SMEM; each `advance` brings half of them.

    Attributes:
      parts: source and destination of each that has not arrived.
      barrier: on which they complete; None: in a group of the stream.
      stream, group: as of issue.
      mode: what the elements outside the array are.
    """

    parts: list[tuple[Region, Region]]
    barrier: Barrier | None
    stream: LoadStream
    group: int
    mode: types.OOBFillMode | None
    location: Location | None

    def advance(self) -> bool:
        """Moves some parts."""
        for _ in range((len(self.parts) + 1) // 2):
            src, dst = self.parts.pop()
            dst.store(tma.arriving(src, dst.shape, self.mode, self.location))
            if self.barrier is not None:
                self.barrier.complete_bytes(tma.size_bytes(dst))
        if not self.parts and self.barrier is None:
            self.stream.arriving.passed(self.group)
        return not self.parts


@registry.register(cp_async.cp_async_p, _EMULATE)
def _cp_async(
    wg: Warpgroup,
    operands: dict[str, Any],
    oob_mode: types.OOBFillMode | None,
    **_: Any,
) -> None:
    begun = LoadStream.begin(wg, operands)
    if begun is None:
        return
    stream, barrier = begun
    src, dst = operands["src"], operands["dst"]
    _require_bounds(src, dst, oob_mode)
    group, (by, hint) = stream.open_group, stream.tracked(barrier)
    from_gmem = f"the copy to {dst.memory.name}"
    to_smem = f"the copy from {src.memory.name}"
    wg.access(dst, writes=True, what=to_smem, by=by, hint=hint, generic=True)
    wg.access(src, writes=False, what=from_gmem, by=by, hint=hint, generic=True)
    stream.start(wg, barrier, tma.size_bytes(dst))
    load = Load([(src, dst)], barrier, stream, group, oob_mode, wg.location)
    wg.group.in_flight.submit(load)


def _require_bounds(src: Region, dst: Region, mode: types.OOBFillMode | None) -> None:
    dst.require_in_bounds("the destination of a copy")
    if mode is types.OOBFillMode.PROMISE_IN_BOUNDS:
        src.require_in_bounds("the source of a copy that promises to be in bounds,")
    _require_indices(src, "copied")
    if mode is None and tma.is_outside(src):
        src.require_in_bounds(
            "copied entirely",
            "check the index, guard the copy with plgpu.when, or pass "
            "oob_mode=plgpu.OOBFillMode.ZEROS if zeros are meant",
        )


def _require_indices(gmem: Region, verb: str) -> None:
    """Raises OutOfBoundsError for an integer index that is out of bounds."""
    if gmem.outside() is None:
        return
    window = gmem.window
    if any(axis not in window.axes for axis in window.over_the_edge()):
        gmem.require_in_bounds(verb)


@registry.register(cp_async.wait_gmem_to_smem_p, _EMULATE)
def _wait_gmem_to_smem(wg: Warpgroup, _: Any, n: int, used: Any) -> Run:
    for stream in LoadStream.all_of(wg):
        yield from stream.wait(wg, n, 1, "copies to SMEM")


@registry.register(cp_async.store_by_threads_p, _EMULATE)
def _store_by_threads(
    wg: Warpgroup, operands: dict[str, Any], commit_group: bool, **_: Any
) -> None:
    if not skipped(operands):
        _store(wg, operands["src"], operands["dst"])
    if commit_group:
        tma.commit(wg)


def _store(wg: Warpgroup, src: Region, dst: Region) -> None:
    src.require_in_bounds("the source of a copy")
    _require_indices(dst, "written by a copy")
    if tma.is_outside(dst):
        dst.require_in_bounds("written by a copy entirely")
    wg.access(src, writes=False)
    wg.access(dst, writes=True)
    tma.require_values(src, dst)
    missing = src.missing()
    written = True if missing is None else ~missing.reshape(dst.shape)
    dst.store_clipped(src.load().reshape(dst.shape), written)
    # The copy ends with a fence: TMA may read what it has stored, as after its own.
    wg.fence(Fence.GMEM)
