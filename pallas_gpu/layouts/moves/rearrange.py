# SPDX-License-Identifier: Apache-2.0
"""Plans moves of elements through memory: where operands are stored, results loaded.

A concatenation, a reversal, a slice with strides, padding: each stores its operands at
affine addresses of one image in memory, and loads its result at affine addresses. Only
the numbers differ. A plan has no layouts: they are up to operands and result.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from pallas_gpu.layouts.registers.descriptions import WGStridedLayout
from pallas_gpu.layouts.registers.linear import THREAD_BITS, LinearLayout
from pallas_gpu.layouts.registers.placement import Placement
from pallas_gpu.layouts.window import row_major_strides

# PTX ISA, ld and st: one access transfers at most 16 bytes.
_ACCESS_BYTES = 16


@dataclasses.dataclass(frozen=True)
class Affine:
    """Addresses `offset + sum(strides[a] * coordinate[a])`."""

    offset: int
    strides: tuple[int, ...]

    @classmethod
    def row_major(cls, shape: Sequence[int], offset: int = 0) -> Affine:
        """The addresses of an array that is stored without gaps."""
        return cls(offset, row_major_strides(shape))

    def scaled(self, factor: int) -> Affine:
        """The addresses in another unit: from elements to bytes."""
        return Affine(self.offset * factor, tuple(s * factor for s in self.strides))


@dataclasses.dataclass(frozen=True)
class Rearrangement:
    """A result as loads from an image in memory, to which the operands are stored.

    The element of the result at coordinate c is loaded if, on each axis a, the number
    `i = (c[a] - firsts[a]) / steps[a]` is whole and `0 <= i < counts[a]`; these numbers
    are its coordinate in `result`. The other elements are those of a separate array.

    Attributes:
      size: elements of the image.
      sources: for each operand where its elements are stored.
      shape: the result's shape.
      result: where the result's elements are loaded.
      firsts: for each axis the first coordinate that is loaded; it may be negative.
      steps: for each axis the distance of the coordinates that are loaded.
      counts: for each axis their number; None if all coordinates are loaded.
      dynamic: axes on which a value, known when the code runs, is added to `firsts`.
    """

    size: int
    sources: tuple[Affine, ...]
    shape: tuple[int, ...]
    result: Affine
    firsts: tuple[int, ...]
    steps: tuple[int, ...]
    counts: tuple[int | None, ...]
    dynamic: tuple[int, ...] = ()

    @property
    def is_total(self) -> bool:
        """Whether all elements of the result are loaded."""
        return all(count is None for count in self.counts)


# --- operations -----------------------------------------------------------------------


def _moving(
    source: Sequence[int],
    shape: Sequence[int],
    result: Affine,
    *,
    firsts: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
    counts: Sequence[int | None] | None = None,
    dynamic: Sequence[int] = (),
) -> Rearrangement:
    """One operand, stored without gaps. JAX's sizes may be NumPy's integers."""
    rank = len(shape)
    return Rearrangement(
        math.prod(source),
        (Affine.row_major(source),),
        tuple(map(int, shape)),
        Affine(int(result.offset), tuple(map(int, result.strides))),
        tuple(map(int, firsts or (0,) * rank)),
        tuple(map(int, steps or (1,) * rank)),
        tuple(counts or (None,) * rank),
        tuple(dynamic),
    )


def concatenation(shapes: Sequence[Sequence[int]], axis: int) -> Rearrangement:
    """Operands one after the other along an axis."""
    shape = list(shapes[0])
    shape[axis] = sum(operand[axis] for operand in shapes)
    whole = Affine.row_major(shape)
    sources, start = [], 0
    for operand in shapes:
        sources.append(Affine(start * whole.strides[axis], whole.strides))
        start += operand[axis]
    plain = _moving(shape, shape, whole)
    return dataclasses.replace(plain, sources=tuple(sources))


def reshape(
    old: Sequence[int], new: Sequence[int], dimensions: Sequence[int] | None = None
) -> Rearrangement:
    """Row-major from one shape to another, after a transpose if it has dimensions."""
    order = tuple(range(len(old))) if dimensions is None else tuple(dimensions)
    transposed = row_major_strides([old[a] for a in order])
    stored = Affine(0, tuple(transposed[order.index(a)] for a in range(len(old))))
    plain = _moving(old, new, Affine.row_major(new))
    return dataclasses.replace(plain, sources=(stored,))


def transpose(shape: Sequence[int], permutation: Sequence[int]) -> Rearrangement:
    """Axis i of the result is axis `permutation[i]`."""
    strides = row_major_strides(shape)
    new = [shape[a] for a in permutation]
    return _moving(shape, new, Affine(0, tuple(strides[a] for a in permutation)))


def broadcast(
    old: Sequence[int], new: Sequence[int], dims: Sequence[int]
) -> Rearrangement:
    """Axis i of the operand is axis `dims[i]` of the result, or has size one."""
    strides = [0] * len(new)
    for size, stride, axis in zip(old, row_major_strides(old), dims, strict=True):
        strides[axis] = stride if size != 1 else 0
    return _moving(old, new, Affine(0, tuple(strides)))


def part(
    shape: Sequence[int],
    starts: Sequence[int],
    sizes: Sequence[int],
    steps: Sequence[int] | None = None,
) -> Rearrangement:
    """A slice: `sizes` elements from `starts` on, at distances of `steps`."""
    strides = row_major_strides(shape)
    distances = steps or (1,) * len(shape)
    offset = sum(a * b for a, b in zip(starts, strides, strict=True))
    loaded = tuple(a * b for a, b in zip(distances, strides, strict=True))
    return _moving(shape, sizes, Affine(offset, loaded))


def dynamic_part(shape: Sequence[int], sizes: Sequence[int]) -> Rearrangement:
    """A slice whose starts are known when the code runs.

    The values of the axes are the negated starts, which are within bounds.
    """
    axes = [a for a, (n, size) in enumerate(zip(shape, sizes, strict=True)) if n > size]
    loaded = Affine(0, row_major_strides(shape))
    return _moving(shape, sizes, loaded, dynamic=axes)


def update(shape: Sequence[int], part: Sequence[int]) -> Rearrangement:
    """A part within a larger array; the values are its starts, within bounds."""
    axes = [a for a, (n, size) in enumerate(zip(shape, part, strict=True)) if n > size]
    counts = [size if a in axes else None for a, size in enumerate(part)]
    loaded = Affine.row_major(part)
    return _moving(part, shape, loaded, counts=counts, dynamic=axes)


def reversal(shape: Sequence[int], axes: Sequence[int]) -> Rearrangement:
    """The elements in reverse order along axes."""
    strides = row_major_strides(shape)
    offset = sum((shape[a] - 1) * strides[a] for a in axes)
    loaded = tuple(-s if a in axes else s for a, s in enumerate(strides))
    return _moving(shape, shape, Affine(offset, loaded))


def padding(
    shape: Sequence[int], config: Sequence[tuple[int, int, int]]
) -> Rearrangement:
    """As lax.pad: for each axis what is added before, after and between elements.

    A negative number removes elements.
    """
    new, counts = [], []
    for size, (low, high, interior) in zip(shape, config, strict=True):
        stretched = size + max(size - 1, 0) * interior
        new.append(stretched + low + high)
        counts.append(None if interior == 0 and max(low, high) <= 0 else size)
    return _moving(
        shape,
        new,
        Affine.row_major(shape),
        firsts=[low for low, _, _ in config],
        steps=[interior + 1 for _, _, interior in config],
        counts=counts,
    )


# --- addresses of a layout ------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Addresses:
    """The addresses of the elements of a layout, as sums.

    Element v of register r in thread t is at `origins[r] + v * step +` the sum of
    `columns[b]` over the bits b set in t.

    Attributes:
      columns: one integer per bit of the thread's index; it may be negative.
      origins: one integer per register.
      step: distance of the elements of a register.
      length: elements per register.
      width: adjacent elements that one access transfers; a divisor of `length`.
    """

    columns: tuple[int, ...]
    origins: tuple[int, ...]
    step: int
    length: int
    width: int

    def bounds(self, register: int) -> tuple[int, int]:
        """The lowest and the highest address of a register's elements."""
        spans = [*self.columns, self.step * (self.length - 1)]
        origin = self.origins[register]
        low = origin + sum(min(s, 0) for s in spans)
        return low, origin + sum(max(s, 0) for s in spans)


def addresses(
    layout: Placement, where: Affine, itemsize: int, multiple: int = 0
) -> Addresses | None:
    """The addresses in bytes of a layout's elements; None if they are not such sums.

    Args:
      layout: of the array.
      where: its elements, in elements.
      itemsize: bytes of an element.
      multiple: a divisor, in elements, of what is added when the code runs; 0 if
        nothing is.
    """
    scaled = where.scaled(itemsize)
    if isinstance(layout, WGStridedLayout):
        if where.strides != row_major_strides(layout.shape):
            return None
        columns = tuple(layout.vec_size * itemsize << b for b in range(THREAD_BITS))
        flats = (layout.flat_offset(0, r) for r in range(layout.num_registers))
        origins = tuple(scaled.offset + flat * itemsize for flat in flats)
        step = itemsize
    else:
        columns = tuple(_dot(c, scaled.strides) for c in layout.thread_columns)
        origins = tuple(scaled.offset + _dot(o, scaled.strides) for o in layout.origins)
        step = scaled.strides[layout.vector_axis] if layout.rank else itemsize
    length = layout.vector_length
    width = 1
    if step == itemsize:
        divisor = math.gcd(*columns, *origins, multiple * itemsize, _ACCESS_BYTES)
        while 2 * width <= length and (2 * width * itemsize) <= divisor:
            width *= 2
    while length % width:
        width //= 2
    return Addresses(columns, origins, step, length, width)


def _dot(coordinate: Sequence[int], strides: Sequence[int]) -> int:
    return sum(x * s for x, s in zip(coordinate, strides, strict=True))


def extent(layout: Placement, register: int, axis: int) -> tuple[int, int]:
    """The lowest and the highest coordinate of a register's elements on an axis."""
    if not isinstance(layout, LinearLayout):
        return 0, layout.shape[axis] - 1
    low = layout.origins[register][axis]
    high = low + sum(column[axis] for column in layout.thread_columns)
    if layout.vector_length > 1 and layout.vector_axis == axis:
        high += layout.vector_length - 1
    return low, high
