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
from collections.abc import Callable, Iterable, Iterator

from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts import LinearLayout, default_layout, rates
from pallas_gpu.layouts.moves.reductions import plan_reduction
from pallas_gpu.layouts.registers.defaults import (
    layout_along,
    padded_layout,
    spread_layout,
)
from pallas_gpu.layouts.registers.linear import THREAD_BITS, THREADS
from pallas_gpu.layouts.registers.placement import (
    Placement,
    place_registers,
    reshape_placement,
)

# Registers of one array above which a thread spills (255 in all, CUDA C++ Programming
# Guide, "Compute Capabilities").
_MAX_REGISTERS = 255


def where_it_fits[**P, T](function: Callable[P, T]) -> Callable[P, T | None]:
    """Returns a function of layouts, with a cache; None where they do not fit."""

    @functools.lru_cache(maxsize=4096)
    def cached(*args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return function(*args, **kwargs)
        except LayoutError:
            return None

    return cached  # type: ignore[return-value]


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

    def renamed(
        self, layout: Placement, result: Placement
    ) -> Iterable[tuple[int, int]] | None:
        """The registers of an operand that are ones of the result, as pairs.

        None where data has to move between these layouts.
        """
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

    def renamed(
        self, layout: Placement, result: Placement
    ) -> Iterable[tuple[int, int]] | None:
        same = self.forward(layout) == result
        return enumerate(range(layout.num_registers)) if same else None


@dataclasses.dataclass(frozen=True)
class Transpose(Relation):
    """Result axis i is axis `permutation[i]`."""

    permutation: tuple[int, ...]

    @property
    def requirement(self) -> str:
        return "the layout is linear in the bits of the thread's index"

    @where_it_fits
    def forward(self, layout: Placement) -> Placement | None:
        if not isinstance(layout, LinearLayout):
            return None
        return layout.transpose(self.permutation)

    def backward(self, layout: Placement) -> Placement | None:
        order = self.permutation
        inverse = tuple(order.index(a) for a in range(len(order)))
        return Transpose(inverse).forward(layout)


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

    def renamed(
        self, layout: Placement, result: Placement
    ) -> Iterable[tuple[int, int]] | None:
        if not isinstance(layout, LinearLayout) or self.forward(layout) != result:
            return None
        chosen = layout.slice_registers(self.starts, self.sizes)
        return [(own, to) for to, own in enumerate(chosen)]

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

    def renamed(
        self, layout: Placement, result: Placement
    ) -> Iterable[tuple[int, int]] | None:
        if not isinstance(result, LinearLayout) or self.backward(result) != layout:
            return None
        return enumerate(result.slice_registers(self.starts, self.old))


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

    @where_it_fits
    def backward(self, layout: Placement) -> Placement | None:
        if not isinstance(layout, LinearLayout):
            return None
        sizes = dict(zip(self.dims, self.old, strict=True))
        gone = [a for a, n in enumerate(self.new) if sizes.get(a, 0) != n]
        units = [
            i
            for i, (n, d) in enumerate(zip(self.old, self.dims, strict=True))
            if n != self.new[d]
        ]
        result = layout.reduce(gone) if gone else layout
        return result.insert_axes(units) if units else result


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
        plan = _reduction(layout, self.axes)
        return None if plan is None else plan.result

    def natural(
        self, shape: tuple[int, ...], bits: int, threads: int = THREADS
    ) -> Iterator[Placement]:
        """Warps along the remaining axes, so that they need not synchronize."""
        kept = [a for a in range(len(shape)) if a not in self.axes]
        if not kept:
            return
        if math.prod(shape) % (1 << THREAD_BITS) == 0:
            layout = layout_along(shape, tuple(kept), bits)
        else:
            layout = padded_layout(shape, tuple(kept), max(bits, 8))
        if layout is not None:
            yield layout

    def cost(self, layout: Placement, bits: int) -> float:
        """Shuffles for the lanes, SMEM and two barriers for the warps.

        A `redux` of all lanes counts as shuffles: not all operations have one.
        """
        plan = _reduction(layout, self.axes)
        if plan is None:
            return 0.0
        moved: float = len(plan.groups) * plan.length * max(1, bits // 32)
        cycles = moved * len(plan.lanes) * (rates.SHUFFLE + 1)
        if plan.warps:
            moved *= (1 + (1 << len(plan.warps))) * rates.SMEM_WAVEFRONT
            cycles += 4 * moved + 2 * (rates.BARRIER + rates.SMEM_LATENCY)
        return cycles

    def scratch_bytes(self, layout: Placement, bits: int) -> int | None:
        plan = _reduction(layout, self.axes)
        return None if plan is None else plan.least_bytes(bits)


# --- layouts --------------------------------------------------------------------------


# A linear layout of any shape.
spread = where_it_fits(spread_layout)
_reshaped = where_it_fits(reshape_placement)
_reduction = where_it_fits(plan_reduction)


@where_it_fits
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


@where_it_fits
def _sliced(
    layout: Placement, starts: tuple[int, ...], sizes: tuple[int, ...]
) -> Placement | None:
    return layout.slice(starts, sizes) if isinstance(layout, LinearLayout) else None
