# SPDX-License-Identifier: Apache-2.0
"""Clusters: their barrier, the SMEM of other CTAs, and the parts of a multicast.

Arrays and barriers have the same address in every CTA of a cluster: those of the same
declaration in the same visit of a scope.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from pallas_gpu import errors
from pallas_gpu.emulator.engine import ordering
from pallas_gpu.emulator.engine.execution import report
from pallas_gpu.emulator.engine.memory import Place, Region
from pallas_gpu.emulator.engine.orders.choices import Kind, Touch
from pallas_gpu.emulator.engine.reinterpreted import ReinterpretedArray
from pallas_gpu.emulator.engine.tables import Key
from pallas_gpu.emulator.engine.waits import Run
from pallas_gpu.emulator.gpu import scoped
from pallas_gpu.emulator.gpu.copies.pairs import Pair
from pallas_gpu.emulator.gpu.machine.cta import Cta, Warpgroup
from pallas_gpu.emulator.gpu.mbarrier import Barrier
from pallas_gpu.emulator.gpu.smem import SharedArray
from pallas_gpu.layouts.smem.pieces import pieces
from pallas_gpu.layouts.window import Window
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.cluster import cluster_sync_p

_SYNCHRONISE = (
    "let every CTA arrive on a ClusterBarrier when its memory is free, and wait for it "
    "before it"
)

_IN_CLUSTER_ORDER = (
    "let the CTA arrive on a ClusterBarrier after the access, and the other one wait "
    "for it"
)

WAIT = "call barrier_wait on the copy's barrier first"


# --- the barrier of a cluster ---------------------------------------------------------


def _barrier_of_cluster(first: Cta) -> Barrier:
    warpgroups = sum(len(cta.warpgroups) for cta in first.cluster.ctas)
    execution, name = first.device.execution, first.cluster.name
    barrier = Barrier(f"the barrier of {name}", warpgroups, execution.actors.other())
    barrier.touches, barrier.place = execution.touches, ("barrier of cluster", name)
    return barrier


# That of a cluster is kept by its first CTA.
_BARRIER: Key[Cta, Barrier] = Key("barrier of the cluster", _barrier_of_cluster)


@registry.register(cluster_sync_p, registry.RuleKind.EMULATE)
def _cluster_sync(wg: Warpgroup, *_: Any, **__: Any) -> Run:
    barrier = _BARRIER.of(wg.cta.cluster.ctas[0])
    barrier.arrived.append(wg)
    barrier.arrive(wg.release(), wg.location)
    for wait in barrier.wait(wg):
        if wait is not None:
            wait.hint = "let each warpgroup of each CTA call cluster_sync equally often"
        yield wait


# --- accesses by threads --------------------------------------------------------------


def elsewhere(
    wg: Warpgroup, region: Region, axes: Sequence[str], positions: Sequence[Any] | None
) -> Region:
    """Returns the same part of memory in another CTA.

    Args:
      wg: the warpgroup that accesses it.
      region: in SMEM of its CTA.
      axes: cluster axes.
      positions: those of the CTA on them; None for the own CTA.

    Raises:
      OutOfBoundsError: the cluster has no such CTA.
      KernelError: the CTA has freed the memory.
      RaceError: it may use the memory for another array.
    """
    if positions is None:
        return region
    peer = wg.cta.at(axes, positions)
    return (
        region if peer is wg.cta else Region(_reached(wg, region, peer), region.place)
    )


def counterpart_of(wg: Warpgroup, region: Region, cta: Cta) -> Region:
    """Returns the same part of SMEM or TMEM in a CTA of the cluster.

    Raises:
      KernelError: the CTA has freed the memory.
      RaceError: it may use the memory for another array.
    """
    memory = _reached(wg, region, cta)
    if isinstance(region.memory, ReinterpretedArray):
        memory = region.memory.of(memory)
    return Region(memory, region.place)


def access(
    wg: Warpgroup,
    region: Region,
    *,
    writes: bool,
    value: Any = None,
    atomic: bool = False,
    reach: ordering.Reach | None = None,
) -> None:
    """Checks and records an access by threads; see `Thread.access`."""
    memory, who, hint = region.memory, None, None
    if isinstance(memory, SharedArray) and memory.owner is not wg.cta:
        who, hint = wg.name, _IN_CLUSTER_ORDER
    wg.access(
        region,
        writes=writes,
        what=who,
        hint=hint,
        value=value,
        atomic=atomic,
        reach=reach,
    )


def _report_use(wg: Warpgroup, peer: Cta, key: Any) -> None:
    """Reports the use of memory that depends on whether a CTA has entered its scope."""
    if key[0] is not peer.cluster.lasting:
        for place in (("visits", peer.name), ("left", peer.name, *key[:2])):
            wg.execution.touch(Touch(place, Kind.READ))


def _reached(wg: Warpgroup, region: Region, peer: Cta) -> Any:
    key, position = region.memory.place
    theirs = scoped.scopes_of(peer)
    _report_use(wg, peer, key)
    if theirs.lasting is not None and theirs.lasting.key == key:
        return theirs.lasting.arrays[position]
    if theirs.left.get(key[:2], -1) >= key[2]:
        error = errors.KernelError(
            f"memory of {peer.name} is accessed, which has left the scope",
            expected="memory of a scope that the other CTA has not left",
            got=f"an access by {wg.name}",
            hint="wait for a ClusterBarrier at the end of the scope in every CTA; what "
            "scratch_types declares exists until the cluster ends",
        )
        raise error.about(rule="freed-memory")
    if key not in theirs.open:
        _require_free(wg, peer, "an access")
    declared = scoped.scopes_of(wg.cta).open[key].declared
    return scoped.scope_of(peer, key, declared).arrays[position]


# --- multicasts -----------------------------------------------------------------------


class Target(NamedTuple):
    """Where a copy goes.

    Attributes:
      dst: the box in SMEM.
      barrier: of the same CTA.
    """

    dst: Region
    barrier: Barrier


class Multicast:
    """One copy to the same box in several CTAs, of which each CTA copies a piece.

    The first CTA records the write of the whole box in all of them. The others, which
    know as much, do not repeat that: the cost is linear in the size of the cluster.

    Args:
      wg: the warpgroup that issues the first piece.
      src: the source.
      ctas: those that take part.
      targets: the whole box in each of them.

    Attributes:
      src, who, location: the source, the first warpgroup and its line.
      known: the clocks of the CTAs that have issued their piece.
    """

    def __init__(
        self, wg: Warpgroup, src: Region, ctas: list[Cta], targets: list[Target]
    ):
        self.src = src
        self.who = wg
        self.location = wg.location
        self.targets = targets
        self.known: list[ordering.Clock] = []
        self._missing = dict(zip(ctas, targets, strict=True))
        self._issued = ordering.Issued()
        self._records: dict[Cta, ordering.Access] = {}
        self._required: ordering.Clock | None = None

    def missing(self) -> list[str]:
        """Returns the names of the CTAs that have not issued their piece."""
        return [cta.name for cta in self._missing]

    def issue(self, wg: Warpgroup, places: list[Place]) -> None:
        """Checks and records the piece of a CTA, which has several boxes."""
        if len(self._missing) == len(self.targets):
            self._begin(wg)
        own = self._missing.pop(wg.cta)
        own.barrier.multicasts.append(self)
        self.known.append(dict(wg.clock))
        if self._issued.disturbed or not self._is_known_to(wg):
            for target in self.targets:
                for place in places:
                    piece = Region(target.dst.memory, place)
                    record_write(wg, self.src, piece, target.barrier)
        record = self._records.get(wg.cta)
        if record is not None:
            # Now it is certain in which phase the box is complete.
            record.time = own.barrier.phase + 1
        self._issued.boxes += [place.box for place in places]
        if self._missing:
            return
        for record in self._records.values():
            record.gradual = None

    def _begin(self, wg: Warpgroup) -> None:
        """Records the write of all pieces, unless one may not be written yet."""
        required: ordering.Clock = {}
        earlier = []
        for dst, _ in self.targets:
            earlier.append(dst.memory.history.present(dst.box()))
            for old in earlier[-1]:
                ordering.join(required, old.required(dst.memory.fence, True))
        self._required = required
        if not self._is_known_to(wg):
            self._required = None
            return
        for cta, (dst, barrier), before in zip(
            self._missing, self.targets, earlier, strict=True
        ):
            gradual = ordering.Gradual(self._issued, before)
            record = record_write(wg, self.src, dst, barrier, gradual)
            if record is not None:
                self._records[cta] = record

    def _is_known_to(self, wg: Warpgroup) -> bool:
        """True when a CTA's piece, like that of the first, is ordered after all."""
        return self._required is not None and all(
            wg.clock.get(actor, 0) >= time for actor, time in self._required.items()
        )


def record_write(
    wg: Warpgroup,
    src: Region,
    dst: Region,
    barrier: Barrier,
    gradual: ordering.Gradual | None = None,
) -> ordering.Access | None:
    """Checks and records that a copy writes to SMEM.

    So nobody sees the destination before the copy has completed.
    """
    return wg.access(
        dst,
        writes=True,
        what=f"the copy from {src.memory.name}",
        by=(barrier.actor, barrier.phase + 1),
        hint=WAIT,
        gradual=gradual,
    )


@dataclasses.dataclass
class _Multicasts:
    """The multicasts of a CTA.

    Attributes:
      counts: number of multicasts issued, by destination.
      incomplete: those that some but not all CTAs along an axis have issued, stored in
        the first of these CTAs: (destination, count) -> the multicast.
    """

    counts: dict[Any, int] = dataclasses.field(default_factory=dict)
    incomplete: dict[Any, Multicast] = dataclasses.field(default_factory=dict)


_MULTICASTS: Key[Cta, _Multicasts] = Key("multicasts", lambda cta: _Multicasts())


def multicast(
    wg: Warpgroup,
    src: Region,
    dst: Region,
    barrier: Region,
    axes: tuple[str, ...],
    pair: Pair | None = None,
) -> list[tuple[Region, list[Target]]]:
    """Records one CTA's piece of a multicast.

    Args:
      wg: the issuing warpgroup.
      src, dst: source and destination of all CTAs together.
      barrier: the operand with this CTA's barrier.
      axes: cluster axes.
      pair: the two CTAs whose leader's barrier counts all bytes.

    Returns:
      For each box of the piece its source, and its destinations; that of this CTA is
      the first.

    Raises:
      RaceError: a CTA's memory is not known to be free.
      KernelError: a CTA has ended, or copies another part.
    """
    cta = wg.cta
    group = cta.along(axes)
    copy = _find(wg, group, src, dst, barrier, axes, pair)
    index = group.index(cta)
    boxes = _boxes(src, dst, index, len(group))
    copy.issue(wg, [place for _, place in boxes])
    targets = copy.targets[index:] + copy.targets[:index]
    return [
        (
            Region(src.memory, source),
            [Target(Region(to.memory, place), theirs) for (to, theirs) in targets],
        )
        for source, place in boxes
    ]


def _find(
    wg: Warpgroup,
    group: list[Cta],
    src: Region,
    dst: Region,
    barrier: Region,
    axes: tuple[str, ...],
    pair: Pair | None,
) -> Multicast:
    """Returns the multicast that the CTAs issue together; the first one creates it.

    Raises KernelError when two CTAs copy different boxes to the same destination.
    """
    incomplete = _MULTICASTS.of(group[0]).incomplete
    counts = _MULTICASTS.of(wg.cta).counts
    to = (dst.memory.place, _form(dst.window), axes)
    count = counts.get(to, 0)
    counts[to] = count + 1
    copy = incomplete.get((to, count))
    if copy is None:
        targets = [
            Target(
                Region(counterpart(wg, dst.memory, peer), dst.place),
                pair.barrier if pair else barrier.memory.same_in(peer).one(barrier),
            )
            for peer in group
        ]
        copy = incomplete[to, count] = Multicast(wg, src, group, targets)
    else:
        for peer in group:
            _require_present(wg, dst.memory, peer)
    if len(copy.missing()) == 1:
        del incomplete[to, count]
    _require_agreement(copy, src)
    return copy


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
    _report_use(wg, peer, key)
    _require_present(wg, memory, peer)
    theirs = scoped.scopes_of(peer)
    if key not in theirs.open:
        _require_free(wg, peer, "a multicast")
    declared = scoped.scopes_of(wg.cta).open[key].declared
    return scoped.scope_of(peer, key, declared).arrays[position]


def _require_present(wg: Warpgroup, memory: SharedArray, peer: Cta) -> None:
    """Raises KernelError when a CTA has freed its array."""
    key = memory.place[0]
    if peer is not wg.cta:
        wg.execution.touch(Touch(("left", peer.name, *key[:2]), Kind.READ))
    has_left = scoped.scopes_of(peer).left.get(key[:2], -1) >= key[2]
    if not (has_left or peer.ended):
        return
    raise errors.KernelError(
        f"a multicast writes to {peer.name}, which has "
        f"{'ended' if peer.ended else 'left the scope'}",
        expected="all CTAs along collective_axes to make the same multicasts",
        got=f"one more by {wg.cta.name}",
        hint="issue the same number of copies in all CTAs of a cluster",
    )


def _require_free(wg: Warpgroup, peer: Cta, what: str) -> None:
    """Raises RaceError unless a CTA's earlier accesses happen before this one."""
    mine, theirs = scoped.scopes_of(wg.cta), scoped.scopes_of(peer)
    others = [k for k, s in theirs.open.items() if s.entered and k not in mine.open]
    if not others and all(
        wg.clock.get(actor, 0) >= time for actor, time in theirs.left_at.items()
    ):
        return
    error = errors.RaceError(
        f"{what} reaches {peer.name}, which may still use that memory for another "
        "array",
        expected="that CTA to have left the earlier scopes",
        got=f"{what} by {wg.cta.name} without an order between them",
        hint=_SYNCHRONISE,
    )
    report(error.about(rule="race-between-ctas"))


def _require_agreement(first: Multicast, src: Region) -> None:
    same_array = first.src.memory.name == src.memory.name
    if same_array and _form(first.src.window) == _form(src.window):
        return
    where = None if first.location is None else first.location.where
    error = errors.KernelError(
        "the CTAs of a multicast copy different parts of the array",
        expected=f"{_text(first.src)}, as {first.who.name} does at {where}",
        got=_text(src),
        hint="let the source depend on axes other than collective_axes only",
    )
    report(error.about(buffer=src.memory.name))


def _form(window: Window) -> tuple[Any, ...]:
    """Returns a value that is equal for windows of the same part."""
    return (window.starts, window.sizes, window.axes)


def _text(region: Region) -> str:
    name, window = region.memory.name, region.window
    pairs = zip(window.starts, window.sizes, strict=True)
    ranges = ", ".join(f"{start}:{start + size}" for start, size in pairs)
    return f"{name} [{ranges}]"
