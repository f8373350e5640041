# SPDX-License-Identifier: Apache-2.0
"""The canonical form of a register layout: where every element is stored, as integers.

A warpgroup holds an array in registers. Every description of the placement is converted
to this form: a thread index has seven bits, each bit that is set offsets the thread's
data by a constant coordinate, and each register starts at a constant coordinate.
Shared-memory addresses, iota, broadcasts, reductions and the comparison of two layouts
are computed from this form.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts.drawing.drawing import Drawable
from pallas_gpu.layouts.registers.reshapes import flatten as _flatten
from pallas_gpu.layouts.registers.reshapes import reshaped

WARP_LANES = 32
WARPS = 4
THREADS = WARP_LANES * WARPS
THREAD_BITS = 7
LANE_BITS = 5

Coordinate = tuple[int, ...]

# Row t holds the seven bits of thread index t, least significant first.
_BITS_OF_THREAD = (np.arange(THREADS)[:, None] >> np.arange(THREAD_BITS)) & 1


@dataclasses.dataclass(frozen=True)
class LinearLayout(Drawable):
    """Places an array in the registers of one warpgroup.

    Element `v` of register `r` in thread `t` is the array's element at
    `origins[r] + sum(bit b of t * thread_columns[b]) + v * unit(vector_axis)`.
    Bits 0 to 4 of `t` are the lane, bits 5 and 6 the warp. A coordinate beyond the
    shape is padding: the register's content there has no meaning.

    Attributes:
      shape: the logical shape of the array.
      thread_columns: for each of the seven bits the coordinate it adds. A bit whose
        column is zero is a replication bit: the two threads hold the same elements.
      origins: one coordinate per register, in lexicographic order.
      vector_length: elements per register.
      vector_axis: the axis along which a register's elements are consecutive; 0 when
        a register holds one element.

    Raises:
      LayoutError: the elements do not all have the same, nonzero number of owners, or a
        register consists of padding alone.

    The accumulator of a wgmma, 64 rows by 8 columns, two registers per thread:

      >>> Layout.WGMMA.to_layout().linear((64, 8)).thread_columns
      ((0, 2), (0, 4), (1, 0), (2, 0), (4, 0), (16, 0), (32, 0))
    """

    shape: tuple[int, ...]
    thread_columns: tuple[Coordinate, ...]
    origins: tuple[Coordinate, ...]
    vector_length: int
    vector_axis: int

    def __post_init__(self) -> None:
        self._check_form()
        flat = self.flat_indices().reshape(-1)
        owners = np.bincount(flat[flat >= 0], minlength=self.size)
        if not (owners == 1 << len(self.replication_bits)).all():
            raise LayoutError(
                "a register layout must hold every element equally often",
                expected=f"{1 << len(self.replication_bits)} owners of each element",
                got=f"between {owners.min()} and {owners.max()} owners in {self}",
            )

    def _check_form(self) -> None:
        ranks = {len(c) for c in (*self.thread_columns, *self.origins)}
        if len(self.thread_columns) != THREAD_BITS or ranks != {self.rank}:
            raise LayoutError(
                "a linear layout requires a coordinate per thread bit and per register",
                expected=f"{THREAD_BITS} columns, coordinates of rank {self.rank}",
                got=f"{len(self.thread_columns)} columns, ranks {sorted(ranks)}",
            )
        if list(self.origins) != sorted(set(self.origins)):
            raise LayoutError(
                "registers must be distinct and in lexicographic order",
                got=self.origins,
                hint="build the layout with LinearLayout.create",
            )
        if self.vector_length < 1 or (self.vector_length == 1 and self.vector_axis):
            raise LayoutError(
                "a register must hold at least one element; a single one has axis 0",
                got=f"length {self.vector_length}, axis {self.vector_axis}",
            )
        first = np.array(self.origins, dtype=np.int64)
        first = first.reshape(self.num_registers, self.rank)
        if (first >= np.array(self.shape, dtype=np.int64)).any() or (first < 0).any():
            raise LayoutError(
                "a register of a layout starts outside of the shape",
                expected=f"origins inside of {self.shape}",
                got=self,
            )
        # Removing the axis would make owners of the threads with padding.
        if any(self.shape[a] == 1 for a in self.padded_axes):
            raise LayoutError("an axis of size 1 cannot be padded", got=self)

    @classmethod
    def create(
        cls,
        shape: Sequence[int],
        thread_columns: Sequence[Sequence[int]],
        origins: Sequence[Sequence[int]],
        vector_length: int = 1,
        vector_axis: int = 0,
    ) -> LinearLayout:
        """Builds the canonical object: sorts the registers, drops duplicates."""
        unique = sorted({tuple(int(x) for x in origin) for origin in origins})
        return cls(
            tuple(int(s) for s in shape),
            tuple(tuple(int(x) for x in column) for column in thread_columns),
            tuple(unique),
            int(vector_length),
            int(vector_axis) if vector_length > 1 else 0,
        )

    @classmethod
    def from_coordinates(
        cls, shape: Sequence[int], coordinates: np.ndarray
    ) -> LinearLayout:
        """Recovers the linear form of a placement given element by element.

        Args:
          shape: the logical shape.
          coordinates: integers of shape [128, registers, vector, rank].

        Raises:
          LayoutError: the placement is not linear in the bits of the thread index.
        """
        first = coordinates[0, :, 0]
        bits = 1 << np.arange(THREAD_BITS)
        columns = coordinates[bits, 0, 0] - first[0]
        step = coordinates[0, 0, -1] - first[0]
        vector_length = coordinates.shape[2]
        axis = int(np.argmax(step)) if vector_length > 1 else 0
        unit = np.arange(coordinates.shape[3]) == axis
        vector = np.arange(vector_length)[:, None] * unit
        sums = (_BITS_OF_THREAD @ columns)[:, None, None] + first[:, None] + vector
        if (columns < 0).any() or not np.array_equal(sums, coordinates):
            raise _not_linear(shape)
        return cls.create(shape, columns.tolist(), first.tolist(), vector_length, axis)

    # --- sizes -----------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Number of logical axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of logical elements."""
        return math.prod(self.shape)

    @property
    def num_registers(self) -> int:
        """Registers (each of `vector_length` elements) per thread."""
        return len(self.origins)

    @functools.cached_property
    def replication_bits(self) -> tuple[int, ...]:
        """The bits of the thread index on which a thread's elements do not depend."""
        return tuple(b for b, c in enumerate(self.thread_columns) if not any(c))

    @property
    def is_of_warp(self) -> bool:
        """Whether each warp holds all elements: one warp can have such an array."""
        return not any(map(any, self.thread_columns[LANE_BITS:]))

    # --- padding ---------------------------------------------------------------------

    @functools.cached_property
    def box(self) -> tuple[int, ...]:
        """The shape and its padding: what all threads' registers span."""
        if not self.rank:
            return ()
        last = self._coordinates.reshape(-1, self.rank).max(axis=0)
        return tuple(int(x) + 1 for x in last)

    @functools.cached_property
    def padded_axes(self) -> tuple[int, ...]:
        """The axes along which coordinates exceed the shape."""
        return tuple(a for a in range(self.rank) if self.box[a] > self.shape[a])

    @property
    def is_padded(self) -> bool:
        """Whether some registers hold padding."""
        return bool(self.padded_axes)

    def inside(self) -> np.ndarray:
        """Which elements are not padding: bool [128, registers, vector]."""
        shape = np.array(self.shape, dtype=np.int64)
        return (self._coordinates < shape).all(axis=-1)

    # --- coordinates -----------------------------------------------------------------

    @property
    def _coordinates(self) -> np.ndarray:
        return _coordinates(self)

    def all_coordinates(self) -> np.ndarray:
        """All coordinates: int64 [128, registers, vector, rank], read-only."""
        return self._coordinates

    def coordinates(self, thread: int) -> np.ndarray:
        """The coordinates of one thread's elements: int64 [registers, vector, rank]."""
        return self._coordinates[thread]

    def flat_indices(self) -> np.ndarray:
        """The row-major index of all elements: int64 [128, registers, vector].

        It is -1 for padding.
        """
        flat = _flatten(self._coordinates, self.shape)
        return np.where(self.inside(), flat, -1) if self.is_padded else flat

    # --- derived layouts -------------------------------------------------------------

    def reduce(self, axes: int | Sequence[int]) -> LinearLayout:
        """Drops axes; threads that differed only along them become replicas."""
        dropped = _normalize_axes(axes, self.rank)
        keep = [a for a in range(self.rank) if a not in dropped]
        vector_kept = self.vector_length > 1 and self.vector_axis in keep
        return LinearLayout.create(
            _pick(self.shape, keep),
            [_pick(c, keep) for c in self.thread_columns],
            [_pick(o, keep) for o in self.origins],
            self.vector_length if vector_kept else 1,
            keep.index(self.vector_axis) if vector_kept else 0,
        )

    def insert_axes(self, axes: int | Sequence[int]) -> LinearLayout:
        """Adds axes of size one at the given positions of the result's shape."""
        count = 1 if isinstance(axes, int) else len(axes)
        added = _normalize_axes(axes, self.rank + count)
        kept = [a for a in range(self.rank + count) if a not in added]

        def widen(coordinate: Sequence[int], fill: int) -> Coordinate:
            return tuple(
                fill if a in added else coordinate[kept.index(a)]
                for a in range(self.rank + count)
            )

        return LinearLayout.create(
            widen(self.shape, 1),
            [widen(c, 0) for c in self.thread_columns],
            [widen(o, 0) for o in self.origins],
            self.vector_length,
            kept[self.vector_axis] if self.vector_length > 1 else 0,
        )

    def transpose(self, permutation: Sequence[int]) -> LinearLayout:
        """Result axis i is axis `permutation[i]`; see `transpose_registers`."""
        perm = _normalize_permutation(permutation, self.rank)
        return LinearLayout.create(
            _pick(self.shape, perm),
            [_pick(c, perm) for c in self.thread_columns],
            [_pick(o, perm) for o in self.origins],
            self.vector_length,
            perm.index(self.vector_axis) if self.vector_length > 1 else 0,
        )

    def transpose_registers(self, permutation: Sequence[int]) -> list[int]:
        """For each register of the transposed layout its index in this layout."""
        perm = _normalize_permutation(permutation, self.rank)
        return sorted(
            range(self.num_registers), key=lambda r: _pick(self.origins[r], perm)
        )

    def slice_registers(self, starts: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """The registers that make up a static slice, in the order of `slice`.

        Padding may be in the slice or not.

        Raises:
          LayoutError: a register is partly in the slice, so threads would have to
            exchange data.
        """
        if len(starts) != self.rank or len(sizes) != self.rank:
            raise LayoutError(
                "a slice requires a start and a size for each axis",
                expected=f"{self.rank} of each",
                got=f"starts {tuple(starts)}, sizes {tuple(sizes)}",
            )
        low = np.array(starts, dtype=np.int64)
        high = low + np.array(sizes, dtype=np.int64)
        if (
            (low < 0).any()
            or (high > np.array(self.shape)).any()
            or min(sizes, default=1) < 1
        ):
            raise LayoutError(
                "a slice is out of bounds",
                expected=f"a part of {self.shape}",
                got=f"starts {tuple(starts)}, sizes {tuple(sizes)}",
            )
        whole = self._boxes_inside(starts, sizes)
        if whole is not None:
            return whole
        taken = ((self._coordinates >= low) & (self._coordinates < high)).all(-1)
        held = self.inside()
        whole = (taken | ~held).all(axis=(0, 2))
        if ((taken & held).any(axis=(0, 2)) != whole).any():
            raise LayoutError(
                "the slice would move data between threads",
                expected=f"starts and sizes that are multiples of {self.thread_tile}",
                got=f"starts {tuple(starts)}, sizes {tuple(sizes)}",
                hint="slice a reference instead, or layout_cast the array first",
            )
        return np.flatnonzero(whole).tolist()

    def _boxes_inside(
        self, starts: Sequence[int], sizes: Sequence[int]
    ) -> list[int] | None:
        """The registers whose boxes are in a slice; None if it cuts some of the boxes.

        A box that is cut may have no element on one of the sides.
        """
        found = []
        ranges = [(s, s + n) for s, n in zip(starts, sizes, strict=True)]
        for r, origin in enumerate(self.origins):
            is_inside = True
            boxes = zip(origin, self.thread_tile, ranges, strict=True)
            for first, span, (low, high) in boxes:
                if first >= high or first + span <= low:
                    is_inside = False
                    break
                if first < low or first + span > high:
                    return None
            if is_inside:
                found.append(r)
        return None if self.is_padded else found

    def slice(self, starts: Sequence[int], sizes: Sequence[int]) -> LinearLayout:
        """The layout of a static slice that is a subset of this layout's registers."""
        origins = [self.origins[r] for r in self.slice_registers(starts, sizes)]
        return LinearLayout.create(
            sizes,
            self.thread_columns,
            [tuple(x - s for x, s in zip(o, starts, strict=True)) for o in origins],
            self.vector_length,
            self.vector_axis,
        )

    def reshape(self, shape: Sequence[int]) -> LinearLayout:
        """The layout of the same registers in another shape, row-major.

        Registers keep their order.

        Raises:
          LayoutError: the sizes differ, or the placement is not linear afterwards.
        """
        return _reshape(self, tuple(int(s) for s in shape))

    @functools.cached_property
    def thread_tile(self) -> tuple[int, ...]:
        """The box spanned by one register of all 128 threads."""
        if not self.rank:
            return ()
        first = self._coordinates[:, :1].reshape(-1, self.rank)
        span = first.max(axis=0) - first.min(axis=0) + 1
        return tuple(int(s) for s in span)

    # --- broadcasts ------------------------------------------------------------------

    def broadcast_elements(
        self, operand: LinearLayout, dims: Sequence[int]
    ) -> np.ndarray | None:
        """The source of each element of a broadcast, or None if threads differ.

        Args:
          operand: the layout of the operand that is broadcast to `self.shape`.
          dims: operand axis i becomes axis `dims[i]` of the result; its size is the
            result's or 1. Axes of the result that are missing are new.

        Returns:
          int64 [registers, vector, 2]: operand register and element within it, the
          same for all threads.
        """
        dims = _check_broadcast(self, operand, dims)
        full = np.array([int(s != 1) for s in operand.shape], dtype=np.int64)
        for mine, theirs in zip(
            self.thread_columns, operand.thread_columns, strict=True
        ):
            if tuple(np.array(_pick(mine, dims), dtype=np.int64) * full) != theirs:
                return None
        wanted = self._coordinates[0][..., list(dims)] * full
        # Columns are not negative: what is padding in thread 0 is so in all threads.
        most = wanted.max(axis=(0, 1))
        span = np.maximum(most + 1, np.array(operand.box, dtype=np.int64))
        owner = np.full(math.prod(span.tolist()), -1, dtype=np.int64)
        held = _flatten(operand.coordinates(0), span.tolist())
        owner[held.reshape(-1)] = np.arange(held.size)
        source = owner[_flatten(wanted, span.tolist())]
        if ((source < 0) & self.inside()[0]).any():
            return None
        source = np.maximum(source, 0)
        return np.stack(np.divmod(source, operand.vector_length), axis=-1)

    def broadcast_matches(self, operand: LinearLayout, dims: Sequence[int]) -> bool:
        """Whether every thread already holds its elements of `operand`."""
        return self.broadcast_elements(operand, dims) is not None


# Kilobytes to megabytes each: layouts live long, their coordinates are used at once.
@functools.lru_cache(maxsize=32)
def _coordinates(layout: LinearLayout) -> np.ndarray:
    columns = np.array(layout.thread_columns, dtype=np.int64)
    threads = _BITS_OF_THREAD @ columns.reshape(THREAD_BITS, layout.rank)
    origins = np.array(layout.origins, dtype=np.int64).reshape(
        layout.num_registers, layout.rank
    )
    vector = np.zeros((layout.vector_length, layout.rank), dtype=np.int64)
    if layout.rank:
        vector[:, layout.vector_axis] = np.arange(layout.vector_length)
    result = threads[:, None, None] + origins[None, :, None] + vector[None, None]
    result.flags.writeable = False
    return result


@functools.lru_cache(maxsize=1024)
def _reshape(layout: LinearLayout, shape: tuple[int, ...]) -> LinearLayout:
    if math.prod(shape) != layout.size:
        raise LayoutError(
            "a reshape must keep the number of elements",
            expected=f"{layout.size} elements ({layout.shape})",
            got=f"{math.prod(shape)} elements ({shape})",
        )
    own = layout._coordinates
    coordinates = reshaped(own, layout.shape, shape, layout.padded_axes)
    return LinearLayout.from_coordinates(shape, coordinates)


def _not_linear(shape: Sequence[int]) -> LayoutError:
    return LayoutError(
        "the placement is not linear in the bits of the thread index",
        expected="sizes that split and merge at powers of two",
        got=f"shape {tuple(shape)}",
        hint="pad the array, or use a tiled layout",
    )


def _check_broadcast(
    result: LinearLayout, operand: LinearLayout, dims: Sequence[int]
) -> tuple[int, ...]:
    dims = tuple(dims)
    fits = len(dims) == operand.rank and all(
        0 <= d < result.rank and s in (1, result.shape[d])
        for d, s in zip(dims, operand.shape, strict=False)
    )
    if not fits:
        raise LayoutError(
            "a broadcast must map each operand axis to an axis of the result",
            expected=f"sizes 1 or those of {result.shape}",
            got=f"operand {operand.shape} to axes {dims}",
        )
    return dims


def _pick(values: Sequence[int], indices: Sequence[int]) -> Coordinate:
    return tuple(values[i] for i in indices)


def _normalize_axes(axes: int | Sequence[int], rank: int) -> set[int]:
    given = (axes,) if isinstance(axes, int) else tuple(axes)
    result = {a + rank if a < 0 else a for a in given}
    if len(result) != len(given) or any(not 0 <= a < rank for a in result):
        raise LayoutError(
            "axes must be distinct and in range",
            expected=f"axes of rank {rank}",
            got=given,
        )
    return result


def _normalize_permutation(permutation: Sequence[int], rank: int) -> list[int]:
    perm = [p + rank if p < 0 else p for p in permutation]
    if sorted(perm) != list(range(rank)):
        raise LayoutError(
            "a transpose requires a permutation of the axes",
            expected=f"a permutation of {tuple(range(rank))}",
            got=tuple(permutation),
        )
    return perm
