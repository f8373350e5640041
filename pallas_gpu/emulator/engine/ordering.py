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
"""

from __future__ import annotations

import dataclasses

from pallas_gpu import errors

Clock = dict[int, int]
Box = tuple[tuple[int, int], ...]

# Length of a list from which on superseded records are dropped.
_PRUNE_AT = 24


def join(into: Clock, other: Clock) -> None:
    """Joins the clock `other` into `into`."""
    for actor, time in other.items():
        if into.get(actor, 0) < time:
            into[actor] = time


@dataclasses.dataclass(slots=True)
class Access:
    """One access to a part of an array.

    Attributes:
      box: (low, high) for each axis.
      writes: False for a read.
      actor, time: the actor, and the time at which the access is complete.
      by_copy: whether an asynchronous copy performs it.
      what: the accessing thread or copy, for messages.
      where: the kernel's line.
      hint: how to order other accesses after this one.
    """

    box: Box
    writes: bool
    actor: int
    time: int
    by_copy: bool
    what: str
    where: str | None
    hint: str

    def known_to(self, clock: Clock) -> bool:
        """True when the access happens before the next step of the clock's owner."""
        return clock.get(self.actor, 0) >= self.time


def overlap(a: Box, b: Box) -> bool:
    """True when two boxes share an element."""
    for (a_low, a_high), (b_low, b_high) in zip(a, b, strict=True):
        if a_low >= b_high or b_low >= a_high:
            return False
    return True


def inside(inner: Box, outer: Box) -> bool:
    """True when a box is contained in another one."""
    return all(
        low <= i_low and i_high <= high
        for (i_low, i_high), (low, high) in zip(inner, outer, strict=True)
    )


def extend(old: Access, new: Access) -> bool:
    """Merges an access into an adjacent one, as from a loop over rows."""
    if (old.actor, old.time, old.writes) != (new.actor, new.time, new.writes):
        return False
    if old.by_copy or new.by_copy or old.where != new.where:
        return False
    union = _union(old.box, new.box)
    if union is None:
        return False
    old.box = union
    return True


def _union(a: Box, b: Box) -> Box | None:
    """Returns two boxes as one, if they differ on one axis and are adjacent there."""
    differ = [axis for axis, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
    if not differ:
        return a
    if len(differ) > 1:
        return None
    axis = differ[0]
    (a_low, a_high), (b_low, b_high) = a[axis], b[axis]
    if a_low > b_high or b_low > a_high:
        return None
    both = (min(a_low, b_low), max(a_high, b_high))
    return (*a[:axis], both, *a[axis + 1 :])


class History:
    """The accesses to one array with which later ones may conflict."""

    __slots__ = ("_next_prune", "records")

    def __init__(self) -> None:
        self.records: list[Access] = []
        self._next_prune = _PRUNE_AT

    def check(self, new: Access, clock: Clock, name: str, threads_too: bool) -> None:
        """Raises RaceError when a recorded access conflicts and is not ordered.

        Args:
          new: the access that is about to happen.
          clock: of the thread that performs or issues it.
          name: the array, for messages.
          threads_too: whether to also compare threads with threads.
        """
        for old in self.records:
            if not (old.writes or new.writes) or not overlap(old.box, new.box):
                continue
            if old.known_to(clock):
                continue
            if threads_too or old.by_copy or new.by_copy:
                raise _race(old, new, name)

    def add(self, new: Access, clock: Clock, everyone: list[Clock]) -> None:
        """Records an access and forgets those that it supersedes.

        A write supersedes the accesses inside it: an access ordered after the write is
        ordered after them too.
        """
        if self.records and extend(self.records[-1], new):
            return
        self.records = [
            old
            for old in self.records
            if not (
                (new.writes or (old.actor == new.actor and not old.writes))
                and old.known_to(clock)
                and inside(old.box, new.box)
            )
        ]
        self.records.append(new)
        if len(self.records) >= self._next_prune:
            self.records = [
                old
                for old in self.records
                if not all(old.known_to(other) for other in everyone)
            ]
            self._next_prune = max(_PRUNE_AT, 2 * len(self.records))


def _race(old: Access, new: Access, name: str) -> errors.RaceError:
    verb = "written" if new.writes else "read"
    if old.by_copy and not old.writes:
        what = f"{name} is {verb} while {old.what} may still read it"
    elif old.by_copy:
        what = f"{name} is {verb} before {old.what} has been waited for"
    else:
        did = "written" if old.writes else "read"
        what = (
            f"{name} is {verb}, and {old.what} has {did} it without an order between "
            "them"
        )
    return errors.RaceError(
        what,
        expected=f"an order between this access and the one at {old.where}",
        got=f"{new.what} on elements {box_text(new.box)}; {old.what} on "
        f"{box_text(old.box)}",
        hint=old.hint,
    )


def box_text(box: Box) -> str:
    """Returns a box as an index expression."""
    inner = ", ".join(str(a) if b == a + 1 else f"{a}:{b}" for a, b in box)
    return f"[{inner}]"
