# SPDX-License-Identifier: Apache-2.0
"""Memory: arrays that track which elements were written, and windows of them.

An array has the logical shape in the kernel's source. Fresh memory is poison: NaN for
floats, a recognizable pattern for integers; with a mask of the elements that have been
written, a read of any other is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_gpu import errors
from pallas_gpu.emulator.engine import ordering
from pallas_gpu.emulator.engine.history import History
from pallas_gpu.layouts.window import Window

# Signalling NaNs (IEEE 754: exponent all ones, quiet bit clear) that spell A5 in a
# dump; the eight-bit formats can only represent a plain NaN.
_NAN_BITS = {
    "float64": 0x7FF4_A5A5_A5A5_A5A5,
    "float32": 0x7FA5_A5A5,
    "float16": 0x7DA5,
    "bfloat16": 0x7FA5,
    "float8_e5m2": 0x7D,
    "float8_e4m3fn": 0x7F,
}


@functools.cache
def poison(dtype: Any) -> np.ndarray:
    """Returns the content of fresh memory of a dtype, as an array of shape ()."""
    dtype = jnp.dtype(dtype)
    if dtype.name in _NAN_BITS:
        word = np.dtype(f"u{dtype.itemsize}")
        return np.array(_NAN_BITS[dtype.name], word).view(dtype)
    if dtype.kind in "iu":
        pattern = np.frombuffer(b"\xa5" * dtype.itemsize, dtype)
        return pattern.reshape(())
    if dtype == np.bool_:
        return np.array(True)
    return np.array(np.nan if jnp.issubdtype(dtype, jnp.inexact) else 1).astype(dtype)


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


class Memory(Referent):
    """One array.

    Attributes:
      data: the elements.
      written: True where an element has a value; None when all have.
      history: accesses that later ones may still conflict with.
      read_only: whether the array is an input of the kernel.
      viewer: the group that accesses it, if several groups do.
      fence: what makes threads' stores visible to asynchronous work.
    """

    __slots__ = ("data", "history", "read_only", "viewer", "written")

    fence = ordering.Fence.SMEM

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

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def mark_written(self, key: tuple[Any, ...], value: Any = True) -> None:
        """Records that elements have a value."""
        if self.written is not None:
            self.written[key] = value


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
      window: the window.
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
      place: the part, or its window.
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

    def require_inside(self, verb: str) -> None:
        """Raises unless the region is in bounds and addressable."""
        self.memory.require_addressable(self.window, verb)
        axis = self.outside()
        if axis is None:
            return
        shape, window = self.memory.shape, self.window
        start, size = window.starts[axis], window.sizes[axis]
        got = f"index {start}"
        if axis in window.axes:
            got = f"{start} to {start + size}"
        raise errors.OutOfBoundsError(
            f"{self.memory.name} is {verb} out of bounds",
            expected=f"indices 0 to {shape[axis] - 1} in dimension {axis} "
            f"of shape {shape}",
            got=f"{got} in dimension {axis}",
            hint="check the index, or guard the access with plgpu.when",
        )

    def require_written(self) -> None:
        """Raises UninitializedReadError for an element without a value."""
        missing = self.first_unwritten()
        if missing is None:
            return
        raise errors.UninitializedReadError(
            f"{self.memory.name} is read where nothing has been written",
            expected="an earlier store or copy to it",
            got=f"element {list(missing)} without a value",
            hint="write it first, or copy to it and wait for the barrier",
        )

    def first_unwritten(self) -> tuple[int, ...] | None:
        """Returns the array index of the first element without a value."""
        if self.memory.written is None:
            return None
        box = self.box()
        part = self.memory.written[tuple([slice(a, b) for a, b in box])]
        if part.all():
            return None
        first = np.unravel_index(int(np.argmin(part)), part.shape)
        return tuple(int(i) + low for i, (low, _) in zip(first, box, strict=True))

    # --- elements of a region in bounds -----------------------------------------------

    def key(self) -> tuple[Any, ...]:
        """Returns an index for NumPy; the result is a view, also of one element."""
        return self.place.key

    def _ordered(self, view: np.ndarray) -> np.ndarray:
        order = self.place.order
        return view if order is None else view.transpose(order)

    def peek(self) -> np.ndarray:
        """Returns the elements, not copied."""
        return self._ordered(self.memory.data[self.key()])

    def load(self) -> np.ndarray:
        """Returns a copy of the elements."""
        return np.array(self.peek())

    def written_mask(self) -> np.ndarray | None:
        """Returns a copy of the mask of elements with a value; None when all have."""
        mask = self.memory.written
        return None if mask is None else np.array(self._ordered(mask[self.key()]))

    def store(self, value: Any) -> None:
        """Writes the elements."""
        key = self.key()
        self._ordered(self.memory.data[key])[...] = value
        self.memory.mark_written(key)

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
        if self.outside() is None:
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
        return np.array(self._ordered(full.reshape(kept)))

    def _expand(self, value: np.ndarray) -> np.ndarray:
        back = np.argsort(self.window.order)
        return value.transpose(back).reshape(self.window.sizes)
