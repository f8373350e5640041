# SPDX-License-Identifier: Apache-2.0
"""Clusters: a multicast's parts, and the memory of the CTAs that they reach.

Arrays and barriers have the same address in every CTA of a cluster: the same
declaration of the same scope, at the same visit.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_gpu import errors
from pallas_gpu.emulator.engine.memory import Memory, Region
from pallas_gpu.emulator.gpu import scoped
from pallas_gpu.emulator.gpu.machine import Cta, Warpgroup
from pallas_gpu.emulator.gpu.mbarrier import Barrier

_SYNCHRONISE = (
    "let every CTA arrive on a ClusterBarrier when its memory is free, and wait for it "
    "before the multicast"
)


@dataclasses.dataclass(slots=True)
class Part:
    """A copy of a box of GMEM to the SMEM of one CTA.

    Attributes:
      src, dst: the boxes.
      barrier: of the CTA that receives it.
    """

    src: Region
    dst: Region
    barrier: Barrier


def multicast(
    wg: Warpgroup, src: Region, dst: Region, barrier: Region, axes: tuple[str, ...]
) -> list[Part]:
    """Returns what one CTA copies of a multicast: its piece, to each of the CTAs.

    Args:
      wg: who issues it.
      src, dst: what all CTAs together copy.
      barrier: the operand that names this CTA's barrier.
      axes: cluster axes.

    Raises:
      ShapeError: the leading dimension does not divide among the CTAs.
      RaceError: a CTA's memory is not known to be free.
      KernelError: a CTA has ended, or copies something else.
    """
    cta = wg.cta
    group = cta.along(axes)
    _require_agreement(wg, group, src, dst)
    index = group.index(cta)
    src_piece, dst_piece = (_piece(r, index, len(group)) for r in (src, dst))
    parts = []
    own = barrier.memory.one(barrier)
    for peer in group:
        theirs = barrier.memory.same_in(peer).one(barrier)
        if peer is not cta:
            own.expect_part(peer.name, 1)
            theirs.expect_part(cta.name, -1)
        memory = _counterpart(wg, dst.memory, peer)
        parts.append(
            Part(src_piece, dataclasses.replace(dst_piece, memory=memory), theirs)
        )
    return parts


def _piece(region: Region, index: int, count: int) -> Region:
    """Returns one of equal pieces along the leading dimension."""
    if not region.order or region.sizes[region.order[0]] % count:
        raise errors.ShapeError(
            "a multicast does not divide among the CTAs",
            expected=f"a leading dimension that is a multiple of {count}, the "
            "number of CTAs that share the copy",
            got=f"shape {region.shape}",
            hint="copy without collective_axes, or choose another tile",
        )
    axis = region.order[0]
    size = region.sizes[axis] // count
    starts, sizes = list(region.starts), list(region.sizes)
    starts[axis] += index * size
    sizes[axis] = size
    return dataclasses.replace(region, starts=tuple(starts), sizes=tuple(sizes))


def _counterpart(wg: Warpgroup, memory: Memory, peer: Cta) -> Memory:
    """Returns the same array in another CTA."""
    if peer is wg.cta:
        return memory
    key, position = memory.place
    if peer.ended or peer.left.get(key[:2], -1) >= key[2]:
        raise errors.KernelError(
            f"a multicast reaches {peer.name}, which has "
            f"{'ended' if peer.ended else 'left the scope'}",
            expected="all CTAs along collective_axes to make the same multicasts",
            got=f"one more by {wg.cta.name}",
            hint="give the CTAs of a cluster the same number of copies",
        )
    if key not in peer.scopes:
        _require_free(wg, peer)
    declared = wg.cta.scopes[key].declared
    return scoped.scope_of(peer, key, declared).allocated[position]


def _require_free(wg: Warpgroup, peer: Cta) -> None:
    """Raises RaceError unless what a CTA did before a scope is known to be over."""
    mine = wg.cta.scopes
    others = [key for key, s in peer.scopes.items() if s.entered and key not in mine]
    if not others and all(
        wg.clock.get(actor, 0) >= time for actor, time in peer.left_at.items()
    ):
        return
    raise errors.RaceError(
        f"a multicast reaches {peer.name}, which may still use that memory for "
        "something else",
        expected="that CTA to have left the scopes before this one",
        got=f"a multicast by {wg.cta.name} without an order between",
        hint=_SYNCHRONISE,
    )


def _require_agreement(
    wg: Warpgroup, group: list[Cta], src: Region, dst: Region
) -> None:
    """Raises KernelError when two CTAs copy different boxes to the same place."""
    table = group[0].multicasts
    to = (dst.memory.place, dst.starts, dst.sizes)
    count = wg.cta.multicast_counts.get(to, 0)
    wg.cta.multicast_counts[to] = count + 1
    box = (src.memory.name, src.starts, src.sizes, src.order)
    entry = table.setdefault((to, count), [box, wg, wg.where(), 0])
    entry[3] += 1
    if entry[3] == len(group):
        del table[to, count]
    if entry[0] == box:
        return
    raise errors.KernelError(
        "the CTAs of a multicast copy different parts of the array",
        expected=f"{_text(entry[0])}, as {entry[1].name} does at {entry[2]}",
        got=_text(box),
        hint="let the source depend on axes other than collective_axes only",
    )


def _text(box: Any) -> str:
    name, starts, sizes, _ = box
    ranges = ", ".join(f"{a}:{a + n}" for a, n in zip(starts, sizes, strict=True))
    return f"{name} [{ranges}]"
