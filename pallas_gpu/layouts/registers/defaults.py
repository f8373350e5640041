# SPDX-License-Identifier: Apache-2.0
"""The default layout of arrays of any shape."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts.registers.descriptions import WGStridedLayout, vector_length
from pallas_gpu.layouts.registers.linear import (
    LANE_BITS,
    THREAD_BITS,
    THREADS,
    WARP_LANES,
    LinearLayout,
)

# Up to this many elements per thread a layout without padding is preferred, even if
# few threads hold all elements: no access needs a predicate.
_FEW_ELEMENTS = 16
# GMEM transfers sectors of 32 bytes; a run of elements that starts anywhere touches one
# more than it fills. Layouts are the same for all types of at most 32 bits.
_SECTOR_BYTES, _ELEMENT_BYTES = 32, 4


def default_layout(
    shape: Sequence[int], bits: int, threads: int = THREADS
) -> WGStridedLayout | LinearLayout:
    """Returns the default layout of an array.

    It is strided if all threads have the same number of elements. Any other shape is
    spread over as many threads as its powers of two allow, minor dimension first, and
    replicated over the rest: (4, 3) is held by four threads with three registers each,
    and has 32 copies. If that leaves too many elements to a thread, the array is padded
    to a box of powers of two times whole registers: (100, 77) to (104, 80).

    Args:
      shape: the array's shape.
      bits: width of an element.
      threads: those of a warpgroup, or of a warp. An array of a warp has a layout in
        which no element depends on the warp: each warp holds one of its own.
    """
    shape = tuple(shape)
    if threads == WARP_LANES:
        return _strided_in_warp(shape, bits) or spread_layout(shape, bits, threads)
    if math.prod(shape) % THREADS == 0:
        return WGStridedLayout.default(shape, bits)
    return spread_layout(shape, bits)


@functools.lru_cache(maxsize=1024)
def _strided_in_warp(shape: tuple[int, ...], bits: int) -> LinearLayout | None:
    """Row-major elements cyclically over the lanes, as in `WGStridedLayout.default`.

    None if the lanes do not have equally many elements, or it is not linear.
    """
    size = math.prod(shape)
    if size % WARP_LANES:
        return None
    vector = vector_length(size, bits, WARP_LANES)
    lane = np.arange(THREADS) % WARP_LANES * vector
    register = np.arange(0, size, WARP_LANES * vector)
    flat = lane[:, None, None] + register[None, :, None] + np.arange(vector)
    coordinates = np.stack(np.unravel_index(flat, shape), axis=-1)
    try:
        return LinearLayout.from_coordinates(shape, coordinates)
    except LayoutError:
        return None


@functools.lru_cache(maxsize=1024)
def spread_layout(
    shape: tuple[int, ...], bits: int = 32, threads: int = THREADS
) -> LinearLayout:
    """Returns a linear layout of any shape, padded if that saves registers."""
    most = threads.bit_length() - 1
    exact, blocks = _powers_of_two(shape, most)
    owned = math.prod(blocks)
    padded = _padded(shape, bits, None, most)
    if padded is None or owned <= max(_FEW_ELEMENTS, 2 * padded.elements - 1):
        return _laid_out(shape, exact, 1)
    return _laid_out(shape, padded.bits, padded.vector)


@functools.lru_cache(maxsize=1024)
def word_layout(shape: tuple[int, ...], axis: int, elements: int) -> LinearLayout:
    """Returns a layout in which a thread has whole words of several elements.

    Args:
      shape: the array's shape.
      axis: along which the elements of a word are consecutive; words divide it.
      elements: of a word.
    """

    def widened(place: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(x * elements if i == axis else x for i, x in enumerate(place))

    words = tuple(n // elements if i == axis else n for i, n in enumerate(shape))
    layout = spread_layout(words)
    if layout.vector_length > 1 and layout.vector_axis != axis:
        layout = _laid_out(words, _powers_of_two(words)[0], 1)
    return LinearLayout(
        shape,
        tuple(map(widened, layout.thread_columns)),
        tuple(map(widened, layout.origins)),
        layout.vector_length * elements,
        axis,
    )


@functools.lru_cache(maxsize=1024)
def padded_layout(
    shape: tuple[int, ...], warp_axes: tuple[int, ...], bits: int = 32
) -> LinearLayout | None:
    """Returns a linear layout of an array whose warps are along the given axes.

    Args:
      shape: the array's shape.
      warp_axes: axes along which warps hold different parts.
      bits: width of an element.

    Returns:
      None if the axes are too short for four warps.
    """
    best = _padded(shape, bits, warp_axes)
    if best is None:
        return None
    return _laid_out(shape, best.bits, best.vector, best.warps)


@functools.lru_cache(maxsize=1024)
def layout_along(
    shape: tuple[int, ...], warp_axes: tuple[int, ...], bits: int
) -> LinearLayout | None:
    """As `padded_layout`, of an array that powers of two divide among all threads.

    Lanes and vectors are along the last axis first.
    """
    vector = vector_length(shape[-1], bits)
    rest = (*shape[:-1], shape[-1] // vector)
    warps, left = _powers_of_two(rest, THREAD_BITS - LANE_BITS, warp_axes)
    lanes, _ = _powers_of_two(tuple(left), LANE_BITS)
    if sum(warps) + sum(lanes) != THREAD_BITS:
        return None
    both = tuple(map(sum, zip(warps, lanes, strict=True)))
    return _laid_out(shape, both, vector, warps)


# --- choices --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Choice:
    """Thread bits along each axis, all and those of warps, and the vector's length."""

    shape: tuple[int, ...]
    bits: tuple[int, ...]
    warps: tuple[int, ...]
    vector: int

    @functools.cached_property
    def registers(self) -> int:
        """Registers per thread."""
        tile = [1 << b for b in self.bits]
        tile[-1] *= self.vector
        return math.prod(-(-n // t) for n, t in zip(self.shape, tile, strict=True))

    @property
    def elements(self) -> int:
        """Elements per thread, with padding."""
        return self.registers * self.vector

    @property
    def cost(self) -> tuple:
        """Cycles of an elementwise operation and of accesses to GMEM, roughly."""
        lanes = _lane_bits(self)
        run_bytes = (self.vector << lanes[-1]) * _ELEMENT_BYTES
        runs = 1 << sum(lanes[:-1])
        sectors = runs * (run_bytes / _SECTOR_BYTES + 1)
        cycles = 4 * self.elements + self.registers * sectors
        return cycles, self.bits[::-1], -self.vector


def _lane_bits(choice: _Choice) -> tuple[int, ...]:
    """Lane bits along each axis."""
    return tuple(b - w for b, w in zip(choice.bits, choice.warps, strict=True))


@functools.lru_cache(maxsize=1024)
def _padded(
    shape: tuple[int, ...],
    bits: int,
    warp_axes: tuple[int, ...] | None = None,
    thread_bits: int = THREAD_BITS,
) -> _Choice | None:
    """The cheapest choice; None if there are no axes, or too few warps along them."""
    if not shape:
        return None
    most = [(n - 1).bit_length() for n in shape]
    choices = []
    for i in range(vector_length(shape[-1], bits).bit_length()):
        vector = 1 << i
        most[-1] = (shape[-1] // vector - 1).bit_length()
        for taken in _distributions(tuple(most), min(sum(most), thread_bits)):
            warps = _warp_bits(taken, warp_axes)
            if warps is not None:
                choices.append(_Choice(shape, taken, warps, vector))
    return min(choices, key=lambda choice: choice.cost, default=None)


def _distributions(most: tuple[int, ...], count: int) -> Iterator[tuple[int, ...]]:
    """All ways to distribute `count` bits over axes that take at most `most` each."""
    if not most:
        if count == 0:
            yield ()
        return
    for taken in range(min(most[0], count) + 1):
        if count - taken <= sum(most[1:]):
            for rest in _distributions(most[1:], count - taken):
                yield taken, *rest


def _warp_bits(
    bits: tuple[int, ...], axes: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    """The bits of the warp: the last ones, first along the major axes."""
    wanted = max(0, sum(bits) - LANE_BITS)
    if axes is not None and wanted < THREAD_BITS - LANE_BITS:
        return None
    taken = [0] * len(bits)
    for axis in range(len(bits)) if axes is None else axes:
        taken[axis] = min(bits[axis], wanted - sum(taken))
    return tuple(taken) if sum(taken) == wanted else None


# --- layouts --------------------------------------------------------------------------


def _powers_of_two(
    shape: tuple[int, ...],
    most: int = THREAD_BITS,
    axes: Sequence[int] | None = None,
) -> tuple[tuple[int, ...], list[int]]:
    """Thread bits along each axis without padding, and the elements that remain."""
    bits, blocks = [0] * len(shape), list(shape)
    for axis in reversed(range(len(shape)) if axes is None else axes):
        while blocks[axis] % 2 == 0 and sum(bits) < most:
            bits[axis] += 1
            blocks[axis] //= 2
    return tuple(bits), blocks


def _laid_out(
    shape: tuple[int, ...],
    bits: tuple[int, ...],
    vector: int,
    warps: tuple[int, ...] | None = None,
) -> LinearLayout:
    """Threads along the axes, minor dimension first, lanes before warps."""
    rank = len(shape)
    warps = warps or (0,) * rank
    step = [1] * rank
    if vector > 1:
        step[-1] = vector
    columns: list[tuple[int, ...]] = []
    for counts in ([b - w for b, w in zip(bits, warps, strict=True)], warps):
        for axis in reversed(range(rank)):
            for _ in range(counts[axis]):
                columns.append(tuple(step[axis] * (a == axis) for a in range(rank)))
                step[axis] *= 2
    columns += [(0,) * rank] * (THREAD_BITS - len(columns))
    ranges = [range(0, n, t) for n, t in zip(shape, step, strict=True)]
    origins = list(itertools.product(*ranges))
    return LinearLayout.create(shape, columns, origins, vector, max(rank - 1, 0))
