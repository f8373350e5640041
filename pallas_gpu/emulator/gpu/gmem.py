# SPDX-License-Identifier: Apache-2.0
"""Global memory: arrays that all CTAs of a device share, with last accesses per
element.

The accesses of one cluster are compared with each other through the array's history.
Other clusters are many, so for them each element stores its last writer and its readers
since.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from pallas_gpu import errors
from pallas_gpu.emulator.engine import ordering
from pallas_gpu.emulator.engine.memory import Memory

# Below and above all numbers of clusters, so that the maximum over a part suffices.
_NONE = -1
_SEVERAL = np.iinfo(np.int32).max


class GlobalArray(Memory):
    """An array in GMEM, as accessed by one cluster.

    The views of all clusters share elements, masks and owners; each has its own
    history.

    Attributes:
      owners: last accesses to each element, for a result under race detection.
    """

    __slots__ = ("owners",)

    def __init__(
        self,
        name: str,
        data: np.ndarray,
        written: np.ndarray | None,
        read_only: bool = False,
        owners: Owners | None = None,
    ):
        super().__init__(name, data, written, read_only)
        self.owners = owners

    def at(self, index: tuple[int, ...]) -> GlobalArray:
        """Returns the part at leading indices, as a view."""
        if not index:
            return self
        # The ellipsis keeps a view also where all axes are indexed.
        key: Any = (*index, ...)
        written = None if self.written is None else self.written[key]
        owners = None if self.owners is None else self.owners.at(key)
        return GlobalArray(self.name, self.data[key], written, self.read_only, owners)

    def seen_by(self, number: int, name: str) -> GlobalArray:
        """Returns the array as accessed by a cluster.

        Args:
          number: the cluster's own number.
          name: the cluster, for messages.
        """
        if self.read_only:
            return self
        view = GlobalArray(self.name, self.data, self.written, False, self.owners)
        if self.owners is not None:
            view.watcher = OwnersWatcher(self.owners, number, name)
        return view


class Owners:
    """The last writer of each element of an array, and its readers since.

    Attributes:
      writer: number of the cluster that wrote an element last, or `_NONE`.
      write: index in `writes` of that write.
      reader: number of the cluster that has read an element since, `_NONE` or
        `_SEVERAL`.
      writes: (cluster's name, access).
      reads: for each cluster its reads with which a write may conflict.
    """

    def __init__(self, shape: tuple[int, ...]):
        self.writer = np.full(shape, _NONE, np.int32)
        self.write = np.zeros(shape, np.int32)
        self.reader = np.full(shape, _NONE, np.int32)
        self.writes: list[tuple[str, ordering.Access]] = []
        self.reads: dict[int, tuple[str, list[ordering.Access]]] = {}

    def at(self, key: Any) -> Owners:
        """Returns the owners of a part; writes of all parts share one list."""
        part = Owners(())
        part.writer, part.write = self.writer[key], self.write[key]
        part.reader, part.writes = self.reader[key], self.writes
        return part


class OwnersWatcher:
    """Compares the accesses of one cluster to an array with those of other clusters."""

    def __init__(self, owners: Owners, number: int, name: str):
        self._owners = owners
        self._number = number
        self._name = name
        self._latest: ordering.Access | None = None

    def access(self, new: ordering.Access, clock: ordering.Clock, name: str) -> None:
        """Checks an access and records it.

        Raises:
          RaceError: another cluster used an element, and the accesses have no order.
        """
        key = tuple([slice(low, max(low, high)) for low, high in new.box])
        self._check_writes(new, clock, name, key)
        if not new.writes:
            self._record_read(new, key)
            return
        self._check_reads(new, clock, name, key)
        self._record_write(new, key)

    def _check_writes(
        self, new: ordering.Access, clock: ordering.Clock, name: str, key: Any
    ) -> None:
        foreign = self._foreign(self._owners.writer[key])
        if foreign is None:
            return
        write = self._owners.write[key]
        for index in np.unique(write[foreign]):
            who, old = self._owners.writes[index]
            if not old.known_to(clock):
                where = foreign & (write == index)
                raise self._race(name, _first(where, new.box), (who, old), new)

    def _check_reads(
        self, new: ordering.Access, clock: ordering.Clock, name: str, key: Any
    ) -> None:
        if self._foreign(self._owners.reader[key]) is None:
            return
        for number, (who, reads) in self._owners.reads.items():
            if number == self._number:
                continue
            for old in reads:
                if ordering.overlap(old.box, new.box) and not old.known_to(clock):
                    element = [max(a, b) for (a, _), (b, _) in zip(
                        old.box, new.box, strict=True)]  # fmt: skip
                    raise self._race(name, element, (who, old), new)

    def _foreign(self, users: np.ndarray) -> np.ndarray | None:
        """Returns which elements another cluster used; None for no element."""
        if users.size == 0 or users.max() == _NONE:
            return None
        foreign = (users != _NONE) & (users != self._number)
        return foreign if foreign.any() else None

    def _record_read(self, new: ordering.Access, key: Any) -> None:
        owners = self._owners
        part = owners.reader[key]
        others = (part != _NONE) & (part != self._number)
        part[...] = np.where(others, _SEVERAL, self._number)
        _, reads = owners.reads.setdefault(self._number, (self._name, []))
        if reads and ordering.extend(reads[-1], new):
            return
        reads[:] = [
            old
            for old in reads
            if old.actor != new.actor or not ordering.inside(old.box, new.box)
        ]
        # A copy: the history, which has the access too, extends its own.
        reads.append(dataclasses.replace(new))

    def _record_write(self, new: ordering.Access, key: Any) -> None:
        owners, latest = self._owners, self._latest
        # Consecutive elements written in a loop are merged into one write.
        if latest is None or (latest.actor, latest.time, latest.where) != (
            new.actor, new.time, new.where
        ):  # fmt: skip
            owners.writes.append((self._name, new))
            self._latest, self._index = new, len(owners.writes) - 1
        owners.writer[key] = self._number
        owners.write[key] = self._index
        # An access ordered after this write is ordered after the reads before it.
        reader = owners.reader[key]
        if reader.size and reader.max() != _NONE:
            reader[...] = _NONE

    def _race(
        self,
        name: str,
        element: list[int],
        earlier: tuple[str, ordering.Access],
        new: ordering.Access,
    ) -> errors.RaceError:
        who, old = earlier
        did, does = ("written" if a.writes else "read" for a in (old, new))
        return errors.RaceError(
            f"{name} is {does} by one CTA and {did} by another",
            expected="each element of a result to be accessed by one CTA, or an order "
            "between the accesses: CTAs run in any order, also at the same time",
            got=f"element {element}, {did} by {who} at {old.where} and {does} by "
            f"{self._name}",
            hint="let each CTA write a separate part of the result",
        )


def _first(where: np.ndarray, box: ordering.Box) -> list[int]:
    index = np.unravel_index(int(np.argmax(where)), where.shape)
    return [int(i) + low for i, (low, _) in zip(index, box, strict=True)]
