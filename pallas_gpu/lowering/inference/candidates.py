# SPDX-License-Identifier: Apache-2.0
"""The candidate register layouts of the arrays in each cell.

Each cell starts with the layouts that its operations require and those that suit its
loads, stores and neighbours. Layouts are then propagated through shape-changing
operations, in both directions, until a round adds none or the cell is at its limit. All
sets are sorted in one canonical order, so that the order of operations has no
influence.
"""

from __future__ import annotations

from collections.abc import Iterator

from pallas_gpu.layouts import Layout, LinearLayout
from pallas_gpu.layouts.registers.linear import THREADS, WARP_LANES
from pallas_gpu.layouts.registers.placement import Placement, place_registers
from pallas_gpu.layouts.smem.swizzle import NO_SWIZZLE, SWIZZLES
from pallas_gpu.layouts.tmem.access import register_layouts
from pallas_gpu.lowering.inference.network import Cell, Network
from pallas_gpu.lowering.inference.relations import (
    Relation,
    default,
    spread,
    where_it_fits,
)

# Candidates of a cell, beyond those that operations require.
LIMIT = 12
# Rounds of propagation through operations that change shapes.
_ROUNDS = 24
_BYTE_BITS = 8


# Two cells whose layouts are related, the relation, and the width of an element.
type _Link = tuple[Cell, Cell, Relation, int]


class Book:
    """Numbers layouts, so that each is compared and hashed once."""

    def __init__(self) -> None:
        self.layouts: list[Placement] = []
        self._numbers: dict[Placement, int] = {}
        self._order: list[tuple] = []

    def number(self, layout: Placement) -> int:
        """The number of a layout."""
        found = self._numbers.get(layout)
        if found is None:
            found = len(self.layouts)
            self._numbers[layout] = found
            self.layouts.append(layout)
            self._order.append(canonical_order(layout))
        return found

    def ordered(self, numbers: Iterator[int] | set[int] | list[int]) -> list[int]:
        """Numbers of layouts in the canonical order."""
        return sorted(set(numbers), key=self._order.__getitem__)


def canonical_order(layout: Placement) -> tuple:
    """Sorts layouts: default layouts first, then by their contents."""
    defaults = [default(layout.shape, bits) for bits in (32, 64)]
    rank = defaults.index(layout) if layout in defaults else len(defaults)
    if not isinstance(layout, LinearLayout):
        return rank, -layout.vec_size, 0, (), ()
    return (
        rank,
        -layout.vector_length,
        len(layout.replication_bits),
        layout.thread_columns,
        layout.origins,
    )


def candidates(network: Network, book: Book) -> dict[Cell, tuple[int, ...]]:
    """The numbers of each cell's candidates, in the canonical order."""
    cells = list(network.cells())
    links = list(network.links())
    around: dict[Cell, list[_Link]] = {}
    for link in links:
        for cell in {link[0], link[1]}:
            around.setdefault(cell, []).append(link)
    found: dict[Cell, set[int]] = {}
    for cell in cells:
        seeds = [*cell.required, *_natural(cell, network)]
        found[cell] = {book.number(layout) for layout in seeds}
    for source, _, relation, bits in links:
        for layout in relation.natural(source.shape, bits, _threads(source)):
            if source.admits(layout):
                found[source].add(book.number(layout))
    fresh = {cell: book.ordered(found[cell]) for cell in cells}
    for _ in range(_ROUNDS):
        fresh = _propagate(fresh, around, found, book)
        if not fresh:
            break
    return {cell: tuple(book.ordered(numbers)) for cell, numbers in found.items()}


def _propagate(
    fresh: dict[Cell, list[int]],
    around: dict[Cell, list[_Link]],
    found: dict[Cell, set[int]],
    book: Book,
) -> dict[Cell, list[int]]:
    """One round: propagates new layouts through the operations around their cells."""
    arrived: dict[Cell, set[int]] = {}
    for cell, numbers in fresh.items():
        for source, target, relation, _ in around.get(cell, ()):
            for number in numbers:
                layout = book.layouts[number]
                ways = []
                if cell is source:
                    ways.append((target, relation.forward(layout)))
                if cell is target:
                    ways.append((source, relation.backward(layout)))
                for there, made in ways:
                    if made is not None and there.admits(made):
                        arrived.setdefault(there, set()).add(book.number(made))
    result = {}
    for cell, new in arrived.items():
        have = found[cell]
        room = LIMIT + len(cell.required) - len(have)
        taken = book.ordered(new - have)[: max(room, 0)]
        if taken:
            have.update(taken)
            result[cell] = taken
    return result


# --- layouts that suit a cell ---------------------------------------------------------


def _natural(cell: Cell, network: Network) -> Iterator[Placement]:
    """Layouts that suit the loads and stores of a cell, or its neighbours."""
    for bits in sorted(cell.loads or {max(cell.bits, default=32)}):
        layout = default(cell.shape, bits, _threads(cell))
        if layout is not None:
            yield layout
    if len(cell.shape) < 2 or cell.in_warp:
        return
    for memory in cell.tmem:
        yield from register_layouts(memory.given, cell.shape, memory.bits)
    if layout is not None and not isinstance(layout, LinearLayout):
        # Broadcasts, transposes and reductions need a linear one.
        linear = spread(cell.shape)
        if linear is not None:
            yield linear
    narrow = _BYTE_BITS in cell.bits
    names = []
    if cell.in_smem or network.uses_wgmma:
        names.append(Layout.WGMMA)
        if narrow:
            names += [Layout.WGMMA_8BIT, Layout.WGMMA_UPCAST_2X]
        if cell.transposed:
            names.append(Layout.WGMMA_TRANSPOSED)
    placed = [x for name in names if (x := _placed(name, cell.shape)) is not None]
    yield from placed
    # Where WGMMA does not fit a tiled array, only runs of its tiles have no conflicts.
    if cell.in_smem and (cell.in_gmem or not placed):
        for bits in sorted(cell.loads):
            copies = (_for_copies(cell.shape, bits, s) for s in reversed(SWIZZLES))
            yield from (x for x in copies if x is not None)


def _threads(cell: Cell) -> int:
    """The number of threads that have the arrays of a cell."""
    return WARP_LANES if cell.in_warp else THREADS


_placed = where_it_fits(place_registers)


@where_it_fits
def _for_copies(shape: tuple[int, ...], bits: int, swizzle: int) -> Placement | None:
    """A layout that moves runs of bytes on both sides of a copy through registers."""
    if swizzle == NO_SWIZZLE:
        return None
    return place_registers(Layout.SMEM_GMEM_COPY(shape, bits, swizzle), shape)
