# SPDX-License-Identifier: Apache-2.0
"""Unions in SMEM and TMEM: arrays that are the same bytes.

Each member has elements of its own, in its logical shape. The bytes between them are
exchanged when another member is accessed than before: what has changed in the one is
stored where its layout says, and the other loads what lies there. An access to a member
is compared with the accesses to those elements of the others that share a byte with it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from pallas_gpu.emulator.engine.boxes import boxes_of
from pallas_gpu.emulator.engine.history import History
from pallas_gpu.emulator.engine.memory import Memory
from pallas_gpu.emulator.engine.ordering import Access, Box, Clock
from pallas_gpu.emulator.engine.poison import Origin
from pallas_gpu.emulator.gpu.smem import SharedArray
from pallas_gpu.emulator.gpu.tensor_cores.tmem import TensorArray
from pallas_gpu.layouts import SmemLayout, TmemLayout
from pallas_gpu.layouts.tmem.layout import COLUMN_BITS, LANES

# The poison of fresh memory; see `engine/poison.py`.
_FRESH = 0xA5
_NOBODY = -1
_WORD_BYTES = COLUMN_BITS // 8
# A column of TMEM has a word in each lane.
COLUMN_BYTES = LANES * _WORD_BYTES


class Addresses(NamedTuple):
    """The bytes of each element of a member, in row-major order.

    Attributes:
      own: [elements, bytes].
      shift: of elements of less than a byte the position of the lowest bit there.
      copies: further places with the same element, [elements, copies, bytes].
      spare: bytes that a store overwrites with no value, [elements, bytes].
    """

    own: np.ndarray
    shift: np.ndarray | None
    copies: np.ndarray
    spare: np.ndarray

    @property
    def touched(self) -> np.ndarray:
        """All bytes that accesses to each element touch, [elements, bytes]."""
        copies = self.copies.reshape(len(self.own), -1)
        return np.concatenate([self.own, copies, self.spare], axis=1)


@dataclasses.dataclass(frozen=True)
class Columns:
    """How an array is stored in TMEM, column by column.

    Attributes:
      layout: of its last two dimensions.
      shape: of the array.
      itemsize_bits: of an element.
    """

    layout: TmemLayout
    shape: tuple[int, ...]
    itemsize_bits: int

    @property
    def size_bytes(self) -> int:
        """Size of its columns."""
        matrices = math.prod(self.shape[:-2])
        return matrices * self.layout.columns(self.shape[-2:]) * COLUMN_BYTES

    def addresses(self) -> Addresses:
        """Returns the places of all elements."""
        lanes, columns, positions = self.layout.places(self.shape[-2:])
        width = self.layout.columns(self.shape[-2:])
        matrices = np.arange(math.prod(self.shape[:-2]))[:, None, None]
        words = (matrices * width + columns)[..., None] * LANES + lanes
        words = words.reshape(-1, lanes.shape[-1]) * _WORD_BYTES
        bits = np.broadcast_to(
            positions * self.itemsize_bits, (len(matrices), *columns.shape)
        )
        first = words + bits.reshape(-1, 1) // 8
        size = max(self.itemsize_bits // 8, 1)
        places = first[..., None] + np.arange(size)
        shift = None
        if self.itemsize_bits < 8:
            shift = (bits.reshape(-1) % 8).astype(np.uint8)
        # A column with one narrow element is stored as a word.
        alone = size if self.layout.packing == 1 else _WORD_BYTES
        spare = words[..., None] + np.arange(alone, _WORD_BYTES)
        return Addresses(
            places[:, 0], shift, places[:, 1:], spare.reshape(len(words), -1)
        )


# How a member is stored.
Placement = SmemLayout | Columns


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
        self.members: list[Member] = []

    def add(self, member: Member, start: int) -> None:
        """Adds an array at an offset in bytes."""
        member.join(self, start)
        self.members.append(member)


class Member(Memory):
    """An array of a union.

    Attributes:
      placement: how it is stored.
      number: in the union.
      is_inferred: whether the compiler chooses its layout, so that its bytes mean
        nothing to other members.
    """

    placement: Placement
    is_inferred = False
    # Until it joins a union its elements are its own.
    _is_current = True

    def join(self, union: Union, start: int) -> None:
        """Makes the array a member of a union, whose bytes it has from now on."""
        self._union, self._start = union, start
        self.number = len(union.members)
        self._addresses = _addresses(self.placement)
        self.history = UnionHistory(self)
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
    def neighbours(self) -> list[Member]:
        """The members that share a byte with it."""
        return [
            other
            for other in self._union.members
            if other is not self
            and other._start < self._start + self.placement.size_bytes
            and self._start < other._start + other.placement.size_bytes
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
        union, at = self._union, self._start + self._addresses.own
        raw, written = union.data[at], union.written[at]
        known = _per_element(np.logical_and, written)
        known &= ~_per_element(np.logical_or, self._is_foreign())
        if self._addresses.copies.size:
            known &= self._copies_agree()
        if self._addresses.shift is not None:
            mask = np.uint8((1 << self.placement.itemsize_bits) - 1)
            raw = (raw >> self._addresses.shift[:, None]) & mask
        dtype, shape = self._data.dtype, self._data.shape
        if dtype == np.bool_:
            raw = (raw != 0).astype(np.uint8)
        self._data = np.ascontiguousarray(raw).view(dtype).reshape(shape)
        self._written = None if known.all() else known.reshape(shape)
        self._before = self._raw().copy(), known.copy()

    def _copies_agree(self) -> np.ndarray:
        """Returns of which elements all copies are the same, [elements].

        Each is read by other lanes, so that the element has no value if they differ.
        """
        union, own = self._union, self._start + self._addresses.own
        copies = self._start + self._addresses.copies
        same = union.written[copies].all(axis=(1, 2))
        return same & (union.data[copies] == union.data[own][:, None]).all(axis=(1, 2))

    def _store(self) -> None:
        """Stores the elements that have changed since they were loaded."""
        union = self._union
        raw, known = self._raw(), self._known()
        changed = _per_element(np.logical_or, raw != self._before[0])
        changed |= known != self._before[1]
        places = self._addresses
        copies = places.copies.shape[1]
        for own in (places.own, *(places.copies[:, i] for i in range(copies))):
            at = self._start + own[changed]
            if places.shift is None:
                union.data[at] = raw[changed]
                union.written[at] = known[changed][:, None]
            else:
                self._store_parts(own[:, 0], raw[:, 0], known, changed)
            union.writer[at] = self.number
        union.written[self._start + places.spare[changed]] = False

    def _store_parts(
        self,
        own: np.ndarray,
        codes: np.ndarray,
        known: np.ndarray,
        changed: np.ndarray,
    ) -> None:
        """Stores elements that share bytes, which have a value if all of them have."""
        assert self._addresses.shift is not None
        union, at = self._union, self._start + own
        shift = self._addresses.shift[changed]
        mask = np.uint8((1 << self.placement.itemsize_bits) - 1)
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
        writer = union.writer[self._start + self._addresses.own]
        others = (writer != self.number) & (writer != _NOBODY)
        return others & (self.is_inferred | inferred[np.maximum(writer, 0)])

    def origin_of_missing(
        self, element: Sequence[int], count: int, where: str | None
    ) -> Origin:
        flat = int(np.ravel_multi_index(tuple(element), self.shape))
        own = self._addresses.own[flat]
        if not self._is_foreign()[flat].any():
            if not self._union.written[self._start + own].all():
                return super().origin_of_missing(element, count, where)
            return Origin(
                f"{self.name} is read where other members of its union left different "
                "values in the copies of an element",
                f"element {list(element)}",
                f"write {self.name} itself, or the same value in the lanes of all "
                f"{len(self._addresses.copies[flat]) + 1} copies",
                where,
            )
        writer = int(self._union.writer[self._start + own].max())
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

    def shared_boxes(self, box: Box, other: Member) -> tuple[Box, ...]:
        """Returns the elements of another member that share a byte with a box."""
        return _shared_boxes(
            (self.placement, self._start), box, (other.placement, other._start)
        )


class UnionMember(Member, SharedArray):
    """An array of a union in SMEM."""

    def __init__(self, *array: Any, is_inferred: bool):
        super().__init__(*array)
        self.placement = self.layout
        self.is_inferred = is_inferred


def _per_element(combine: np.ufunc, of_bytes: np.ndarray) -> np.ndarray:
    """Returns what is true of all bytes, or of any, [elements].

    NumPy reduces a short axis many times slower than it combines its columns.
    """
    return functools.reduce(combine, of_bytes.T)


class TensorMember(Member, TensorArray):
    """An array of a union in TMEM."""

    def __init__(self, *array: Any, placement: Columns):
        super().__init__(*array)
        self.placement = placement


class UnionHistory(History):
    """The accesses to a member, compared with those to its neighbours."""

    __slots__ = ("_member",)

    def __init__(self, member: Member):
        super().__init__(member.shape, member.fence)
        self._member = member

    @property
    def is_empty(self) -> bool:
        return super().is_empty and not any(True for _ in self._neighbours())

    def _neighbours(self) -> Iterator[tuple[Member, UnionHistory]]:
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
        record: bool = True, unchanged: Any = None, hint: Any = None,
    ) -> None:  # fmt: skip
        for other, history in self._neighbours():
            if not history.may_conflict(new, clock, threads_too):
                continue
            # Nothing is recorded, so one object does for all boxes.
            theirs, text = copy.copy(new), f"{other.name}, in a union with {name},"
            for theirs.box in self._member.shared_boxes(new.box, other):
                History.access(
                    history,
                    theirs,
                    clock,
                    text,
                    threads_too=threads_too,
                    record=False,
                    hint=hint,
                )
        super().access(
            new, clock, name, threads_too=threads_too, record=record,
            unchanged=unchanged, hint=hint,
        )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _addresses(layout: Placement) -> Addresses:
    """Returns the bytes of each element."""
    if isinstance(layout, Columns):
        return layout.addresses()
    axes = np.indices(layout.shape).reshape(len(layout.shape), math.prod(layout.shape))
    coordinates = np.moveaxis(axes, 0, -1)
    first = layout.byte_offsets(coordinates)
    size = layout.itemsize_bits // 8
    own, shift = first[:, None] + np.arange(max(size, 1)), None
    if not size:
        shift = (layout.linear_bit_offset(coordinates) % 8).astype(np.uint8)
    return Addresses(own, shift, own[:, None][:, :0], own[:, :0])


@functools.lru_cache(maxsize=1024)
def _shared_boxes(
    one: tuple[Placement, int], box: Box, other: tuple[Placement, int]
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
    used[start + _addresses(layout).touched[chosen.reshape(-1)]] = True
    shared = used[their_start + _addresses(theirs).touched].any(axis=1)
    return tuple(boxes_of(np.flatnonzero(shared), theirs.shape))
