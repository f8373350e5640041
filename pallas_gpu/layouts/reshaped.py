# SPDX-License-Identifier: Apache-2.0
"""A window of an array, seen as one of the same array in another shape.

The elements of an array are in memory in row-major order whatever its shape, so a
window of it may be a window of the array in another shape. It is if the dimensions that
are merged or split are adjacent: all but the first of them are whole.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts.window import Window

# Coordinates of copies are 32 bits wide (PTX ISA, "Tensor coordinates").
_MAX_SIZE = 2**31


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """How dynamic starts are computed.

    Attributes:
      times: multiplies a start by a positive integer.
      over: divides a start by a positive integer that divides it.
    """

    times: Callable[[Any, int], Any]
    over: Callable[[Any, int], Any]


@dataclasses.dataclass(frozen=True)
class _Range:
    """A range of an axis of an array.

    Attributes:
      n: size of the axis.
      start, size: the range.
      known: a divisor of the start; 0 for a start of 0.
    """

    n: int
    start: Any
    size: int
    known: int

    @property
    def is_whole(self) -> bool:
        return self.size == self.n and isinstance(self.start, int) and self.start == 0


def reshape(window: Window, shape: Sequence[int], by: Arithmetic) -> Window:
    """Returns the window of another array of the same bytes, which has a shape.

    Args:
      shape: of the result, with the same elements in the same order.
      by: how dynamic starts are computed.

    Raises:
      LayoutError: the elements are not a window of such an array.

      >>> by = Arithmetic(lambda a, n: a * n, lambda a, n: a // n)
      >>> rows = Window.whole((64, 128)).slice((16, 0), (8, 128))
      >>> reshape(rows, (2, 4, 128), by)
      Window(array_shape=(16, 4, 128), starts=(4, 0, 0), sizes=(2, 4, 128), \
axes=(0, 1, 2), multiples=(4, 0, 0))
    """
    ranges = [_Range(*r) for r in zip(
        window.array_shape, window.starts, window.sizes, window.multiples, strict=True
    )]  # fmt: skip
    inside = window.known_inside()
    units = [a for a in window.axes if window.sizes[a] == 1 and inside[a]]
    axes = [a for a in window.axes if a not in units]
    sizes = [n for n in shape if n != 1]
    # Axis of the array -> the ranges that replace it, from its first kept one on.
    replaced: dict[int, list[_Range]] = {
        a: [] if r.n == 1 and r.is_whole else [r] for a, r in enumerate(ranges)
    }
    # For each dimension of the result of more than one element: axis, and which range.
    order: list[tuple[int, int]] = []
    for old, new in groups([window.sizes[a] for a in axes], sizes):
        mine = [axes[i] for i in old]
        parts = _merged_and_split(
            [ranges[a] for a in mine],
            [sizes[i] for i in new],
            _are_adjacent(mine, window.array_shape),
            window,
            tuple(shape),
            by,
        )
        for a in mine:
            replaced[a] = []
        first = mine[0]
        replaced[first] = parts
        order += [(first, i) for i in range(len(parts))]
    return _assembled(replaced, order, shape)


def _assembled(
    replaced: dict[int, list[_Range]],
    order: Sequence[tuple[int, int]],
    shape: Sequence[int],
) -> Window:
    """The window of an array that has all of these ranges, and axes of one element."""
    wanted = iter(order)
    # The axes of the result, and before which of them there are ones.
    kept: list[tuple[int, int] | None] = [
        None if n == 1 else next(wanted) for n in shape
    ]
    ones: dict[tuple[int, int] | None, list[int]] = {}
    following = None
    for position in reversed(range(len(kept))):
        if kept[position] is None:
            ones.setdefault(following, []).insert(0, position)
        else:
            following = kept[position]
    flat: list[_Range] = []
    axes = [0] * len(kept)
    positions = {place: i for i, place in enumerate(kept) if place is not None}

    def add_ones(place: tuple[int, int] | None) -> None:
        for position in ones.get(place, ()):
            axes[position] = len(flat)
            flat.append(_Range(1, 0, 1, 0))

    for a, parts in replaced.items():
        for i, part in enumerate(parts):
            add_ones((a, i))
            if (a, i) in positions:
                axes[positions[a, i]] = len(flat)
            flat.append(part)
    add_ones(None)
    return Window(
        tuple(r.n for r in flat),
        tuple(r.start for r in flat),
        tuple(r.size for r in flat),
        tuple(axes),
        tuple(r.known for r in flat),
    )


def _are_adjacent(axes: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether no other axis of more than one element lies between some axes."""
    if list(axes) != sorted(axes):
        return False
    between = [a for a in range(axes[0], axes[-1] + 1) if a not in axes]
    return all(shape[a] == 1 for a in between)


def groups(
    before: Sequence[int], after: Sequence[int]
) -> list[tuple[list[int], list[int]]]:
    """The shortest runs of axes with equal products, before and after."""
    result: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        old, new = list[int](), list[int]()
        m = n = 1
        while not new or m != n:
            if i < len(before) and (m <= n or j == len(after)):
                m *= before[i]
                old.append(i)
                i += 1
            elif j < len(after):
                n *= after[j]
                new.append(j)
                j += 1
            else:
                break
        result.append((old, new))
    if result and not result[-1][1] and len(result) > 1:
        # Axes of one element at the end, which are not known to be in bounds.
        old, _ = result.pop()
        result[-1][0].extend(old)
    return result


def _merged_and_split(
    ranges: Sequence[_Range],
    sizes: Sequence[int],
    adjacent: bool,
    window: Window,
    shape: tuple[int, ...],
    by: Arithmetic,
) -> list[_Range]:
    """The ranges of axes of these sizes that are the same elements."""
    if len(ranges) == len(sizes) == 1:
        return list(ranges)
    first, *rest = ranges
    if not adjacent or not all(r.is_whole for r in rest):
        raise _refused(
            window,
            shape,
            "the dimensions of a reshape are not adjacent in memory",
            "a part that has all of the dimensions that are merged or split, in order, "
            "except for the first of them",
        )
    factor = math.prod(r.n for r in rest)
    inner = math.prod(sizes[1:])
    total = first.n * factor
    known = first.known * factor
    if total % inner or known % inner:
        raise _refused(
            window,
            shape,
            "a reshape splits a dimension at other places than the array",
            f"a dimension and a start known to be multiples of {inner}",
        )
    n = total // inner
    if n >= _MAX_SIZE:
        raise _refused(
            window,
            shape,
            "a reshape makes a dimension that copies cannot address",
            f"dimensions of less than 2**31 elements of the array, not {n}",
        )
    start = _scaled(first, factor, inner, by)
    size = first.size * factor // inner
    outer = _Range(n, start, size, known // inner)
    return [outer, *(_Range(k, 0, k, 0) for k in sizes[1:])]


def _scaled(first: _Range, factor: int, divisor: int, by: Arithmetic) -> Any:
    """The start times a factor over a divisor, which divides the product."""
    if isinstance(first.start, int):
        return first.start * factor // divisor
    common = math.gcd(factor, divisor)
    factor, divisor = factor // common, divisor // common
    start = first.start if factor == 1 else by.times(first.start, factor)
    return start if divisor == 1 else by.over(start, divisor)


def reinterpret(
    window: Window, bits_before: int, bits_after: int, by: Arithmetic
) -> Window:
    """Returns the window of the same bytes as elements of another width.

    The last dimension of the window changes, as in NumPy's `array.view(dtype)`.

    Args:
      bits_before, bits_after: widths of the elements, of 8 bits or more.
      by: how dynamic starts are computed.

    Raises:
      LayoutError: the bytes are not whole elements of an array.

      >>> by = Arithmetic(lambda a, n: a * n, lambda a, n: a // n)
      >>> reinterpret(Window.whole((8, 64)), 16, 32, by).array_shape
      (8, 32)
    """
    if bits_before == bits_after:
        return window
    last = len(window.array_shape) - 1
    if not window.axes or window.axes[-1] != last:
        raise LayoutError(
            "bitcast to another width: elements are not adjacent along the last "
            "dimension",
            expected="the last dimension of the array as the last one of the part",
            got=f"dimensions {window.axes} of {window.array_shape}",
            hint="bitcast the reference first, then index: ref.bitcast(dtype).at[...]",
        )
    common = math.gcd(bits_before, bits_after)
    factor, divisor = bits_before // common, bits_after // common
    numbers = [window.array_shape[last], window.sizes[last], window.multiples[last]]
    if any(number * factor % divisor for number in numbers):
        raise LayoutError(
            "bitcast to another width: not whole elements",
            expected=f"a last dimension, a start and a size known to be multiples of "
            f"{divisor} elements of {bits_before} bits",
            got=f"{numbers[1]} of {numbers[0]}, from a multiple of {numbers[2]}",
            hint="bitcast the reference first, then index: ref.bitcast(dtype).at[...]",
        )
    n, size, known = (number * factor // divisor for number in numbers)
    old = _Range(numbers[0], window.starts[last], numbers[1], numbers[2])
    return Window(
        (*window.array_shape[:-1], n),
        (*window.starts[:-1], _scaled(old, factor, divisor, by)),
        (*window.sizes[:-1], size),
        window.axes,
        (*window.multiples[:-1], known),
    )


def _refused(
    window: Window, shape: tuple[int, ...], what: str, expected: str
) -> LayoutError:
    starts = tuple(x if isinstance(x, int) else "dynamic" for x in window.starts)
    return LayoutError(
        what,
        expected=expected,
        got=f"the part of sizes {window.sizes}, from {starts}, of shape "
        f"{window.array_shape}, in the shape {shape}",
        hint="reshape the reference first, then index: ref.reshape(...).at[...]; or "
        "give the other side of the copy the shape of this one",
    )
