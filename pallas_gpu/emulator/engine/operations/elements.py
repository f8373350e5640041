# SPDX-License-Identifier: Apache-2.0
"""Elements of a memory that an access names one by one, by indices on every axis."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pallas_gpu import errors
from pallas_gpu.emulator.engine.boxes import boxes_of
from pallas_gpu.emulator.engine.execution import report
from pallas_gpu.emulator.engine.memory import Region
from pallas_gpu.emulator.engine.ordering import Box
from pallas_gpu.emulator.engine.poison import Origin, Poisoned
from pallas_gpu.layouts.window import Window


class Elements:
    """The elements of a region that an access names.

    Args:
      region: the window that the indices refer to.
      view_shape: a shape in which its elements are viewed first; None for its own.
      dtype: the type as which they are viewed; of another width only as bytes that are
        adjacent.
      indices: for each axis an integer, or an array of `shape`.
      shape: of the access.
      mask: where an element is accessed; None for everywhere.
      verb: such as `read`, for messages.
      masked: how elements are masked, for messages.
      lenient: whether what is out of bounds is silently not accessed.

    Attributes:
      shape: of the access.
      dtype: of the values.
      active: where an element is accessed, `shape`.
      lost: where an element is not accessed because it is out of bounds, `shape`.
      flat: positions of the accessed elements among the memory's, [accesses, parts]:
        an access to a wider element has several.
      first_byte: of each accessed element in the memory's, which may be wider.
    """

    def __init__(
        self,
        region: Region,
        view_shape: tuple[int, ...] | None,
        dtype: Any,
        indices: Sequence[Any],
        shape: tuple[int, ...],
        mask: Any,
        verb: str,
        masked: str = "pass mask=...",
        lenient: bool = False,
    ):
        self.region, self.shape, self.dtype = region, shape, np.dtype(dtype)
        self._masked = masked
        self.active = np.array(
            np.broadcast_to(True if mask is None else np.asarray(mask), shape)
        )
        axes = view_shape if view_shape is not None else region.shape
        full = [np.broadcast_to(np.asarray(index), shape) for index in indices]
        self.lost = self.active & self._outside(full, axes)
        if lenient:
            self.active = self.active & ~self.lost
        elif self.lost.any():
            report(self._out_of_bounds(full, axes, verb))
            self.active = self.active & ~self.lost
        if region.outside() is not None:
            region.require_in_bounds(verb)
            self.active[...] = False
        chosen = [index[self.active].astype(np.int64) for index in full]
        self.flat, self.first_byte = self._positions(
            chosen, axes, view_shape is not None
        )

    @property
    def memory(self) -> Any:
        """The array."""
        return self.region.memory

    def _outside(self, full: list[np.ndarray], axes: tuple[int, ...]) -> np.ndarray:
        outside = [(i < 0) | (i >= n) for i, n in zip(full, axes, strict=True)]
        return functools.reduce(np.logical_or, outside, np.zeros(self.shape, np.bool_))

    def _out_of_bounds(
        self, full: list[np.ndarray], axes: tuple[int, ...], verb: str
    ) -> errors.OutOfBoundsError:
        element = tuple(np.argwhere(self.lost)[0].tolist())
        found = [int(index[element]) for index in full]
        axis = next(
            a
            for a, (i, n) in enumerate(zip(found, axes, strict=True))
            if not 0 <= i < n
        )
        return errors.OutOfBoundsError(
            f"{self.memory.name} is {verb} out of bounds",
            expected=f"indices 0 to {axes[axis] - 1} in dimension {axis} of shape "
            f"{axes}",
            got=f"index {found[axis]} in dimension {axis}"
            + (f", for element {list(element)} of the access" if element else ""),
            hint="check the index, or mask the elements outside: " + self._masked,
        ).about(buffer=self.memory.name, elements=tuple((i, i + 1) for i in found))

    def _positions(
        self, chosen: list[np.ndarray], axes: tuple[int, ...], viewed: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        window, count = self.region.window, int(np.count_nonzero(self.active))
        origin = sum(
            int(start) * stride
            for start, stride in zip(window.starts, window.array_strides, strict=True)
        )
        none = np.zeros(count, np.int64)
        if not viewed:
            strides = [window.array_strides[axis] for axis in window.axes]
            flat = none + origin
            for index, stride in zip(chosen, strides, strict=True):
                flat = flat + index * stride
            return flat[:, None], none
        index = none
        for part, n in zip(chosen, axes, strict=True):
            index = index * n + part
        own, size = self.region.dtype.itemsize, self.dtype.itemsize
        start, first_byte = np.divmod(index * size, own)
        parts = np.arange(max(1, size // own))
        return origin + start[:, None] + parts, first_byte

    # --- what earlier accesses are compared with --------------------------------------

    def boxes(self) -> Iterator[Box]:
        """Yields boxes of the array that contain the accessed elements alone."""
        yield from boxes_of(np.unique(self.flat), self.memory.shape)

    def regions(self) -> Iterator[Region]:
        """As `boxes`, as regions of the array."""
        shape = self.memory.shape
        for box in self.boxes():
            starts = tuple(low for low, _ in box)
            sizes = tuple(high - low for low, high in box)
            yield Region(self.memory, Window.whole(shape).slice(starts, sizes))

    # --- elements ---------------------------------------------------------------------

    def load(self) -> np.ndarray:
        """Returns the accessed elements, [accesses]."""
        data = self.memory.data
        found = data.reshape(-1)[self.flat]
        if self.dtype.itemsize < data.dtype.itemsize:
            raw = np.take_along_axis(found.view(np.uint8), self._bytes(), axis=1)
            return np.ascontiguousarray(raw).view(self.dtype)[:, 0]
        return np.ascontiguousarray(found).view(self.dtype)[:, 0]

    def store(self, values: np.ndarray, data: np.ndarray | None = None) -> None:
        """Stores the values of the accessed elements, [accesses].

        Args:
          values: of the access's type.
          data: instead of the memory's elements, in which they are then not stored.
        """
        array = self.memory.data if data is None else data
        flat = array.reshape(-1)
        values = np.ascontiguousarray(values, self.dtype)[:, None]
        if self.dtype.itemsize >= array.dtype.itemsize:
            flat[self.flat] = values.view(array.dtype)
        else:
            raw = flat.view(np.uint8).reshape(flat.size, array.dtype.itemsize)
            raw[self.flat, self._bytes()] = values.view(np.uint8)
        if data is None and self.memory.written is not None:
            # An element of which a part was stored counts as stored.
            self.memory.written.reshape(-1)[self.flat] = True

    def _bytes(self) -> np.ndarray:
        return self.first_byte[:, None] + np.arange(self.dtype.itemsize)

    def stored(self, values: np.ndarray) -> Proposal:
        """Returns what the memory would hold after a store."""
        return Proposal(self, values)

    def several(self) -> np.ndarray:
        """Returns which accessed elements are named more than once, [accesses]."""
        first = self.flat[:, 0] * self.region.dtype.itemsize + self.first_byte
        _, inverse, counts = np.unique(first, return_inverse=True, return_counts=True)
        return counts[inverse] > 1

    def some(self, chosen: np.ndarray) -> Elements:
        """Returns some of the accessed elements, for loads and stores alone."""
        part = copy.copy(self)
        part.flat, part.first_byte = self.flat[chosen], self.first_byte[chosen]
        return part

    def missing(self) -> np.ndarray | None:
        """Returns which of the accessed elements have no value; None if all have."""
        written = self.memory.written
        if written is None:
            return None
        present = written.reshape(-1)[self.flat].all(axis=1)
        return None if present.all() else ~present

    def origin(self, where: str | None) -> Origin:
        """Returns the origin of the first accessed element without a value."""
        missing = self.missing()
        assert missing is not None
        at = self.flat[int(np.argmax(missing))]
        written = self.memory.written.reshape(-1)[at]
        flat = int(at[int(np.argmin(written))])
        element = [int(i) for i in np.unravel_index(flat, self.memory.shape)]
        return self.memory.origin_of_missing(element, int(missing.sum()), where)

    def spread(self, accessed: np.ndarray, fill: Any) -> np.ndarray:
        """Returns values of the accessed elements in the shape of the access."""
        fill = np.asarray(0 if fill is None else fill).astype(accessed.dtype)
        result = np.array(np.broadcast_to(fill, self.shape))
        result[self.active] = accessed
        return result


class Proposal:
    """What a memory would hold after a store, computed only if somebody asks."""

    def __init__(self, elements: Elements, values: np.ndarray):
        self._elements, self._values = elements, values

    @functools.cached_property
    def _data(self) -> np.ndarray:
        data = self._elements.memory.data.copy()
        self._elements.store(self._values, data)
        return data

    def of(self, region: Region) -> _Part:
        """Returns a part of it, as an array that is made when it is needed."""
        return _Part(self, region)


class _Part:
    def __init__(self, proposal: Proposal, region: Region):
        self._proposal, self._region = proposal, region

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._region.view(self._proposal._data), dtype)


def known(value: Any, where: np.ndarray | None = None) -> Any:
    """Returns a value that must not be poisoned, where that matters.

    An element that is used and poison is reported.
    """
    if not isinstance(value, Poisoned):
        return value
    mask = np.broadcast_to(value.mask, np.shape(value.value))
    used = mask if where is None else np.broadcast_to(mask, where.shape) & where
    if used.any():
        report(value.origin.error())
    return value.value


def require_one_value(found: Elements, values: np.ndarray) -> None:
    """Reports if one store puts different values in one element."""
    several = found.several()
    if not several.any():
        return
    flat = found.flat[:, 0] * found.region.dtype.itemsize + found.first_byte
    chosen = np.flatnonzero(several)
    order = chosen[np.argsort(flat[chosen], kind="stable")]
    bits = np.ascontiguousarray(values[order]).view(f"V{found.dtype.itemsize}")
    same = flat[order[1:]] == flat[order[:-1]]
    for i in np.flatnonzero(same):
        if bits[i].tobytes() != bits[i + 1].tobytes():
            at = np.unravel_index(int(found.flat[order[i], 0]), found.memory.shape)
            error = errors.RaceError(
                f"{found.memory.name} is written with different values at one element",
                expected="indices that name each element once, or equal values",
                got=f"element {[int(x) for x in at]}, stored more than once by one "
                "access",
                hint="combine the values before the store, or by an atomic addition, "
                "or store one of them under a mask",
            )
            report(error.about(rule="repeated-index", buffer=found.memory.name))
            return
