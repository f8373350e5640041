# SPDX-License-Identifier: Apache-2.0
"""Arrays in another shape or as another type: the same bytes, mask and history.

An access to such an array is compared with those to the elements of the array that was
declared, which share a byte with it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np

from pallas_gpu import errors
from pallas_gpu.emulator.engine.boxes import boxes_of
from pallas_gpu.emulator.engine.history import History
from pallas_gpu.emulator.engine.memory import Memory, Region
from pallas_gpu.emulator.engine.ordering import Access, Box, Clock
from pallas_gpu.emulator.engine.poison import Origin
from pallas_gpu.layouts.window import row_major_strides


class ReinterpretedArray(Memory):
    """An array in another shape or as another type.

    Attributes:
      base: the array as it was declared.
    """

    def __init__(self, base: Memory, shape: tuple[int, ...], dtype: Any):
        self.base, self._shape = base, shape
        self._dtype = base.data.dtype if dtype is None else np.dtype(dtype)
        self.name, self.read_only = base.name, base.read_only
        self.viewer, self.earlier = base.viewer, base.earlier
        self.admits_poison, self.fence = base.admits_poison, base.fence
        self.history = _History(self)
        if not base.data.flags.c_contiguous and not base.read_only:
            raise errors.InternalError(f"{base.name} is not stored in row-major order")

    def of(self, base: Any) -> Memory:
        """Returns another array of the base's type in this shape and as this type."""
        return base.reinterpreted(self._shape, self._dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def identity(self) -> Hashable:
        return self.base.identity

    @property
    def data(self) -> np.ndarray:  # type: ignore[override]
        """The elements."""
        return self.base.data.reshape(-1).view(self._dtype).reshape(self._shape)

    @property
    def _ratio(self) -> tuple[int, int]:
        """Elements of this array, and of the base, of the same bytes."""
        own, theirs = self._dtype.itemsize, self.base.data.dtype.itemsize
        return max(theirs // own, 1), max(own // theirs, 1)

    @property
    def written(self) -> np.ndarray | None:  # type: ignore[override]
        """True where an element has a value, as a copy; None when all have."""
        theirs = self.base.written
        if theirs is None:
            return None
        own, parts = self._ratio
        flat = theirs.reshape(-1, parts).all(axis=1)
        return np.repeat(flat, own).reshape(self._shape)

    def mark_written(self, key: tuple[Any, ...], value: Any = True) -> None:
        mask = self.written
        if mask is None:
            return
        mask[key] = value
        # A wider element of which a part was stored counts as stored.
        self.base.mark_written((...,), self._of_base(mask))

    def mark_poisoned(self, region: Region, mask: np.ndarray, origin: Origin) -> None:
        chosen = np.zeros(self._shape, np.bool_)
        region.view(chosen)[mask] = True
        theirs = self._of_base(chosen)
        for box in self.boxes(region.box()):
            place = tuple(slice(low, high) for low, high in box)
            part = self.base.whole().window.slice(
                [low for low, _ in box], [high - low for low, high in box]
            )
            self.base.mark_poisoned(Region(self.base, part), theirs[place], origin)

    def _of_base(self, mask: np.ndarray) -> np.ndarray:
        """Returns which elements of the base share bytes with some elements."""
        own, parts = self._ratio
        flat = mask.reshape(-1, own).any(axis=1)
        return np.repeat(flat, parts).reshape(self.base.shape)

    def origin_of_missing(
        self, element: Sequence[int], count: int, where: str | None
    ) -> Origin:
        own, parts = self._ratio
        flat = int(np.ravel_multi_index(tuple(element), self._shape)) * parts // own
        theirs = [int(i) for i in np.unravel_index(flat, self.base.shape)]
        return self.base.origin_of_missing(theirs, count, where)

    def boxes(self, box: Box) -> tuple[Box, ...]:
        """Returns boxes of the base that share bytes with a box."""
        return _boxes(self._shape, box, self.base.shape, self._ratio)


@functools.lru_cache(maxsize=4096)
def _boxes(
    shape: tuple[int, ...], box: Box, base: tuple[int, ...], ratio: tuple[int, int]
) -> tuple[Box, ...]:
    own, parts = ratio
    flat = np.zeros(1, np.int64)
    for (low, high), stride in zip(box, row_major_strides(shape), strict=True):
        line = np.arange(low, high, dtype=np.int64) * stride
        flat = (flat[:, None] + line).reshape(-1)
    theirs = (flat[:, None] * parts + np.arange(parts)).reshape(-1) // own
    return tuple(boxes_of(np.unique(theirs), base))


class _History(History):
    """The accesses to the base, by boxes of another shape."""

    __slots__ = ("_array",)

    def __init__(self, array: ReinterpretedArray):
        self._array = array

    @property
    def is_empty(self) -> bool:
        return self._array.base.history.is_empty

    def live(self) -> dict[Access, None]:
        return self._array.base.history.live()

    def present(self, box: Box) -> list[Access]:
        return list(self._theirs(box))

    def _theirs(self, box: Box) -> Iterator[Access]:
        for theirs in self._array.boxes(box):
            yield from self._array.base.history.present(theirs)

    def access(
        self, new: Access, clock: Clock, name: str, *, threads_too: bool = True,
        record: bool = True, unchanged: Any = None, hint: Any = None,
    ) -> None:  # fmt: skip
        if new.gradual is not None:
            raise errors.InternalError("A reinterpreted array is written by parts")
        # A box of the base has no counterpart here, so all elements are compared.
        same = None if unchanged is None else lambda _: unchanged(new.box)
        for box in self._array.boxes(new.box):
            self._array.base.history.access(
                dataclasses.replace(new, box=box),
                clock,
                name,
                threads_too=threads_too,
                record=record,
                unchanged=same,
                hint=hint,
            )
