# SPDX-License-Identifier: Apache-2.0
"""Clusters: the parts of a multicast, and the memory of its destination CTAs.

Arrays and barriers have the same address in every CTA of a cluster: those of the same
declaration in the same visit of a scope.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_gpu import errors
from pallas_gpu.emulator.engine.memory import Region
from pallas_gpu.emulator.engine.steps import Location
from pallas_gpu.emulator.engine.tables import Key
from pallas_gpu.emulator.gpu import scoped
from pallas_gpu.emulator.gpu.cta import Cta, Warpgroup
from pallas_gpu.emulator.gpu.mbarrier import Barrier
from pallas_gpu.emulator.gpu.smem import SharedArray
from pallas_gpu.layouts.smem.pieces import pieces
from pallas_gpu.layouts.window import Window

_SYNCHRONISE = (
    "let every CTA arrive on a ClusterBarrier when its memory is free, and wait for it "
    "before the multicast"
)


@dataclasses.dataclass(slots=True)
class Part:
    """A copy of a box of GMEM to the SMEM of one CTA.

    Attributes:
      src, dst: the boxes.
      barrier: that of the destination CTA.
    """

    src: Region
    dst: Region
    barrier: Barrier


@dataclasses.dataclass(slots=True)
class _First:
    """The copy that the first CTA of a multicast has issued.

    Attributes:
      src: the source.
      who, location: the warpgroup and its line.
      issued: how many CTAs have issued it.
    """

    src: Region
    who: Warpgroup
    location: Location | None
    issued: int = 0


@dataclasses.dataclass
class _Multicasts:
    """The multicasts of a CTA.

    Attributes:
      counts: number of multicasts issued, by destination.
      incomplete: those that some but not all CTAs along an axis have issued, stored in
        the first of these CTAs: (destination, count) -> the copy of the first.
    """

    counts: dict[Any, int] = dataclasses.field(default_factory=dict)
    incomplete: dict[Any, _First] = dataclasses.field(default_factory=dict)


_MULTICASTS: Key[Cta, _Multicasts] = Key("multicasts", lambda cta: _Multicasts())


def multicast(
    wg: Warpgroup, src: Region, dst: Region, barrier: Region, axes: tuple[str, ...]
) -> list[Part]:
    """Returns the copies of one CTA in a multicast: its piece, to each of the CTAs.

    Args:
      wg: the issuing warpgroup.
      src, dst: source and destination of all CTAs together.
      barrier: the operand with this CTA's barrier.
      axes: cluster axes.

    Raises:
      RaceError: a CTA's memory is not known to be free.
      KernelError: a CTA has ended, or copies another part.
    """
    cta = wg.cta
    group = cta.along(axes)
    _require_agreement(wg, group, src, dst)
    boxes = _boxes(src, dst, group.index(cta), len(group))
    parts = []
    own = barrier.memory.one(barrier)
    for peer in group:
        theirs = barrier.memory.same_in(peer).one(barrier)
        if peer is not cta:
            own.expect_part(peer.name, 1)
            theirs.expect_part(cta.name, -1)
        memory = counterpart(wg, dst.memory, peer)
        parts += [
            Part(Region(src.memory, source), Region(memory, target), theirs)
            for source, target in boxes
        ]
    return parts


def _boxes(src: Region, dst: Region, index: int, count: int) -> list[tuple[Any, Any]]:
    """Returns the boxes of one of the equal pieces of a copy, of source and of
    destination: the CTAs share the bytes of the destination."""
    found = []
    tile = dst.memory.tile
    for box in pieces(dst.window.sizes, tile, count)[index]:
        ranges = [box[axis] for axis in dst.window.axes]
        starts, sizes = [start for start, _ in ranges], [size for _, size in ranges]
        found.append((src.place.slice(starts, sizes), dst.place.slice(starts, sizes)))
    return found


def counterpart(wg: Warpgroup, memory: SharedArray, peer: Cta) -> SharedArray:
    """Returns the same array in another CTA."""
    if peer is wg.cta:
        return memory
    key, position = memory.place
    theirs = scoped.scopes_of(peer)
    if peer.ended or theirs.left.get(key[:2], -1) >= key[2]:
        raise errors.KernelError(
            f"a multicast writes to {peer.name}, which has "
            f"{'ended' if peer.ended else 'left the scope'}",
            expected="all CTAs along collective_axes to make the same multicasts",
            got=f"one more by {wg.cta.name}",
            hint="issue the same number of copies in all CTAs of a cluster",
        )
    if key not in theirs.open:
        _require_free(wg, peer)
    declared = scoped.scopes_of(wg.cta).open[key].declared
    return scoped.scope_of(peer, key, declared).arrays[position]


def _require_free(wg: Warpgroup, peer: Cta) -> None:
    """Raises RaceError unless a CTA's earlier accesses happen before this copy."""
    mine, theirs = scoped.scopes_of(wg.cta), scoped.scopes_of(peer)
    others = [k for k, s in theirs.open.items() if s.entered and k not in mine.open]
    if not others and all(
        wg.clock.get(actor, 0) >= time for actor, time in theirs.left_at.items()
    ):
        return
    raise errors.RaceError(
        f"a multicast writes to {peer.name}, which may still use that memory for "
        "another array",
        expected="that CTA to have left the earlier scopes",
        got=f"a multicast by {wg.cta.name} without an order between them",
        hint=_SYNCHRONISE,
    )


def _require_agreement(
    wg: Warpgroup, group: list[Cta], src: Region, dst: Region
) -> None:
    """Raises KernelError when two CTAs copy different boxes to the same destination."""
    incomplete = group[0].state.of(_MULTICASTS).incomplete
    counts = wg.cta.state.of(_MULTICASTS).counts
    to = (dst.memory.place, _form(dst.window))
    count = counts.get(to, 0)
    counts[to] = count + 1
    first = incomplete.get((to, count))
    if first is None:
        first = incomplete[to, count] = _First(src, wg, wg.location)
    first.issued += 1
    if first.issued == len(group):
        del incomplete[to, count]
    same_array = first.src.memory.name == src.memory.name
    if same_array and _form(first.src.window) == _form(src.window):
        return
    where = None if first.location is None else first.location.where
    raise errors.KernelError(
        "the CTAs of a multicast copy different parts of the array",
        expected=f"{_text(first.src)}, as {first.who.name} does at {where}",
        got=_text(src),
        hint="let the source depend on axes other than collective_axes only",
    )


def _form(window: Window) -> tuple[Any, ...]:
    """Returns a value that is equal for windows of the same part."""
    return (window.starts, window.sizes, window.axes)


def _text(region: Region) -> str:
    name, window = region.memory.name, region.window
    pairs = zip(window.starts, window.sizes, strict=True)
    ranges = ", ".join(f"{start}:{start + size}" for start, size in pairs)
    return f"{name} [{ranges}]"
