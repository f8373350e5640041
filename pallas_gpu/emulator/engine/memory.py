# SPDX-License-Identifier: Apache-2.0
"""Memory of the emulated machine: arrays that know what was written, and their parts.

An array has the logical shape that the author wrote. Fresh memory is poison: NaN for
floats, a pattern that catches the eye for integers; a mask of the elements that have
been written turns a read of any other into an error.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_gpu import errors, types
from pallas_gpu.emulator.engine import ordering
from pallas_gpu.layouts.gmem.tma_plan import SMEM_ALIGNMENT_BYTES

# Signalling NaNs (IEEE 754: exponent all ones, quiet bit clear) that spell A5 in a
# dump; the eight-bit formats have no room for more than a NaN.
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
    """Returns what fresh memory of a dtype holds, as an array of shape ()."""
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


class Memory:
    """One array in SMEM or GMEM.

    Attributes:
      name: for messages.
      space: SMEM or GMEM.
      data: the elements.
      written: True where an element has a value; None when all have.
      history: accesses that later ones may conflict with.
      unfenced: writes by threads that no `commit_smem` has followed yet:
        (warpgroup's actor, box) -> (line, warpgroup's name).
      read_only: an input of the kernel.
      owners: for a result under race detection: the CTA that wrote each element, or -1.
      tile: for a tiled SMEM array, the size of a tile on each axis; else None.
      place: (visit of a scope, position in it) of an SMEM array: where other CTAs of
        the cluster have the same array.
    """

    __slots__ = (
        "data",
        "history",
        "name",
        "owners",
        "place",
        "read_only",
        "space",
        "tile",
        "unfenced",
        "written",
    )

    def __init__(self, name: str, space: types.MemorySpace, data: np.ndarray,
                 written: np.ndarray | None, read_only: bool = False):  # fmt: skip
        self.name = name
        self.space = space
        self.data = data
        self.written = written
        self.read_only = read_only
        self.owners: Any = None
        self.place: Any = None
        self.tile: tuple[int, ...] | None = None
        self.history = ordering.History()
        self.unfenced: dict[tuple[int, ordering.Box], tuple[str | None, str]] = {}

    @classmethod
    def fresh(cls, name: str, space: types.MemorySpace, shape: tuple[int, ...],
              dtype: Any, zeros: bool) -> Memory:  # fmt: skip
        """Returns memory that nobody has written."""
        if zeros:
            return cls(name, space, np.zeros(shape, dtype), None)
        data = np.full(shape, poison(dtype), dtype)
        return cls(name, space, data, np.zeros(shape, np.bool_))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def whole(self) -> Region:
        """Returns the part that is everything."""
        n = len(self.shape)
        return Region(self, (0,) * n, self.shape, (True,) * n, tuple(range(n)))

    def mark_written(self, key: tuple[Any, ...], value: Any = True) -> None:
        """Notes that elements have a value."""
        if self.written is None:
            return
        self.written[key] = value
        if self.space is types.SMEM and self.written.all():
            self.written = None


@dataclasses.dataclass(slots=True)
class Region:
    """A part of an array: a range of each axis, some of them squeezed, and an order.

    Attributes:
      memory: the array.
      starts: first index on each axis; may lie outside.
      sizes: number of elements on each axis.
      kept: False for an axis that the region's shape does not show.
      order: which axes, in which order, make up the shape.
    """

    memory: Any
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    kept: tuple[bool, ...]
    order: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.sizes[a] for a in self.order)

    @property
    def dtype(self) -> Any:
        return self.memory.data.dtype

    @property
    def bytes(self) -> int:
        """Size of the region, parts outside of the array included."""
        bits = types.itemsize_bits(self.dtype)
        return math.prod(self.sizes) * bits // 8

    def outside(self) -> int | None:
        """Returns the first axis on which the region leaves the array."""
        shape = self.memory.shape
        for axis, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            if start < 0 or start + size > shape[axis]:
                return axis
        return None

    def box(self) -> ordering.Box:
        """Returns the part of the region that lies inside of the array."""
        if self.outside() is None:
            pairs = zip(self.starts, self.sizes, strict=True)
            return tuple([(start, start + size) for start, size in pairs])
        return tuple(
            (min(max(start, 0), n), max(min(start + size, n), 0))
            for start, size, n in zip(
                self.starts, self.sizes, self.memory.shape, strict=True
            )
        )

    def require_inside(self, verb: str) -> None:
        """Raises unless the region lies inside, and consists of whole tiles.

        An address is computed from the start of a tile: a start inside of one, known
        only when the kernel runs, would silently name other elements on a GPU.
        """
        tile = getattr(self.memory, "tile", None)  # barriers have none
        if tile is not None and math.prod(self.sizes) > 1:
            self._require_whole_tiles(verb, tile)
        axis = self.outside()
        if axis is None:
            return
        shape = self.memory.shape
        start, size = self.starts[axis], self.sizes[axis]
        got = f"index {start}"
        if self.kept[axis]:
            got = f"{start} to {start + size}"
        raise errors.OutOfBoundsError(
            f"{self.memory.name} is {verb} out of bounds",
            expected=f"indices 0 to {shape[axis] - 1} in dimension {axis} "
            f"of shape {shape}",
            got=f"{got} in dimension {axis}",
            hint="check the index, or guard the access with plgpu.when",
        )

    def require_aligned(self, what: str) -> None:
        """Raises unless the region starts where a tensor copy may start in SMEM.

        A start that is known only when the kernel runs would be a misaligned address.
        """
        tile = self.memory.tile or (1,) * len(self.starts)
        index = 0
        for start, size, n in zip(self.starts, tile, self.memory.shape, strict=True):
            index = index * (n // size) + start // size
        offset = index * math.prod(tile) * self.dtype.itemsize
        if offset % SMEM_ALIGNMENT_BYTES == 0:
            return
        raise errors.LayoutError(
            f"{what} does not start where TMA can address SMEM",
            expected=f"a multiple of {SMEM_ALIGNMENT_BYTES} bytes from the start of "
            f"{self.memory.name}",
            got=f"{offset} bytes, the element {tuple(self.starts)}",
            hint="give each part a row of its own, of as many bytes",
        )

    def _require_whole_tiles(self, verb: str, tile: tuple[int, ...]) -> None:
        if all(start % t == 0 for start, t in zip(self.starts, tile, strict=True)):
            return
        raise errors.LayoutError(
            f"{self.memory.name} is {verb} from inside of a tile",
            expected=f"starts that are multiples of {tile}, the tiling",
            got=f"starts {self.starts}",
            hint="index whole tiles, or declare the array with smaller ones",
        )

    def require_written(self) -> None:
        """Raises UninitializedReadError for an element without a value."""
        missing = self.first_unwritten()
        if missing is None:
            return
        raise errors.UninitializedReadError(
            f"{self.memory.name} is read where nothing has been written",
            expected="a value stored or copied there before",
            got=f"element {list(missing)} without a value",
            hint="write it first, or copy to it and wait for the barrier",
        )

    def require_fenced(self, reader: str) -> None:
        """Raises RaceError when threads wrote a part and no fence has followed.

        Args:
          reader: the asynchronous work that is about to read, for the message.
        """
        if not self.memory.unfenced:
            return
        box = self.box()
        for (_, written), (where, who) in self.memory.unfenced.items():
            if ordering.overlap(written, box):
                raise errors.RaceError(
                    f"{reader} reads {self.memory.name}, written at {where} and not "
                    "fenced",
                    expected="commit_smem() by the writing warpgroup between the write "
                    f"and {reader}",
                    got=f"{who} wrote elements {ordering.box_text(written)} without "
                    "one",
                    hint="call commit_smem()",
                )

    def key(self) -> tuple[Any, ...]:
        """Returns an index for numpy; the result is a view, also of one element."""
        return (
            *(
                slice(start, start + size) if kept else start
                for start, size, kept in zip(
                    self.starts, self.sizes, self.kept, strict=True
                )
            ),
            ...,
        )

    def _ordered(self, view: np.ndarray) -> np.ndarray:
        kept = sorted(self.order)
        if tuple(kept) == self.order:
            return view
        return view.transpose([kept.index(a) for a in self.order])

    def peek(self) -> np.ndarray:
        """Returns the elements of a region that lies inside, not copied."""
        return self._ordered(self.memory.data[self.key()])

    def load(self) -> np.ndarray:
        """Returns a copy of a region that lies inside."""
        return np.array(self.peek())

    def store(self, value: Any) -> None:
        """Writes a region that lies inside."""
        key = self.key()
        self._ordered(self.memory.data[key])[...] = value
        self.memory.mark_written(key)

    def first_unwritten(self) -> tuple[int, ...] | None:
        """Returns the index, in the array, of the first element without a value."""
        if self.memory.written is None:
            return None
        box = self.box()
        part = self.memory.written[tuple(slice(a, b) for a, b in box)]
        if part.all():
            return None
        first = np.unravel_index(int(np.argmin(part)), part.shape)
        return tuple(int(i) + low for i, (low, _) in zip(first, box, strict=True))

    # --- with a part outside: copies, and reads that may leave the array -------------

    def load_clipped(self, fill: Any) -> np.ndarray:
        """Returns a copy; elements outside of the array have the value `fill`."""
        if self.outside() is None:
            return self.load()
        result = np.full(self.sizes, fill, self.dtype)
        inner, outer = self._clip()
        result[inner] = self.memory.data[outer]
        return self._squeeze(result)

    def inside_mask(self) -> np.ndarray:
        """Returns which elements of the region lie inside of the array."""
        result = np.zeros(self.sizes, np.bool_)
        result[self._clip()[0]] = True
        return self._squeeze(result)

    def store_clipped(self, value: np.ndarray, written: Any) -> None:
        """Writes the elements that lie inside of the array."""
        inner, outer = self._clip()
        value = self._expand(np.asarray(value))
        self.memory.data[outer] = value[inner]
        if isinstance(written, np.ndarray):
            written = self._expand(written)[inner]
        self.memory.mark_written(outer, written)

    def _clip(self) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        box = self.box()
        outer = tuple(slice(low, max(low, high)) for low, high in box)
        inner = tuple(
            slice(s.start - start, s.stop - start)
            for s, start in zip(outer, self.starts, strict=True)
        )
        return inner, outer

    def _squeeze(self, full: np.ndarray) -> np.ndarray:
        gone = tuple(a for a, kept in enumerate(self.kept) if not kept)
        return np.array(self._ordered(full.reshape(
            [n for a, n in enumerate(full.shape) if a not in gone]
        )))  # fmt: skip

    def _expand(self, value: np.ndarray) -> np.ndarray:
        kept = sorted(self.order)
        back = np.argsort([kept.index(a) for a in self.order])
        return value.transpose(back).reshape(self.sizes)
