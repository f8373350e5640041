# SPDX-License-Identifier: Apache-2.0
"""Unions in SMEM: arrays that are the same bytes.

Each member has elements of its own, in its logical shape. The bytes between them are
exchanged when another member is accessed than before: what has changed in the one is
stored where its layout says, and the other loads what lies there. An access to a member
is compared with the accesses to those elements of the others that share a byte with it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pallas_gpu.emulator.engine.boxes import boxes_of
from pallas_gpu.emulator.engine.history import History
from pallas_gpu.emulator.engine.ordering import Access, Box, Clock
from pallas_gpu.emulator.engine.poison import Origin
from pallas_gpu.emulator.gpu.machine.cta import Cta
from pallas_gpu.emulator.gpu.smem import SharedArray
from pallas_gpu.layouts import SmemLayout

# The poison of fresh memory; see `engine/poison.py`.
_FRESH = 0xA5
_NOBODY = -1


class Union:
    """The memory of one union in a CTA.

    Args:
      size_bytes: of the longest alternative.
      zeros: whether it contains zeros at first, instead of poison.

    Attributes:
      data: the bytes.
      written: which of them have a value.
      writer: number of the member that has written each byte last.
      members: its arrays.
    """

    def __init__(self, size_bytes: int, zeros: bool):
        self.data = np.full(size_bytes, 0 if zeros else _FRESH, np.uint8)
        self.written = np.full(size_bytes, zeros)
        self.writer = np.full(size_bytes, _NOBODY, np.int32)
        self.members: list[UnionMember] = []

    def add(self, member: UnionMember, start: int) -> None:
        """Adds an array at an offset in bytes."""
        member.join(self, start)
        self.members.append(member)


class UnionMember(SharedArray):
    """An array of a union.

    Attributes:
      number: in the union.
      is_inferred: whether the compiler chooses its layout, so that its bytes mean
        nothing to other members.
    """

    __slots__ = (
        "_before", "_bytes", "_data", "_is_current", "_shift", "_start", "_union",
        "_written", "is_inferred", "number",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        data: np.ndarray,
        written: np.ndarray | None,
        place: Any,
        layout: SmemLayout,
        cta: Cta,
        is_inferred: bool,
    ):
        self._is_current = True
        super().__init__(name, data, written, place, layout, cta)
        self.is_inferred = is_inferred

    def join(self, union: Union, start: int) -> None:
        """Makes the array a member of a union, whose bytes it has from now on."""
        self._union, self._start = union, start
        self.number = len(union.members)
        self._bytes, self._shift = _addresses(self.layout)
        self.history = UnionHistory(self)
        self._load()
        self._is_current = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self._data.shape

    # --- contents ---------------------------------------------------------------------

    @property
    def data(self) -> np.ndarray:  # type: ignore[override]
        """The elements."""
        self._become_current()
        return self._data

    @data.setter
    def data(self, value: np.ndarray) -> None:
        self._data = value

    @property
    def written(self) -> np.ndarray | None:  # type: ignore[override]
        """True where an element has a value; None when all have."""
        self._become_current()
        return self._written

    @written.setter
    def written(self, value: np.ndarray | None) -> None:
        self._written = value

    @property
    def neighbours(self) -> list[UnionMember]:
        """The members that share a byte with it."""
        return [
            other
            for other in self._union.members
            if other is not self
            and other._start < self._start + self.layout.size_bytes
            and self._start < other._start + other.layout.size_bytes
        ]

    def _become_current(self) -> None:
        """Loads the elements, if another member may have changed their bytes."""
        if self._is_current:
            return
        for other in self.neighbours:
            if other._is_current:
                other._store()
                other._is_current = False
        self._load()
        self._is_current = True

    def _load(self) -> None:
        union, at = self._union, self._start + self._bytes
        raw, written = union.data[at], union.written[at]
        known = written.all(axis=1)
        known &= ~self._is_foreign().any(axis=1)
        if self._shift is not None:
            mask = np.uint8((1 << self.layout.itemsize_bits) - 1)
            raw = (raw >> self._shift[:, None]) & mask
        dtype, shape = self._data.dtype, self._data.shape
        if dtype == np.bool_:
            raw = (raw != 0).astype(np.uint8)
        self._data = np.ascontiguousarray(raw).view(dtype).reshape(shape)
        self._written = None if known.all() else known.reshape(shape)
        self._before = self._raw().copy(), known.copy()

    def _store(self) -> None:
        """Stores the elements that have changed since they were loaded."""
        union = self._union
        raw, known = self._raw(), self._known()
        changed = (raw != self._before[0]).any(axis=1) | (known != self._before[1])
        at = self._start + self._bytes[changed]
        if self._shift is None:
            union.data[at] = raw[changed]
            union.written[at] = known[changed][:, None]
        else:
            self._store_parts(raw[:, 0], known, changed)
        union.writer[at] = self.number

    def _store_parts(
        self, codes: np.ndarray, known: np.ndarray, changed: np.ndarray
    ) -> None:
        """Stores elements that share bytes, which have a value if all of them have."""
        assert self._shift is not None
        union, at = self._union, self._start + self._bytes[:, 0]
        shift = self._shift[changed]
        mask = np.uint8((1 << self.layout.itemsize_bits) - 1)
        np.bitwise_and.at(union.data, at[changed], ~(mask << shift))
        np.bitwise_or.at(union.data, at[changed], codes[changed] << shift)
        union.written[at[changed]] = True
        union.written[np.intersect1d(at[changed], at[~known])] = False

    def _raw(self) -> np.ndarray:
        """Returns the bytes of each element, [elements, bytes]."""
        data = np.ascontiguousarray(self._data)
        return data.reshape(-1).view(np.uint8).reshape(self._data.size, -1)

    def _known(self) -> np.ndarray:
        if self._written is None:
            return np.ones(self._data.size, np.bool_)
        return self._written.reshape(-1)

    def _is_foreign(self) -> np.ndarray:
        """Returns which bytes mean nothing to the array, [elements, bytes].

        Those that another member has written, if the layout of either is inferred.
        """
        union = self._union
        inferred = np.array([m.is_inferred for m in union.members] + [False])
        writer = union.writer[self._start + self._bytes]
        others = (writer != self.number) & (writer != _NOBODY)
        return others & (self.is_inferred | inferred[np.maximum(writer, 0)])

    def origin_of_missing(
        self, element: Sequence[int], count: int, where: str | None
    ) -> Origin:
        flat = int(np.ravel_multi_index(tuple(element), self.shape))
        if not self._is_foreign()[flat].any():
            return super().origin_of_missing(element, count, where)
        writer = int(self._union.writer[self._start + self._bytes[flat]].max())
        other = self._union.members[writer]
        free = self if self.is_inferred else other
        return Origin(
            f"{self.name} is read where {other.name} has been written, a member of the "
            f"same union, and the layout of {free.name} is inferred",
            f"element {list(element)}",
            f"declare how {free.name} is stored, with transforms; or read what was "
            "written through the same member",
            where,
        )

    # --- accesses ---------------------------------------------------------------------

    def shared_boxes(self, box: Box, other: UnionMember) -> tuple[Box, ...]:
        """Returns the elements of another member that share a byte with a box."""
        return _shared_boxes(
            (self.layout, self._start), box, (other.layout, other._start)
        )


class UnionHistory(History):
    """The accesses to a member, compared with those to its neighbours."""

    __slots__ = ("_member",)

    def __init__(self, member: UnionMember):
        super().__init__(member.shape, member.fence)
        self._member = member

    @property
    def is_empty(self) -> bool:
        return super().is_empty and not any(True for _ in self._neighbours())

    def _neighbours(self) -> Iterator[tuple[UnionMember, UnionHistory]]:
        for other in self._member.neighbours:
            history = other.history
            if isinstance(history, UnionHistory) and len(history._sets) > 1:
                yield other, history

    def present(self, box: Box) -> list[Access]:
        found = super().present(box)
        for other, history in self._neighbours():
            for theirs in self._member.shared_boxes(box, other):
                found += [
                    dataclasses.replace(access, box=box)
                    for access in History.present(history, theirs)
                ]
        return found

    def access(
        self, new: Access, clock: Clock, name: str, *, threads_too: bool = True,
        record: bool = True, unchanged: Any = None,
    ) -> None:  # fmt: skip
        for other, history in self._neighbours():
            for box in self._member.shared_boxes(new.box, other):
                History.access(
                    history,
                    dataclasses.replace(new, box=box),
                    clock,
                    f"{other.name}, in a union with {name},",
                    threads_too=threads_too,
                    record=False,
                )
        super().access(
            new, clock, name, threads_too=threads_too, record=record,
            unchanged=unchanged,
        )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _addresses(layout: SmemLayout) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the bytes of each element, [elements, bytes], in row-major order.

    Of elements of less than a byte also the position of the lowest bit there.
    """
    axes = np.indices(layout.shape).reshape(len(layout.shape), math.prod(layout.shape))
    coordinates = np.moveaxis(axes, 0, -1)
    first = layout.byte_offsets(coordinates)
    size = layout.itemsize_bits // 8
    if size:
        return first[:, None] + np.arange(size), None
    shift = layout.linear_bit_offset(coordinates) % 8
    return first[:, None], shift.astype(np.uint8)


@functools.lru_cache(maxsize=1024)
def _shared_boxes(
    one: tuple[SmemLayout, int], box: Box, other: tuple[SmemLayout, int]
) -> tuple[Box, ...]:
    """Returns the elements of the other array that share a byte with a box of one.

    Args:
      one, other: how each array is stored, and its start in bytes.
      box: elements of one.
    """
    (layout, start), (theirs, their_start) = one, other
    chosen = np.zeros(layout.shape, np.bool_)
    chosen[tuple(slice(low, high) for low, high in box)] = True
    used = np.zeros(
        max(start + layout.size_bytes, their_start + theirs.size_bytes), np.bool_
    )
    used[start + _addresses(layout)[0][chosen.reshape(-1)]] = True
    shared = used[their_start + _addresses(theirs)[0]].any(axis=1)
    return tuple(boxes_of(np.flatnonzero(shared), theirs.shape))
