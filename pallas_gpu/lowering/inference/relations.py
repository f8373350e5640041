# SPDX-License-Identifier: Apache-2.0
"""Operations that change a shape, as functions between register layouts.

Such an operation moves nothing between threads: the operand's layout determines the
result's (for a broadcast, the result's determines the operand's). Pure integers, no
MLIR.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts import LinearLayout, default_layout, rates
from pallas_gpu.layouts.moves.reductions import least_scratch_bytes
from pallas_gpu.layouts.registers.defaults import padded_layout, spread_layout
from pallas_gpu.layouts.registers.linear import LANE_BITS, THREAD_BITS, THREADS
from pallas_gpu.layouts.registers.placement import (
    Placement,
    place_registers,
    reshape_placement,
)

# Registers of one array above which a thread spills (255 in all, CUDA C++ Programming
# Guide, "Compute Capabilities").
_MAX_REGISTERS = 255
# The widest access of a thread in bits, and the most elements of a default layout.
_ACCESS_BITS, _DEFAULT_VECTOR = 128, 4


class Relation:
    """How the layouts of an operand and its result depend on each other.

    Attributes:
      from_result: the result's layout determines the operand's, not vice versa.
    """

    from_result = False

    @property
    def requirement(self) -> str:
        """What the operation requires of its operand's layout, for messages."""
        return "the layout fits the shape"

    def forward(self, layout: Placement) -> Placement | None:
        """The result's layout for an operand's; None where data would have to move."""
        return None

    def backward(self, layout: Placement) -> Placement | None:
        """An operand's layout that maps to this result; None if none is known."""
        return None

    def natural(
        self, shape: tuple[int, ...], bits: int, threads: int = THREADS
    ) -> Iterator[Placement]:
        """Layouts of the operand, over so many threads, that suit this operation."""
        return iter(())

    def cost(self, layout: Placement, bits: int) -> float:
        """Cycles of the operation on an operand in a layout; see `layouts.rates`."""
        return 0.0

    def scratch_bytes(self, layout: Placement, bits: int) -> int | None:
        """SMEM that the operation needs; None where the layout does not permit it."""
        return 0


@dataclasses.dataclass(frozen=True)
class Reshape(Relation):
    """Row-major, from one shape to another."""

    old: tuple[int, ...]
    new: tuple[int, ...]

    @property
    def requirement(self) -> str:
        return f"the layout can be expressed in shape {self.new}"

    def forward(self, layout: Placement) -> Placement | None:
        return _reshaped(layout, self.new)

    def backward(self, layout: Placement) -> Placement | None:
        before = _reshaped(layout, self.old)
        return None if before is None or self.forward(before) != layout else before


@dataclasses.dataclass(frozen=True)
class Transpose(Relation):
    """Result axis i is axis `permutation[i]`."""

    permutation: tuple[int, ...]

    @property
    def requirement(self) -> str:
        return "the layout is linear in the bits of the thread's index"

    def forward(self, layout: Placement) -> Placement | None:
        return _transposed(layout, self.permutation)

    def backward(self, layout: Placement) -> Placement | None:
        order = self.permutation
        return _transposed(layout, tuple(order.index(a) for a in range(len(order))))


@dataclasses.dataclass(frozen=True)
class Slice(Relation):
    """A static part, whose registers are some of the operand's."""

    shape: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def requirement(self) -> str:
        return (
            f"the part of {self.sizes} at {self.starts} consists of whole registers of "
            "all threads"
        )

    def forward(self, layout: Placement) -> Placement | None:
        return _sliced(layout, self.starts, self.sizes)

    def backward(self, layout: Placement) -> Placement | None:
        """The part's layout, repeated: where the part is one of equal pieces."""
        if any(s % n for s, n in zip(self.starts, self.sizes, strict=True)):
            return None
        whole = repeated(layout, self.shape)
        return None if whole is None or self.forward(whole) is None else whole

    def natural(
        self, shape: tuple[int, ...], bits: int, threads: int = THREADS
    ) -> Iterator[Placement]:
        """A default layout of the largest pieces that the part consists of."""
        piece = tuple(map(math.gcd, shape, self.starts, self.sizes))
        layout = default(piece, bits, threads)
        whole = None if layout is None else repeated(layout, shape)
        if whole is not None and whole.num_registers <= _MAX_REGISTERS:
            yield whole


@dataclasses.dataclass(frozen=True)
class Join(Relation):
    """An operand as a part of the result, whose registers are those of all operands.

    The operands have equal shapes.
    """

    old: tuple[int, ...]
    new: tuple[int, ...]
    starts: tuple[int, ...]

    def forward(self, layout: Placement) -> Placement | None:
        whole = repeated(layout, self.new)
        return None if whole is None or self.backward(whole) != layout else whole

    def backward(self, layout: Placement) -> Placement | None:
        return _sliced(layout, self.starts, self.old)


@dataclasses.dataclass(frozen=True)
class Broadcast(Relation):
    """Operand axis i is axis `dims[i]` of the result, or has size one."""

    old: tuple[int, ...]
    new: tuple[int, ...]
    dims: tuple[int, ...]

    from_result = True

    @property
    def requirement(self) -> str:
        return "each thread already holds its elements of the result"

    def backward(self, layout: Placement) -> Placement | None:
        return _before_broadcast(layout, self)


@dataclasses.dataclass(frozen=True)
class Reduce(Relation):
    """Combines the elements along axes; `forward` is None where none is left."""

    axes: tuple[int, ...]

    @property
    def requirement(self) -> str:
        return (
            f"each bit of the thread's index moves along axes {self.axes} or along the "
            "others, never along both"
        )

    def forward(self, layout: Placement) -> Placement | None:
        return _reduced(layout, self.axes)

    def natural(
        self, shape: tuple[int, ...], bits: int, threads: int = THREADS
    ) -> Iterator[Placement]:
        """Warps along the remaining axes, so that they need not synchronize."""
        kept = [a for a in range(len(shape)) if a not in self.axes]
        if not kept:
            return
        if math.prod(shape) % (1 << THREAD_BITS) == 0:
            layout = _spread_warps(shape, tuple(kept), bits)
        else:
            layout = padded_layout(shape, tuple(kept), max(bits, 8))
        if layout is not None:
            yield layout

    def cost(self, layout: Placement, bits: int) -> float:
        """Shuffles for the lanes, SMEM and two barriers for the warps.

        A `redux` of all lanes counts as shuffles: not all operations have one.
        """
        lanes, warps, results = reduction_bits(layout, self.axes)
        words = max(1, bits // 32)
        cycles = results * lanes * words * (rates.SHUFFLE + 1)
        if warps:
            moved = results * words * (1 + (1 << warps)) * rates.SMEM_WAVEFRONT
            cycles += 4 * moved + 2 * (rates.BARRIER + rates.SMEM_LATENCY)
        return cycles

    def scratch_bytes(self, layout: Placement, bits: int) -> int | None:
        return _reduction_scratch_bytes(layout, self.axes, max(bits, 8))


def reduction_bits(layout: Placement, axes: Sequence[int]) -> tuple[int, int, int]:
    """Lane bits and warp bits along the axes, and the number of partial results."""
    if not isinstance(layout, LinearLayout):
        return LANE_BITS, THREAD_BITS - LANE_BITS, 1
    along = [any(c[a] for a in axes) for c in layout.thread_columns]
    kept = [a for a in range(layout.rank) if a not in axes]
    results = len({tuple(o[a] for a in kept) for o in layout.origins})
    if layout.vector_length > 1 and layout.vector_axis in kept:
        results *= layout.vector_length
    return sum(along[:LANE_BITS]), sum(along[LANE_BITS:]), results


# --- layouts --------------------------------------------------------------------------


def _where_it_fits[**P, T](function: Callable[P, T]) -> Callable[P, T | None]:
    """Returns a function of layouts, with a cache; None where they do not fit."""

    @functools.lru_cache(maxsize=4096)
    def cached(*args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return function(*args, **kwargs)
        except LayoutError:
            return None

    return cached  # type: ignore[return-value]


# A linear layout of any shape.
spread = _where_it_fits(spread_layout)
_reshaped = _where_it_fits(reshape_placement)
# The least SMEM that a reduction needs.
_reduction_scratch_bytes = _where_it_fits(least_scratch_bytes)


@_where_it_fits
def default(shape: tuple[int, ...], bits: int, threads: int = THREADS) -> Placement:
    """The default layout of an array; None if it does not fit registers."""
    return place_registers(default_layout(shape, max(bits, 8), threads), shape)


@functools.lru_cache(maxsize=4096)
def repeated(layout: Placement, shape: tuple[int, ...]) -> LinearLayout | None:
    """The layout of a larger array that consists of pieces in this layout."""
    if not isinstance(layout, LinearLayout):
        return None
    if any(n % piece for n, piece in zip(shape, layout.shape, strict=True)):
        return None
    if any(layout.shape[a] != shape[a] for a in layout.padded_axes):
        return None
    steps = itertools.product(
        *(range(0, n, piece) for n, piece in zip(shape, layout.shape, strict=True))
    )
    origins = [
        tuple(map(sum, zip(step, origin, strict=True)))
        for step in steps
        for origin in layout.origins
    ]
    return LinearLayout.create(
        shape,
        layout.thread_columns,
        origins,
        layout.vector_length,
        layout.vector_axis,
    )


@functools.lru_cache(maxsize=1024)
def _spread_warps(
    shape: tuple[int, ...], kept: tuple[int, ...], bits: int
) -> LinearLayout | None:
    """Four warps along the kept axes, lanes along the last axis first, vectors too."""
    last = len(shape) - 1
    rest = list(shape)
    vector = 1
    while vector < min(_DEFAULT_VECTOR, _ACCESS_BITS // bits) and rest[-1] % 2 == 0:
        vector *= 2
        rest[-1] //= 2
    warps = _distribute_bits(rest, reversed(kept), THREAD_BITS - LANE_BITS)
    lanes = _distribute_bits(rest, reversed(range(len(shape))), LANE_BITS)
    if sum(warps) + sum(lanes) != THREAD_BITS:
        return None
    step = [1] * len(shape)
    step[last] = vector
    columns: list[tuple[int, ...]] = []
    for counts in (lanes, warps):
        for axis in reversed(range(len(shape))):
            for _ in range(counts[axis]):
                columns.append(tuple(step[axis] * (a == axis) for a in range(last + 1)))
                step[axis] *= 2
    ranges = (range(0, n, s) for n, s in zip(shape, step, strict=True))
    origins = list(itertools.product(*ranges))
    return LinearLayout.create(shape, columns, origins, vector, last)


def _distribute_bits(rest: list[int], axes: Iterator[int], count: int) -> list[int]:
    """Distributes up to `count` bits over axes of even size; halves `rest`."""
    taken = [0] * len(rest)
    for axis in axes:
        while sum(taken) < count and rest[axis] % 2 == 0:
            rest[axis] //= 2
            taken[axis] += 1
    return taken


@functools.lru_cache(maxsize=4096)
def _transposed(layout: Placement, permutation: tuple[int, ...]) -> Placement | None:
    if not isinstance(layout, LinearLayout):
        return None
    return layout.transpose(permutation)


@_where_it_fits
def _sliced(
    layout: Placement, starts: tuple[int, ...], sizes: tuple[int, ...]
) -> Placement | None:
    return layout.slice(starts, sizes) if isinstance(layout, LinearLayout) else None


@functools.lru_cache(maxsize=4096)
def _reduced(layout: Placement, axes: tuple[int, ...]) -> Placement | None:
    if not isinstance(layout, LinearLayout):
        return None
    kept = [a for a in range(layout.rank) if a not in axes]
    mixed = any(
        any(c[a] for a in axes) and any(c[a] for a in kept)
        for c in layout.thread_columns
    )
    return None if mixed or not kept else layout.reduce(axes)


@functools.lru_cache(maxsize=4096)
def _before_broadcast(layout: Placement, relation: Broadcast) -> Placement | None:
    if not isinstance(layout, LinearLayout):
        return None
    sizes = dict(zip(relation.dims, relation.old, strict=True))
    gone = [a for a, n in enumerate(relation.new) if sizes.get(a, 0) != n]
    units = [
        i
        for i, (n, d) in enumerate(zip(relation.old, relation.dims, strict=True))
        if n != relation.new[d]
    ]
    result = layout.reduce(gone) if gone else layout
    return result.insert_axes(units) if units else result
