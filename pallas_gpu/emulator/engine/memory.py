# SPDX-License-Identifier: Apache-2.0
"""Memory: arrays that track which elements were written, and windows of them.

An array has the logical shape in the kernel's source. Fresh memory is poison, with a
mask of the elements that have a value.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from pallas_gpu import errors
from pallas_gpu.emulator.engine import ordering
from pallas_gpu.emulator.engine.execution import report
from pallas_gpu.emulator.engine.history import History
from pallas_gpu.emulator.engine.poison import Origin, Poisoned, poison
from pallas_gpu.layouts.window import Window

_CHECK_INDEX = "check the index, or guard the access with plgpu.when"


class Referent:
    """The target of a reference: an array, or another allocation of a family.

    Attributes:
      name: for messages.
      shape: of the array.
    """

    __slots__ = ("name",)

    def __init__(self, name: str):
        self.name = name

    @property
    def shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    def whole(self) -> Region:
        """Returns the region of all elements."""
        return Region(self, Window.whole(self.shape))

    def require_addressable(self, window: Window, verb: str) -> None:
        """Raises for a window that cannot be addressed."""

    def read(self, thread: Any, region: Region) -> Any:
        """Returns the elements of a region of it for an index expression.

        Or a generator, which returns them: reading may take a wait.
        """
        return thread.read(region)

    def write(self, thread: Any, region: Region, value: Any) -> Any:
        """Stores to a region of it for an index expression; or returns a generator."""
        return thread.write(region, value)

    def owned_by(self, owner: int | None) -> Any:
        """Returns the same allocation of another owner; None: those of all owners."""
        raise errors.InternalError(f"{self.name} has one owner")


class Memory(Referent):
    """One array.

    Attributes:
      data: the elements.
      written: True where an element has a value; None when all have.
      history: accesses that later ones may still conflict with.
      read_only: whether the array is an input of the kernel.
      viewer: the group that accesses it, if several groups do.
      fence: what makes threads' stores visible to asynchronous work.
      admits_poison: whether poisoned values may be stored, whose elements then have no
        value.
      earlier: the accesses of work before the run that may still be under way.
      released: what atomic operations have released, by the position of the element.
    """

    __slots__ = (
        "_origins", "admits_poison", "data", "earlier", "history", "read_only",
        "released", "viewer", "written",
    )  # fmt: skip

    fence = ordering.Fence.SMEM
    unwritten_hint = (
        "write it first, or copy to it and wait for the barrier; the body stores the "
        "block of a result: ref[...] = x"
    )

    def __init__(
        self,
        name: str,
        data: np.ndarray,
        written: np.ndarray | None,
        read_only: bool = False,
    ):
        super().__init__(name)
        self.data = data
        self.written = written
        self.read_only = read_only
        self.viewer: ordering.Viewer | None = None
        self.history = History(data.shape, self.fence)
        self.admits_poison = False
        self.earlier: ordering.Earlier | None = None
        self.released: dict[int, dict[ordering.Reach, ordering.Clock]] = {}
        self._origins: dict[ordering.Box, Origin] = {}

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def hint_if_unwritten(self) -> str:
        """What to do about elements that are read before anybody has written them."""
        return self.unwritten_hint

    @property
    def identity(self) -> Hashable:
        """What it has in common with the same array in other runs of a launch."""
        return self.name

    def mark_written(self, key: tuple[Any, ...], value: Any = True) -> None:
        """Records that elements have a value."""
        if self.written is not None:
            self.written[key] = value

    def mark_poisoned(self, region: Region, mask: np.ndarray, origin: Origin) -> None:
        """Records that elements of a region in bounds have no value."""
        if self.written is None:
            self.written = np.ones(self.shape, np.bool_)
        region.view(self.written)[mask] = False
        self._origins.pop(region.box(), None)
        self._origins[region.box()] = origin

    def origin_at(self, element: Sequence[int]) -> Origin | None:
        """Returns the origin of an element that was stored as poison, if it was."""
        for box, origin in reversed(self._origins.items()):
            if all(a <= i < b for i, (a, b) in zip(element, box, strict=True)):
                return origin
        return None

    def origin_of_missing(
        self, element: Sequence[int], count: int, where: str | None
    ) -> Origin:
        """Returns the origin of elements without a value that are read at a line.

        Args:
          element: the first of them.
          count: how many of them are read.
          where: the line.
        """
        stored = self.origin_at(element)
        if stored is not None:
            return stored
        return Origin(
            f"{self.name} is read where nothing has been written",
            f"element {list(element)} without a value"
            + (f", the first of {count}" if count > 1 else ""),
            self.hint_if_unwritten,
            where,
            self.name,
            element,
        )


def fresh_elements(
    shape: tuple[int, ...], dtype: Any, zeros: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns uninitialized elements, and the mask of those with a value."""
    if zeros:
        return np.zeros(shape, dtype), None
    return np.full(shape, poison(dtype), dtype), np.zeros(shape, np.bool_)


class Place:
    """A window with known starts, and what every access derives from it.

    Attributes:
      box: the part inside the array, possibly empty.
      inside: whether that is all of it.
      key: an index for NumPy, which yields a view, also of one element.
      order: the order of the view's axes; None where they are in the array's.
    """

    __slots__ = ("_slices", "box", "inside", "key", "order", "window")

    def __init__(self, window: Window):
        ranges = list(zip(window.starts, window.sizes, strict=True))
        self.window = window
        self.box: ordering.Box = window.box()
        self.inside = self.box == tuple([(start, start + n) for start, n in ranges])
        self.key: tuple[Any, ...] = (
            *[
                slice(start, start + size) if axis in window.axes else start
                for axis, (start, size) in enumerate(ranges)
            ],
            ...,
        )
        self.order = window.order if window.is_transposed else None
        self._slices: dict[Any, Place] = {}

    def slice(self, starts: Sequence[int], sizes: Sequence[int]) -> Place:
        """Returns a slice of the window; see `Window.slice`."""
        part = (*starts, *sizes)
        found = self._slices.get(part)
        if found is None:
            found = self._slices[part] = Place(self.window.slice(starts, sizes))
        return found


class Region:
    """A place in an array; it may exceed the array.

    Args:
      memory: the array.
    """

    __slots__ = ("memory", "place")

    def __init__(self, memory: Any, place: Place | Window):
        self.memory = memory
        self.place = place if isinstance(place, Place) else Place(place)

    @property
    def window(self) -> Window:
        return self.place.window

    @property
    def shape(self) -> tuple[int, ...]:
        return self.place.window.shape

    @property
    def dtype(self) -> Any:
        return self.memory.data.dtype

    def outside(self) -> int | None:
        """Returns the first axis on which the region exceeds the array, or None."""
        return None if self.place.inside else self.window.over_the_edge()[0]

    def box(self) -> ordering.Box:
        """Returns the part inside the array, possibly empty."""
        return self.place.box

    # --- requirements ----------------------------------------------------------------

    def require_inside(
        self,
        verb: str,
        hint: str = _CHECK_INDEX,
    ) -> None:
        """Reports a region that is not in bounds, or not addressable as a whole."""
        self.memory.require_addressable(self.window, verb)
        self.require_in_bounds(verb, hint)

    def require_in_bounds(
        self,
        verb: str,
        hint: str = _CHECK_INDEX,
    ) -> None:
        """Reports elements of the region that are out of bounds."""
        error = self.out_of_bounds(verb, hint)
        if error is not None:
            report(error)

    def require_existing(self, verb: str) -> None:
        """Raises unless the region is in bounds: without it nothing can go on."""
        error = self.out_of_bounds(verb)
        if error is not None:
            raise error

    def out_of_bounds(
        self, verb: str, hint: str = _CHECK_INDEX
    ) -> errors.OutOfBoundsError | None:
        """Returns the error for elements out of bounds; None without any."""
        axis = self.outside()
        if axis is None:
            return None
        shape, window = self.memory.shape, self.window
        start, size = window.starts[axis], window.sizes[axis]
        got = f"index {start}"
        if axis in window.axes:
            got = f"{start} to {start + size}"
        starts = zip(window.starts, window.sizes, strict=True)
        return errors.OutOfBoundsError(
            f"{self.memory.name} is {verb} out of bounds",
            expected=f"indices 0 to {shape[axis] - 1} in dimension {axis} "
            f"of shape {shape}",
            got=f"{got} in dimension {axis}",
            hint=hint,
        ).about(
            buffer=self.memory.name, elements=tuple((at, at + n) for at, n in starts)
        )

    def require_written(self) -> None:
        """Reports an element without a value."""
        missing = self.missing()
        if missing is not None:
            report(self.origin(missing, None).error())

    def missing(self, outside: bool = False) -> np.ndarray | None:
        """Returns which elements have no value; None when all have.

        Args:
          outside: whether those outside the array have none.
        """
        written = self.memory.written
        if self.outside() is None:
            if written is None:
                return None
            part = self.view(written)
            return None if part.all() else ~part
        result = np.full(self.window.sizes, outside)
        inner, outer = self._clip()
        result[inner] = False if written is None else ~written[outer]
        return self._squeeze(result) if result.any() else None

    def origin(self, missing: np.ndarray, where: str | None) -> Origin:
        """Returns the origin of elements without a value that are read at a line."""
        element = list(self.window.starts)
        first = np.unravel_index(int(np.argmax(missing)), missing.shape)
        for axis, i in zip(self.window.axes, first, strict=True):
            element[axis] += int(i)
        return self.memory.origin_of_missing(element, int(missing.sum()), where)

    # --- elements of a region in bounds -----------------------------------------------

    def key(self) -> tuple[Any, ...]:
        """Returns an index for NumPy; the result is a view, also of one element."""
        return self.place.key

    def view(self, array: np.ndarray) -> np.ndarray:
        """Returns the region of an array of the memory's shape, not copied."""
        part, order = array[self.place.key], self.place.order
        return part if order is None else part.transpose(order)

    def peek(self) -> np.ndarray:
        """Returns the elements, not copied where all are in bounds."""
        if not self.place.inside:
            return self.load_clipped(poison(self.dtype))
        return self.view(self.memory.data)

    def load(self) -> np.ndarray:
        """Returns a copy of the elements; those outside the array are poison."""
        return np.array(self.peek())

    def store(self, value: Any) -> None:
        """Writes the elements inside the array.

        Poisoned elements, which the memory does not admit, are reported.
        """
        poisoned = isinstance(value, Poisoned)
        if poisoned and not self.memory.admits_poison:
            report(value.origin.error())
            value, poisoned = value.value, False
        if not self.place.inside:
            contents = value.value if poisoned else value
            self.store_clipped(np.broadcast_to(contents, self.shape), True)
            return
        self.peek()[...] = value.value if poisoned else np.asarray(value)
        self.memory.mark_written(self.key())
        if poisoned:
            self.memory.mark_poisoned(self, value.mask, value.origin)

    def holds(self, value: np.ndarray, box: ordering.Box) -> bool:
        """True when a part of the region holds the bits of a value for all of it."""
        value = np.broadcast_to(np.asarray(value, self.dtype), self.shape)
        starts = self.window.starts
        inner = tuple(
            slice(low - start, high - start)
            for (low, high), start in zip(box, starts, strict=True)
        )
        present = self.memory.data[tuple(slice(low, high) for low, high in box)]
        return present.tobytes() == self._expand(value)[inner].tobytes()

    # --- elements of a region that may exceed the array -------------------------------

    def load_clipped(self, fill: Any) -> np.ndarray:
        """Returns a copy; elements outside the array have the value `fill`."""
        if self.place.inside:
            return self.load()
        result = np.full(self.window.sizes, fill, self.dtype)
        inner, outer = self._clip()
        result[inner] = self.memory.data[outer]
        return self._squeeze(result)

    def inside_mask(self) -> np.ndarray:
        """Returns which elements of the region are inside the array."""
        result = np.zeros(self.window.sizes, np.bool_)
        result[self._clip()[0]] = True
        return self._squeeze(result)

    def store_clipped(self, value: np.ndarray, written: Any) -> None:
        """Writes the elements inside the array."""
        inner, outer = self._clip()
        value = self._expand(np.asarray(value))
        self.memory.data[outer] = value[inner]
        if isinstance(written, np.ndarray):
            written = self._expand(written)[inner]
        self.memory.mark_written(outer, written)

    def _clip(self) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        box = self.box()
        outer = tuple([slice(low, max(low, high)) for low, high in box])
        inner = tuple(
            slice(s.start - start, s.stop - start)
            for s, start in zip(outer, self.window.starts, strict=True)
        )
        return inner, outer

    def _squeeze(self, full: np.ndarray) -> np.ndarray:
        kept = [n for a, n in enumerate(full.shape) if a in self.window.axes]
        part = full.reshape(kept)
        return np.array(
            part.transpose(self.window.order) if self.window.is_transposed else part
        )

    def _expand(self, value: np.ndarray) -> np.ndarray:
        back = np.argsort(self.window.order)
        return value.transpose(back).reshape(self.window.sizes)
