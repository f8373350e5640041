# SPDX-License-Identifier: Apache-2.0
"""A slice of an array in any memory: its starts, its sizes, its axes.

References, views of SMEM, GMEM and TMEM, and the emulator's memory all represent a part
of an array by a `Window`. A slice or a transpose of a window is a window of the same
array, so a chain of such operations needs no intermediate arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from pallas_gpu.errors import InternalError


@dataclasses.dataclass(frozen=True, slots=True)
class Sum:
    """A start that is known only at run time: a constant plus opaque terms.

    Attributes:
      constant: the static part.
      terms: values to add to it, opaque to this class.
    """

    constant: int
    terms: tuple[Any, ...]

    def __add__(self, other: Any) -> Sum:
        if isinstance(other, Sum):
            return Sum(self.constant + other.constant, self.terms + other.terms)
        return Sum(self.constant + other, self.terms)

    __radd__ = __add__

    def total(self, add: Callable[[Any, Any], Any]) -> Any:
        """Sums the terms, then the constant unless it is 0."""
        result = self.terms[0]
        for term in self.terms[1:]:
            result = add(result, term)
        return add(result, self.constant) if self.constant else result


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """A slice of an array: a range on each axis, some of them squeezed, and an order.

    A start is an int or a dynamic value: a `Sum`, a value of an IR. Windows never
    compute with dynamic values; the caller passes a function to add two starts.

    Attributes:
      starts: first index on each axis of the array.
      sizes: number of elements on each axis of the array; 1 on a squeezed one.
      axes: the axes of the array that the window has, in the window's order. A missing
        axis was indexed by an integer.
      multiples: for each axis a known divisor of the start; 0 for a start of 0.

      >>> Window.whole((4, 64, 128)).slice((2, 8, 0), (None, 16, 128)).transpose((1, 0))
      Window(array_shape=(4, 64, 128), starts=(2, 8, 0), sizes=(1, 16, 128), \
axes=(2, 1), multiples=(2, 8, 0))
    """

    array_shape: tuple[int, ...]
    starts: tuple[Any, ...]
    sizes: tuple[int, ...]
    axes: tuple[int, ...]
    multiples: tuple[int, ...]

    def __post_init__(self) -> None:
        rank = len(self.array_shape)
        if not rank == len(self.starts) == len(self.sizes) == len(self.multiples):
            raise InternalError(
                "a window does not have one range per axis of its array",
                expected=f"{rank} starts, sizes and multiples",
                got=f"{len(self.starts)}, {len(self.sizes)}, {len(self.multiples)}",
            )

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Window:
        """Returns the window of a whole array."""
        shape, rank = tuple(shape), len(shape)
        return cls(shape, (0,) * rank, shape, tuple(range(rank)), (0,) * rank)

    # --- properties -------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the window: the sizes of its axes, in its order."""
        return tuple([self.sizes[a] for a in self.axes])

    @property
    def kept(self) -> tuple[bool, ...]:
        """For each axis of the array whether the window has it."""
        return tuple([a in self.axes for a in range(len(self.sizes))])

    @property
    def squeezed(self) -> tuple[int, ...]:
        """The axes of the array that the window does not have."""
        return tuple([a for a in range(len(self.sizes)) if a not in self.axes])

    @property
    def order(self) -> tuple[int, ...]:
        """For each axis of the window its position among the kept axes of the array."""
        kept = sorted(self.axes)
        return tuple([kept.index(a) for a in self.axes])

    @property
    def is_transposed(self) -> bool:
        """Whether the axes are out of the array's order."""
        return list(self.axes) != sorted(self.axes)

    @property
    def is_whole(self) -> bool:
        """Whether the window is the array itself."""
        rank = len(self.array_shape)
        return (
            self.sizes == self.array_shape
            and self.axes == tuple(range(rank))
            and not self.dynamic
            and not any(self.starts)
        )

    @property
    def dynamic(self) -> tuple[int, ...]:
        """The axes of the array whose start is not an int."""
        return tuple([a for a, s in enumerate(self.starts) if not isinstance(s, int)])

    @property
    def array_strides(self) -> tuple[int, ...]:
        """The row-major stride of each axis of the array, in elements."""
        return _strides(self.array_shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """As `array_strides`, for each axis of the window."""
        strides = self.array_strides
        return tuple([strides[a] for a in self.axes])

    @property
    def start_multiple(self) -> int:
        """A known divisor of the offset of the first element.

        The offset counts elements of a row-major array; 0 is an offset of 0.
        """
        pairs = zip(self.multiples, self.array_strides, strict=True)
        return math.gcd(*[multiple * stride for multiple, stride in pairs])

    # --- bounds -----------------------------------------------------------------------

    def over_the_edge(self) -> list[int]:
        """Returns the axes of the array on which the window is known to exceed it."""
        ranges = zip(self.starts, self.sizes, self.array_shape, strict=True)
        return [
            a
            for a, (start, size, n) in enumerate(ranges)
            if size > n or (isinstance(start, int) and (start < 0 or start + size > n))
        ]

    def known_inside(self) -> tuple[bool, ...]:
        """Returns for each axis of the array whether it is known to be in bounds.

        An integer index must be in bounds.
        """
        ranges = zip(self.starts, self.sizes, self.array_shape, strict=True)
        return tuple(
            a not in self.axes or (isinstance(start, int) and 0 <= start <= n - size)
            for a, (start, size, n) in enumerate(ranges)
        )

    def box(self) -> tuple[tuple[int, int], ...]:
        """Returns for each axis the start and end of the part inside of the array.

        The starts must be ints. The end is at or before the start if it is empty.
        """
        return tuple(
            [
                (min(max(start, 0), n), max(min(start + size, n), 0))
                for start, size, n in zip(
                    self.starts, self.sizes, self.array_shape, strict=True
                )
            ]
        )

    # --- windows of windows -----------------------------------------------------------

    def slice(
        self,
        starts: Sequence[Any],
        sizes: Sequence[int | None],
        multiples: Sequence[int] | None = None,
        *,
        add: Callable[[Any, Any], Any] = operator.add,
    ) -> Window:
        """Returns a slice of the window.

        Args:
          starts: for each axis of the window, relative to the window.
          sizes: for each axis of the window; None is an integer index, which squeezes
            the axis.
          multiples: a known divisor of each start; without it nothing is known about
            dynamic starts.
          add: adds two starts, at least one of them dynamic.
        """
        new_starts, new_sizes = list(self.starts), list(self.sizes)
        new_multiples, left = list(self.multiples), []
        for i, (axis, start, size) in enumerate(
            zip(self.axes, starts, sizes, strict=True)
        ):
            known = start if isinstance(start, int) else 1
            if multiples is not None:
                known = multiples[i]
            new_multiples[axis] = math.gcd(new_multiples[axis], known)
            new_starts[axis] = added(new_starts[axis], start, add)
            if isinstance(new_starts[axis], int):
                new_multiples[axis] = abs(new_starts[axis])
            new_sizes[axis] = 1 if size is None else size
            if size is not None:
                left.append(axis)
        return Window(
            self.array_shape,
            tuple(new_starts),
            tuple(new_sizes),
            tuple(left),
            tuple(new_multiples),
        )

    def transpose(self, permutation: Sequence[int]) -> Window:
        """Returns the window whose axis i is axis `permutation[i]` of this one."""
        axes = tuple([self.axes[p] for p in permutation])
        return Window(self.array_shape, self.starts, self.sizes, axes, self.multiples)

    def behind(self, starts: Sequence[Any], sizes: Sequence[int]) -> Window:
        """Returns the window in an array with more axes in front, which are indexed.

        Args:
          starts: the index on each axis in front; nothing is known of it.
        """
        count = len(sizes)
        return Window(
            (*sizes, *self.array_shape),
            (*starts, *self.starts),
            (*(1,) * count, *self.sizes),
            tuple([axis + count for axis in self.axes]),
            (*(1,) * count, *self.multiples),
        )

    def reinterpreted(self, shape: Sequence[int]) -> Window:
        """Returns all of the window as an array of another shape, in the same bytes.

        Its axes are the last ones of the array, whole and in order.
        """
        lead = len(self.sizes) - len(self.axes)
        whole = Window.whole(self.array_shape[lead:])
        behind = self.starts[lead:], self.sizes[lead:], self.axes
        if behind != (whole.starts, whole.sizes, tuple(range(lead, len(self.sizes)))):
            raise InternalError("A part of an array is reinterpreted", got=self)
        zeros, shape = (0,) * len(shape), tuple(shape)
        return Window(
            self.array_shape[:lead] + shape,
            self.starts[:lead] + zeros,
            self.sizes[:lead] + shape,
            tuple(range(lead, lead + len(shape))),
            self.multiples[:lead] + zeros,
        )

    def at(
        self, starts: Sequence[Any], multiples: Sequence[int] | None = None
    ) -> Window:
        """Returns a window of the same form that starts elsewhere in the array.

        Args:
          starts: for each axis of the array, from the array's first element.
          multiples: a known divisor of each start; without it, those of this window.
        """
        return Window(
            self.array_shape,
            tuple(starts),
            self.sizes,
            self.axes,
            self.multiples if multiples is None else tuple(multiples),
        )


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the stride of each axis of a row-major array, in elements.

    >>> row_major_strides((4, 64, 128))
    (8192, 128, 1)
    """
    strides = [1] * len(shape)
    for axis in reversed(range(len(shape) - 1)):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


_strides = functools.lru_cache(maxsize=1024)(row_major_strides)


def is_contiguous(array_shape: Sequence[int], sizes: Sequence[int]) -> bool:
    """Returns whether a slice of a row-major array is contiguous.

    Only the outermost axis of more than one element may be shorter than the array's.

    >>> is_contiguous((4, 8, 64), (1, 4, 64)), is_contiguous((4, 8, 64), (1, 4, 32))
    (True, False)
    """
    pairs = enumerate(zip(array_shape, sizes, strict=True))
    last = max((axis for axis, (n, size) in pairs if n != size), default=0)
    return all(size == 1 for size in sizes[:last])


def added(a: Any, b: Any, add: Callable[[Any, Any], Any]) -> Any:
    """Returns a sum of indices; `add` is for what is no number."""
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    # No instruction is emitted for a start of 0.
    if isinstance(a, int) and a == 0:
        return b
    if isinstance(b, int) and b == 0:
        return a
    return add(a, b)
