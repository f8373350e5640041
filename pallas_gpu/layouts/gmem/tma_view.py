# SPDX-License-Identifier: Apache-2.0
"""The strided views of a GMEM array that a tensor map can describe.

A dimension of the array is either one dim of the view, or split at tile boundaries into
several. The former is exact for every start and size; the latter only if the array and
the start are multiples of the tile, else out-of-bounds elements would not be detected.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

from pallas_gpu.layouts.smem.swizzle import NO_SWIZZLE

# CUDA driver API, cuTensorMapEncodeTiled.
MAX_RANK = 5
MAX_BOX = 256
INNER_BOX_BYTES = 16
STRIDE_BYTES = 16
MAX_STRIDE_BYTES = 1 << 40
# The driver encodes sizes up to 2**32; coordinates are .s32 (PTX ISA).
MAX_SIZE = 1 << 31


@functools.lru_cache(maxsize=1024)
def divisors(n: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    return tuple(d for d in range(1, n + 1) if n % d == 0)


@dataclasses.dataclass(frozen=True)
class PhysicalDim:
    """A dim of the SMEM array: `size` steps of `stride` along a GMEM dimension.

    In SMEM the steps are `smem_stride` elements apart.
    """

    gmem_dim: int
    size: int
    stride: int
    smem_stride: int

    def loop_over(self, parts: int) -> PhysicalDim:
        """The loop over `parts` equal runs."""
        run = self.size // parts
        return PhysicalDim(
            self.gmem_dim, parts, self.stride * run, self.smem_stride * run
        )

    def shrunk(self, parts: int) -> PhysicalDim:
        """One of `parts` equal runs."""
        return dataclasses.replace(self, size=self.size // parts)

    def split(self, multiple: int) -> list[PhysicalDim]:
        """Two dims if one box side is too short; the inner is a `multiple`."""
        if self.size <= MAX_BOX:
            return [self]
        chunks = [d for d in divisors(self.size) if d <= MAX_BOX and d % multiple == 0]
        if not chunks:
            return [self]
        parts = self.size // chunks[-1]
        return [self.loop_over(parts), self.shrunk(parts)]


@dataclasses.dataclass(frozen=True)
class Source:
    """A slice start: `start * multiplier // divisor` is added to a coordinate."""

    gmem_dim: int
    multiplier: int = 1
    divisor: int = 1


@dataclasses.dataclass(frozen=True)
class ViewDim:
    """One dim of a tensor map.

    Attributes:
      size: in elements; larger coordinates are out of the array's bounds.
      stride_elems: the stride in elements of the array.
      stride_bytes: the stride in bytes (the hardware ignores the innermost dim's).
      box: the number of elements per copy.
      sources: the dynamic slice starts whose sum is the coordinate.
    """

    size: int
    stride_elems: int
    stride_bytes: int
    box: int
    sources: tuple[Source, ...]

    def coordinate(self, starts: Sequence[int]) -> int:
        """The sum of the sources."""
        return sum(starts[s.gmem_dim] * s.multiplier // s.divisor for s in self.sources)

    def with_source(self, gmem_dim: int, times: int = 1, divided: int = 1) -> ViewDim:
        """The dim with the start of one dimension counted in other units."""
        sources = tuple(
            Source(gmem_dim, s.multiplier * times, s.divisor * divided)
            if s.gmem_dim == gmem_dim
            else s
            for s in self.sources
        )
        return dataclasses.replace(self, sources=sources)

    def static_addend(self, moved: Mapping[int, int]) -> int:
        """The same sum for static distances per GMEM dimension."""
        return sum(
            moved.get(s.gmem_dim, 0) * s.multiplier // s.divisor for s in self.sources
        )


@dataclasses.dataclass(frozen=True)
class _Group:
    """Adjacent physical dims that form one side of the box."""

    gmem_dim: int
    box: int
    stride: int


@dataclasses.dataclass(frozen=True)
class SlicedArray:
    """An array in GMEM and the known facts about the slice's starts.

    Attributes:
      shape: of the whole array.
      element_bits: width of an element.
      squeezed: dimensions indexed by an integer.
      known: for each dimension a divisor of the start; 0 is a start of 0.
      inside: for each dimension whether the slice is known to be in bounds.
      order: the dimensions that are not squeezed, in the order of SMEM.
    """

    shape: tuple[int, ...]
    element_bits: int
    squeezed: tuple[int, ...]
    known: tuple[int, ...]
    inside: tuple[bool, ...]
    order: tuple[int, ...]

    @property
    def strides(self) -> list[int]:
        """The stride of each dimension, in elements."""
        return [math.prod(self.shape[g + 1 :]) for g in range(len(self.shape))]


def build_view(
    array: SlicedArray,
    box_dims: Sequence[PhysicalDim],
    loops: Sequence[PhysicalDim],
    swizzle: int,
) -> tuple[ViewDim, ...] | None:
    """The tensor map whose boxes are `box_dims`, or None if there is no exact one."""
    groups = _merge(box_dims, swizzle)
    strides = array.strides
    inner = groups[-1]
    if strides[inner.gmem_dim] != 1 or inner.stride != 1:
        return None
    inner_bits = inner.box * array.element_bits
    if inner_bits % (8 * INNER_BOX_BYTES):
        return None
    if swizzle != NO_SWIZZLE and inner_bits != 8 * swizzle:
        return None
    if any(group.box > MAX_BOX for group in groups):
        return None
    view: list[ViewDim | None] = [None] * len(groups)
    for g in {group.gmem_dim for group in groups}:
        mine = [i for i, group in enumerate(groups) if group.gmem_dim == g]
        sides = [groups[i] for i in mine]
        steps = [x for x in loops if x.gmem_dim == g]
        if _splits_exactly(sides[0].stride, array.shape[g], array.known[g], steps):
            dims = _split_dims(array, strides[g], sides)
        elif array.inside[g]:
            dims = _overlapping_dims(array, strides[g], sides)
        else:
            return None
        for i, dim in zip(mine, dims, strict=True):
            view[i] = dim
    lead = _idle_dims(array, {x.gmem_dim for x in groups}, MAX_RANK - len(view))
    if lead is None:
        return None
    result = (*lead, *(dim for dim in view if dim is not None))
    return result if all(_encodable(d) for d in result[:-1]) else None


def _split_dims(
    array: SlicedArray, stride: int, sides: Sequence[_Group]
) -> list[ViewDim]:
    """The dimension split at multiples of each side's stride."""
    g, size, dims = sides[0].gmem_dim, array.shape[sides[0].gmem_dim], []
    for i, side in enumerate(sides):
        sources = () if i else (Source(g, 1, side.stride),)
        count = size // side.stride
        dims.append(_view_dim(array, count, stride * side.stride, side.box, sources))
        size = side.stride
    return dims


def _overlapping_dims(
    array: SlicedArray, stride: int, sides: Sequence[_Group]
) -> list[ViewDim]:
    """The dimension viewed from any start: the outer dims only add multiples of a tile.

    They are not bounded by the array, so the slice must be in bounds.
    """
    *outer, inner = sides
    size, dims = array.shape[inner.gmem_dim], []
    for side in outer:
        dims.append(_view_dim(array, side.box, stride * side.stride, side.box, ()))
        size -= (side.box - 1) * side.stride
    sources = (Source(inner.gmem_dim),)
    return [*dims, _view_dim(array, size, stride, inner.box, sources)]


def _merge(dims: Sequence[PhysicalDim], swizzle: int) -> list[_Group]:
    """Joins adjacent dims that are contiguous, up to the size of a box."""
    groups: list[_Group] = []
    for dim in reversed(dims):
        if dim.size == 1 and groups:
            continue
        inner = groups[-1] if groups else None
        joins = (
            inner is not None
            and inner.gmem_dim == dim.gmem_dim
            and inner.stride * inner.box == dim.stride
            and inner.box * dim.size <= MAX_BOX
            # The innermost side of a swizzled box is one swizzled row.
            and (len(groups) > 1 or swizzle == NO_SWIZZLE)
        )
        if joins and inner is not None:
            groups[-1] = dataclasses.replace(inner, box=inner.box * dim.size)
        else:
            groups.append(_Group(dim.gmem_dim, dim.size, dim.stride))
    return groups[::-1]


def _splits_exactly(
    tile: int, size: int, known: int, loops: Sequence[PhysicalDim]
) -> bool:
    return (
        size % tile == 0
        and known % tile == 0
        and all(loop.stride % tile == 0 for loop in loops if loop.size > 1)
    )


def _view_dim(
    array: SlicedArray, size: int, elems: int, box: int, sources: tuple[Source, ...]
) -> ViewDim:
    stride_bits = elems * array.element_bits
    if size == 1:
        # Only element 0 exists, so any stride is correct; use one that can be encoded.
        unit = 8 * STRIDE_BYTES
        stride_bits = max(unit, -(-stride_bits // unit) * unit)
    whole = stride_bits % 8 == 0
    return ViewDim(size, elems, stride_bits // 8 if whole else 0, box, sources)


def _encodable(dim: ViewDim) -> bool:
    return (
        1 <= dim.size <= MAX_SIZE
        and 0 < dim.stride_bytes < MAX_STRIDE_BYTES
        and dim.stride_bytes % STRIDE_BYTES == 0
    )


def _idle_dims(array: SlicedArray, busy: set[int], room: int) -> list[ViewDim] | None:
    """View dims for dimensions along which a box has one element.

    If there are too many, those along which the slice is in bounds share one, that need
    not represent the bounds between them: first those indexed by integers.
    """
    shape, strides = array.shape, array.strides
    idle = [g for g in range(len(shape)) if g not in busy]
    folded: list[int] = []
    if len(idle) > room:
        indexed = [g for g in idle if g in array.squeezed or shape[g] == 1]
        others = [g for g in idle if g not in indexed and array.inside[g]]
        candidates = indexed + others
        folded = candidates[: len(idle) - room + 1]
        if len(idle) - len(folded) + bool(folded) > room:
            return None
    dims = []
    if folded:
        real = [g for g in folded if shape[g] > 1]
        step = math.gcd(*(strides[g] for g in real)) or 1
        sources = tuple(Source(g, strides[g] // step) for g in real)
        size = 1 + sum((shape[g] - 1) * (strides[g] // step) for g in real)
        dims.append(_view_dim(array, size, step, 1, sources))
    for g in idle:
        if g not in folded:
            dims.append(_view_dim(array, shape[g], strides[g], 1, (Source(g),)))
    return dims
