# SPDX-License-Identifier: Apache-2.0
"""Happens-before: vector clocks, and the accesses that they order.

An actor is anything that advances independently: a thread, a barrier (its phases
complete), a stream of asynchronous work (its groups complete). A thread's clock
contains, for each actor, the time up to which the actor's work happens before the
thread's. An access at time `t` of an actor happens before everything that a thread does
once its clock for that actor has reached `t`.

Asynchronous copies are checked through the same records as threads: a copy's access
belongs to its barrier's current phase, or to its group. So a missing wait or an early
overwrite is found in every run, whether the copy completed early or late.

Asynchronous work accesses memory through another proxy (PTX ISA, "Proxies"): it is
ordered after a thread's store only if a fence for that memory lies on the path between
the two; in SMEM, a write is ordered after a thread's load only so, too. So a clock has
three more entries per thread: the time up to which its accesses happen before a fence
that happens before the clock's owner. There is one for each kind of memory, and one for
fences that admit writes to SMEM alone: those that the compiler inserts. Fences travel
with arrivals and waits, as all knowledge does.

Asynchronous work that arrives on a barrier comes after what its issuer has executed,
but does not make the issuer's stores visible. A further entry per thread is the time up
to which it has executed: it orders waits for barriers, and no accesses.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Mapping
from typing import Any, Protocol

from pallas_gpu import errors, findings

Clock = dict[int, int]
Box = tuple[tuple[int, int], ...]
# Operations around another one, innermost first, and the iteration of each loop.
Around = tuple[tuple[Any, int | None], ...]


class Fence(enum.IntEnum):
    """A kind of fence; its value is the distance of a thread's entry to its actor."""

    SMEM = 1
    GMEM = 2
    SMEM_WRITES = 5

    def before(self, writes: bool) -> Fence:
        """Returns what asynchronous work in this kind of memory needs."""
        smem_writes = self is Fence.SMEM and writes
        return Fence.SMEM_WRITES if smem_writes else self


_STRIDE = 8
# Remainders of the actors that are not threads; they have no further entries.
_NO_THREAD, _TENSOR_CORE = 3, 7
# The distance of a thread's entry for what it has executed to its actor.
_EXECUTED = 4


class Actors:
    """The numbers of actors."""

    def __init__(self) -> None:
        self._threads = itertools.count(0, _STRIDE)
        self._others = itertools.count(_NO_THREAD, _STRIDE)
        self._tensor_core = itertools.count(_TENSOR_CORE, _STRIDE)

    def thread(self) -> int:
        """Returns the number of a new thread, or of work in the generic proxy."""
        return next(self._threads)

    def other(self) -> int:
        """Returns the number of a new barrier or stream."""
        return next(self._others)

    def tensor_core(self) -> int:
        """Returns the number of a new stream of accesses to tensor memory.

        What a clock says of it passes on only where it is ordered for the tensor core.
        """
        return next(self._tensor_core)


def join(into: Clock, other: Clock) -> None:
    """Joins the clock `other` into `into`."""
    if not into:
        into.update(other)
        return
    for actor, time in other.items():
        if into.get(actor, 0) < time:
            into[actor] = time


def joined(a: Clock, b: Clock) -> Clock:
    """Returns two clocks as one."""
    result = dict(a)
    join(result, b)
    return result


def without_tensor_core(clock: Clock) -> Clock:
    """Returns a clock without what it says of accesses to tensor memory."""
    return {a: time for a, time in clock.items() if a % _STRIDE != _TENSOR_CORE}


def executed(clock: Clock) -> Clock:
    """Returns what a clock says of the execution of threads, without their accesses."""
    found: Clock = {}
    for actor, time in clock.items():
        if actor % _STRIDE in (0, _EXECUTED):
            thread = actor - actor % _STRIDE
            join(found, {thread + _EXECUTED: time})
    return found


def has_executed(clock: Clock, thread: int, time: int) -> bool:
    """True when a thread's step at a time was executed before the clock's owner's."""
    return max(clock.get(thread, 0), clock.get(thread + _EXECUTED, 0)) >= time


def fence(clock: Clock, kind: Fence) -> None:
    """Records that a fence follows everything that a clock contains."""
    threads = [(a, time) for a, time in clock.items() if a % _STRIDE == 0]
    kinds = {kind, kind.before(writes=True)}
    for actor, time in threads:
        for each in kinds:
            clock[actor + each] = time


@dataclasses.dataclass(slots=True, eq=False)
class Issued:
    """The parts that have been issued of a write that several threads issue.

    Attributes:
      disturbed: whether an access has touched another part meanwhile.
    """

    boxes: list[Box] = dataclasses.field(default_factory=list)
    disturbed: bool = False


@dataclasses.dataclass(slots=True, eq=False)
class Gradual:
    """The state of a write to one array that is issued part by part.

    The record of the first part covers the whole write, so that the later ones need
    none. Where no part has been issued, the accesses before it still count.

    Attributes:
      issued: shared by all arrays to which the same thread writes.
      earlier: the accesses to the array that the record has superseded.
    """

    issued: Issued
    earlier: list[Access]

    def reaches(self, box: Box) -> bool:
        """True when an issued part shares an element with a box."""
        if any(overlap(part, box) for part in self.issued.boxes):
            return True
        self.issued.disturbed = True
        return False


@dataclasses.dataclass(frozen=True, slots=True)
class Reach:
    """With whom an atomic operation is atomic (PTX ISA, Scope, Morally strong).

    Attributes:
      group: the name of the group that its scope includes; None for all.
      inside: the names of the groups that its thread is in.
    """

    group: str | None = None
    inside: tuple[str, ...] = ()

    def includes(self, other: Reach) -> bool:
        """True when each of two operations includes the thread of the other one."""
        return (self.group is None or self.group in other.inside) and (
            other.group is None or other.group in self.inside
        )


class Issue(Protocol):
    """What is known of work in flight that is in order with other such work."""

    def follows(self, old: Access, clock: Clock) -> bool:
        """True for an access that this work, which comes next, is in order after."""

    def is_complete(self, clock: Clock) -> bool:
        """True when the clock's owner knows that the work is complete."""


@dataclasses.dataclass(slots=True, eq=False)
class Access:
    """One access to a part of an array.

    Attributes:
      box: (low, high) for each axis.
      writes: False for a read.
      actor, time: the actor, and the time at which the access is complete.
      by_copy: whether asynchronous work performs it.
      what: the accessing thread or copy, for messages.
      location: the equation; its `where` is the kernel's line.
      hint: how to order other accesses after this one.
      viewer: the group that accesses memory which several groups share.
      gradual: the state of a write of which some parts have not been issued.
      atomic: whether it needs no order with other atomic accesses of threads, or of
        asynchronous work if it is by such work.
      reach: with which of them; None for all.
      generic: whether asynchronous work accesses memory as threads do, through the
        generic proxy. If its actor is numbered as a thread's, work in another proxy
        needs a fence after it.
      issue: of asynchronous work that may be in order with other such work.
      position: that of the thread that performs or issues it, which no other has.
      around: the operations around the equation.
    """

    box: Box
    writes: bool
    actor: int
    time: int
    by_copy: bool
    what: str
    location: Any = None
    hint: str = ""
    viewer: Viewer | None = None
    gradual: Gradual | None = None
    atomic: bool = False
    generic: bool = False
    reach: Reach | None = None
    issue: Issue | None = None
    position: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    around: Around = ()

    @property
    def by_proxy(self) -> bool:
        """Whether it goes through another proxy than the accesses of threads."""
        return self.by_copy and not self.generic

    @property
    def is_fenced(self) -> bool:
        """Whether it is one of those that fences order."""
        return not self.by_copy or (self.generic and self.actor % _STRIDE == 0)

    @property
    def where(self) -> str | None:
        """The kernel's line; that around an operation of the package's own."""
        locations = (self.location, *(location for location, _ in self.around))
        lines = (x.where for x in locations if x is not None)
        return next(filter(None, lines), None)

    def place(self) -> findings.Place:
        """Returns where it is made."""
        return findings.place(self.where, self.what, self.position, loops(self.around))

    def known_to(self, clock: Clock) -> bool:
        """True when the access happens before the next step of the clock's owner."""
        return clock.get(self.actor, 0) >= self.time or (
            self.issue is not None and self.issue.is_complete(clock)
        )

    def precedes(self, new: Access, clock: Clock) -> bool:
        """True when it happens before an access that the clock's owner makes next."""
        return self.known_to(clock) or (
            new.issue is not None and new.issue.follows(self, clock)
        )

    def needed(self, kind: Fence, writes: bool) -> Fence | None:
        """Returns the fence between the access and asynchronous work; None if none.

        After asynchronous work no fence is needed: its completion contains one.

        Args:
          kind: of the memory.
          writes: whether the work writes.
        """
        fence = kind.before(writes)
        unordered = self.writes or fence is Fence.SMEM_WRITES
        return fence if unordered and self.is_fenced else None

    def required(self, kind: Fence, writes: bool) -> Clock:
        """Returns what the clock of asynchronous work after the access contains."""
        needed = self.needed(kind, writes)
        if needed is not None:
            return {self.actor: self.time, self.actor + needed: self.time}
        return {self.actor: self.time}

    def is_fenced_for(self, clock: Clock, kind: Fence, writes: bool) -> bool:
        """True when the fence that asynchronous work needs is known to a clock."""
        needed = self.needed(kind, writes)
        return needed is None or clock.get(self.actor + needed, 0) >= self.time


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Earlier:
    """Work before the run that may still access the arrays of a run.

    Attributes:
      actor, time: it happens before those whose clocks contain them.
      what, wait: it, and what waits for it, for messages.
      hint: how to wait for it.
    """

    actor: int
    what: str
    wait: str
    hint: str
    time: int = 1


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Viewer:
    """A group of threads as a user of memory that several groups share.

    Attributes:
      name: for messages.
    """

    name: str

    def race(
        self, old: Access, new: Access, name: str, element: list[int]
    ) -> errors.RaceError:
        """Returns the error for two accesses of different groups to an array.

        Args:
          old, new: the accesses.
          name: the array.
          element: the first one that both access.
        """
        raise NotImplementedError


def overlap(a: Box, b: Box) -> bool:
    """True when two boxes share an element."""
    for (a_low, a_high), (b_low, b_high) in zip(a, b, strict=True):
        if a_low >= b_high or b_low >= a_high:
            return False
    return True


def extend(old: Access, new: Access) -> bool:
    """Merges an access into an adjacent one, as from a loop over rows."""
    if (old.time, old.writes, old.actor) != (new.time, new.writes, new.actor):
        return False
    if (old.atomic, old.reach) != (new.atomic, new.reach):
        return False
    if old.by_copy or new.by_copy or old.location is not new.location:
        return False
    union = _union(old.box, new.box)
    if union is None:
        return False
    old.box = union
    return True


def _union(a: Box, b: Box) -> Box | None:
    """Returns two boxes as one, if they differ on one axis and are adjacent there."""
    if a == b:
        return a
    differ = [axis for axis, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
    if len(differ) > 1:
        return None
    axis = differ[0]
    (a_low, a_high), (b_low, b_high) = a[axis], b[axis]
    if a_low > b_high or b_low > a_high:
        return None
    both = (min(a_low, b_low), max(a_high, b_high))
    return (*a[:axis], both, *a[axis + 1 :])


def loops(around: Around) -> tuple[tuple[str | None, int], ...]:
    """Returns the line of each loop, and the number of the iteration."""
    return tuple((at.where, i) for at, i in around if i is not None)


def box_text(box: Box) -> str:
    """Returns a box as an index expression."""
    inner = ", ".join(str(a) if b == a + 1 else f"{a}:{b}" for a, b in box)
    return f"[{inner}]"


def both_atomic(old: Access, new: Access) -> bool:
    """True for two atomic operations that take effect one after the other."""
    # A thread's atomics and those of copies use different proxies.
    if not (old.atomic and new.atomic and old.by_proxy == new.by_proxy):
        return False
    return old.reach is None or new.reach is None or old.reach.includes(new.reach)
