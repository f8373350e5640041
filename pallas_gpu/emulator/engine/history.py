# SPDX-License-Identifier: Apache-2.0
"""The accesses to an array with which later ones may conflict.

Each cell of the array stores its last writers and its readers since, so the cost of an
access depends on its cells and not on the number of earlier accesses.

An access supersedes those that it is ordered after: what is ordered after the new one
is ordered after them too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pallas_gpu.emulator.engine import ordering, race_report
from pallas_gpu.emulator.engine.cells import Cells
from pallas_gpu.emulator.engine.execution import report
from pallas_gpu.emulator.engine.ordering import (
    Access,
    Box,
    Clock,
    Fence,
    extend,
    overlap,
)

# Accesses without an order among them; few, since each actor has at most one. Several
# writers have stored the same values.
Accesses = tuple[Access, ...]
# Whether a new store leaves the elements of a box as they are.
Unchanged = Callable[[Box], bool]
# What to do about an access that conflicts.
Hint = Callable[[Access], str]

_WRITERS, _READERS = 0, 1
# The numbers of cells without accesses.
_NOTHING = {0}
# Number of sets from which on those that no cell refers to are dropped.
_FEWEST_SETS = 1024


class History:
    """The accesses to one array.

    Args:
      shape: of the array.
      fence: what makes threads' stores visible to asynchronous work.
    """

    __slots__ = ("_cells", "_fence", "_ids", "_latest", "_limit", "_sets")

    def __init__(self, shape: tuple[int, ...], fence: Fence):
        self._fence = fence
        self._cells = Cells(shape, layers=2)
        # Cells store numbers of sets; 0 is the empty one.
        self._sets: list[Accesses] = [()]
        self._ids: dict[Accesses, int] = {(): 0}
        self._limit = _FEWEST_SETS
        # For each thread its latest access, which a neighbour may extend.
        self._latest: dict[int, Access] = {}

    @property
    def is_empty(self) -> bool:
        """True when nothing has been recorded."""
        return len(self._sets) == 1

    def live(self) -> dict[Access, None]:
        """Returns the accesses with which later ones may conflict."""
        self._forget()
        return {access: None for accesses in self._sets for access in accesses}

    def present(self, box: Box) -> list[Access]:
        """Returns the accesses that a write of a box would supersede."""
        index = self._cells.index(box)
        numbers = {
            number
            for layer in (_WRITERS, _READERS)
            for number in self._cells.numbers(layer, index)
        }
        return [access for number in numbers for access in self._sets[number]]

    def may_conflict(self, new: Access, clock: Clock, threads_too: bool) -> bool:
        """False if no access here conflicts with a new one, wherever that is."""
        check = _Check(new, clock, self._fence, threads_too)
        return any(
            any(old.gradual is not None for old in accesses)
            or check.conflict(accesses) is not None
            for accesses in self._sets
        )

    def access(
        self,
        new: Access,
        clock: Clock,
        name: str,
        *,
        threads_too: bool = True,
        record: bool = True,
        unchanged: Unchanged | None = None,
        hint: Hint | None = None,
    ) -> None:
        """Checks an access and records it.

        Args:
          new: the access that is about to happen.
          clock: of the thread that performs or issues it.
          name: the array, for messages.
          threads_too: whether to also compare threads with threads, and groups with
            groups.
          record: False if no later access can conflict with it.
          unchanged: for a store, which does not conflict with stores of its kind (of
            threads, or of copies) where it leaves the elements as they are; a thread's
            store not with loads either. What they were before the other threads' last
            stores is not known: a race with that shows in the schedules in which it is
            still there.
          hint: what to do about an earlier access that conflicts; default: its hint.

        Raises:
          RaceError: an earlier access conflicts and is not ordered before.
        """
        index = self._cells.index(new.box)
        present = [self._cells.numbers(layer, index) for layer in (_WRITERS, _READERS)]
        check = _Check(new, clock, self._fence, threads_too)
        for layer in (_WRITERS, _READERS) if new.writes else (_WRITERS,):
            for number in present[layer]:
                old = check.conflict(self._sets[number]) if number else None
                if old is None:
                    continue
                boxes = self._cells.boxes(layer, index, number, new.box)
                if not (
                    unchanged is not None
                    and check.is_alike(self._sets[number])
                    and all(map(unchanged, boxes))
                ):
                    advice = old.hint if hint is None else hint(old)
                    report(
                        race_report.race(
                            old, new, clock, name, boxes[0], self._fence, advice
                        )
                    )
        if record:
            self._record(new, clock, index, present)

    def _record(
        self, new: Access, clock: Clock, index: tuple[Any, ...], present: list[set[int]]
    ) -> None:
        """Records an access to cells that store these sets in each layer."""
        if not new.by_copy:
            latest = self._latest.get(new.actor)
            if latest is not None and extend(latest, new):
                new = latest
            else:
                self._latest[new.actor] = new
        if new.writes:
            self._update(_WRITERS, new, clock, index, present[_WRITERS])
        if not new.writes or present[_READERS] != _NOTHING:
            self._update(_READERS, new, clock, index, present[_READERS])
        if len(self._sets) > self._limit:
            self._forget()

    def _update(
        self,
        layer: int,
        new: Access,
        clock: Clock,
        index: tuple[Any, ...],
        present: set[int],
    ) -> None:
        """Removes the superseded accesses from cells, and adds the new one.

        A write supersedes readers without being one.
        """
        added = (new,) if new.writes == (layer == _WRITERS) else ()
        changed = {}
        # A copy may read what it may not overwrite yet: then nor may others after it.
        remain = new.by_proxy and not new.writes and layer == _READERS
        for number in present:
            left = [
                old
                for old in self._sets[number]
                if (
                    old.actor != new.actor
                    and clock.get(old.actor, 0) < old.time
                    and (old.issue is None or not old.precedes(new, clock))
                )
                or (remain and not old.is_fenced_for(clock, self._fence, writes=True))
            ]
            changed[number] = self._number((*left, *added))
        self._cells.replace(layer, index, changed)

    def _number(self, accesses: Accesses) -> int:
        number = self._ids.get(accesses)
        if number is None:
            number = self._ids[accesses] = len(self._sets)
            self._sets.append(accesses)
        return number

    def _forget(self) -> None:
        """Drops the sets that no cell refers to."""
        self._sets = [self._sets[number] for number in self._cells.renumber()]
        self._ids = {accesses: i for i, accesses in enumerate(self._sets)}
        alive = {access for accesses in self._sets for access in accesses}
        self._latest = {a: x for a, x in self._latest.items() if x in alive}
        # Renumbering visits all cells, so it has to be rare where they are many.
        cells = self._cells.layers[0].size
        self._limit = max(_FEWEST_SETS, 2 * len(self._sets), cells // 8)


class _Check:
    """A new access, to be compared with earlier ones."""

    __slots__ = ("_clock", "_fence", "_new", "_threads_too")

    def __init__(self, new: Access, clock: Clock, fence: Fence, threads_too: bool):
        self._new = new
        self._clock = clock
        self._fence = fence
        self._threads_too = threads_too

    def conflict(self, accesses: Accesses) -> Access | None:
        """Returns the one that conflicts, or None."""
        clock = self._clock
        if not self._new.by_copy and all(old.known_to(clock) for old in accesses):
            return None
        unordered = [old for old in accesses if not self._ordered(old)]
        if any(old.gradual is not None for old in unordered):
            accesses = self._in_effect(accesses)
            unordered = [old for old in accesses if not self._ordered(old)]
        if not unordered:
            return None
        # Of writers of the same values it suffices to see one. Unless threads are
        # compared with threads, several writers may have stored different values.
        if (
            self._threads_too
            and not self._new.writes
            and len(unordered) < len(accesses)
            and not any(old.atomic for old in unordered)
        ):
            return None
        return unordered[0]

    def is_alike(self, accesses: Accesses) -> bool:
        """True when all that is not ordered is of threads as the new store is.

        Or, as it is, plain stores of copies.
        """
        return not any(
            old.by_copy != self._new.by_copy
            or (old.by_copy and (old.atomic or not old.writes))
            for old in self._in_effect(accesses)
            if not self._ordered(old)
        )

    def _in_effect(self, accesses: Accesses) -> Accesses:
        """Replaces each write of which no part meets the new access by earlier ones."""
        new, found = self._new, []
        for old in accesses:
            if old.gradual is None or old.gradual.reaches(new.box):
                found.append(old)
                continue
            found += [
                earlier
                for earlier in old.gradual.earlier
                if (earlier.writes or new.writes) and overlap(earlier.box, new.box)
            ]
        return tuple(found)

    def _ordered(self, old: Access) -> bool:
        new = self._new
        if ordering.both_atomic(old, new):
            return True
        compared = self._threads_too or (
            old.viewer is new.viewer and (old.by_copy or new.by_copy)
        )
        if not compared:
            return True
        if not old.precedes(new, self._clock):
            return False
        return not new.by_proxy or old.is_fenced_for(
            self._clock, self._fence, new.writes
        )
