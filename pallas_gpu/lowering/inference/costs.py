# SPDX-License-Identifier: Apache-2.0
"""The cost model of inference, as the integers that the solver adds.

Costs of data movement are those of `layouts.moves.costs`. Computing one takes
milliseconds, so each starts as a cheap lower bound; the costs that occur in a solution
are then computed exactly, and the problem is solved again until all of them are exact.
The result is the same as with exact costs from the start.

A cost is multiplied by how often its operation runs. Below it, in the low bits, is a
preference that only decides between equal costs: the position of a choice in the
canonical order, times a small number that depends on the variable, so that sums of
preferences rarely tie.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from pallas_gpu import types
from pallas_gpu.layouts import LinearLayout, SmemLayout, rates
from pallas_gpu.layouts.moves import costs as moves
from pallas_gpu.layouts.moves.least_scratch import IMAGE_BYTES
from pallas_gpu.layouts.registers.linear import LANE_BITS, WARPS
from pallas_gpu.layouts.registers.placement import Placement
from pallas_gpu.layouts.smem.access_plan import MAX_WIDTH_BYTES
from pallas_gpu.layouts.smem.window import alignment_bytes, consists_of_tiles
from pallas_gpu.lowering.inference import arrays
from pallas_gpu.lowering.inference.candidates import Book
from pallas_gpu.lowering.inference.network import Edge, Move, Use, Variable
from pallas_gpu.lowering.inference.solver import INFEASIBLE

# Fractions of a cycle, and room for the preferences of many thousand variables.
_STEPS_PER_CYCLE = 4
_PREFERENCE_BITS = 20
_PREFERENCE_WEIGHTS = 8

# Estimates: the elected thread issues a tensor copy while the others continue, and the
# engine issues a request for each row of a box, of 128 bytes or fewer.
_TENSOR_COPY = 8.0
_TENSOR_ROW = 0.25
# Exceeds the bank conflicts of any array: an access declared free of bank conflicts is
# so if any layout permits it.
_UNWANTED_CONFLICT = 4096.0

Key = tuple


def scaled(cycles: float | None, weight: int) -> int:
    """The integer for a cost that is incurred `weight` times; None is infeasible."""
    if cycles is None:
        return INFEASIBLE
    return math.ceil(cycles * _STEPS_PER_CYCLE) * weight << _PREFERENCE_BITS


def preferences(count: int, key: int) -> np.ndarray:
    """A penalty per choice of a canonically ordered list, ascending."""
    return np.arange(count, dtype=np.int64) * (1 + key % _PREFERENCE_WEIGHTS)


class Costs:
    """Costs of one kernel.

    Args:
      book: the layouts, by number.
      scratch_bytes: SMEM that a relayout or a reduction may use.
      in_rounds: whether a relayout may take less than it wants.
      byte_matrices: as of `plan_access`.
    """

    def __init__(
        self,
        book: Book,
        scratch_bytes: int,
        in_rounds: bool,
        byte_matrices: bool = False,
    ):
        self._book, self._in_rounds = book, in_rounds
        self._byte_matrices = byte_matrices
        self._scratch_bytes = scratch_bytes
        self._known: dict[Key, int] = {}
        self._bounds: dict[Key, int] = {}
        self._tables: dict[tuple, np.ndarray] = {}
        self._tables_of: dict[Key, list[tuple]] = {}
        self._alignments: dict[tuple[Use, SmemLayout], int] = {}

    def room_bytes(self, in_warp: bool) -> int:
        """The scratch of a warpgroup, or of one of its warps."""
        return self._scratch_bytes // WARPS if in_warp else self._scratch_bytes

    def _can_move(self, variable: Variable) -> bool:
        """Whether operations can move data through scratch: less takes more rounds."""
        return self.room_bytes(variable.in_warp) >= IMAGE_BYTES

    def refine(self, keys: Iterable[Key]) -> bool:
        """Replaces bounds by exact costs; returns whether there were any."""
        fresh = [key for key in keys if key not in self._known]
        for key in fresh:
            self._known[key] = self._exact(key)
            for table in self._tables_of.pop(key, ()):
                self._tables.pop(table, None)
        return bool(fresh)

    def cost(self, key: Key) -> int:
        """The exact cost of one execution, or a lower bound of it."""
        known = self._known.get(key)
        if known is not None:
            return known
        bound = self._bounds.get(key)
        if bound is None:
            bound = self._bounds[key] = scaled(self._bound(key), 1)
        return bound

    def times(self, key: Key, weight: int) -> int:
        """As `cost`, of `weight` executions."""
        cost = self.cost(key)
        return INFEASIBLE if cost >= INFEASIBLE else cost * weight

    # --- keys and tables of costs -----------------------------------------------------

    def relayout_key(self, a: int, b: int, edge: Edge) -> Key | None:
        """The relayout of an edge between two layouts; None if they are equal."""
        room_bytes = self.room_bytes(edge.consumer.variable.in_warp)
        return None if a == b else ("relayout", a, b, edge.bits, room_bytes)

    def relayouts(
        self, src: tuple[int, ...], dst: tuple[int, ...], edge: Edge
    ) -> np.ndarray:
        """Costs [src, dst] of an edge's relayouts between layouts of these numbers."""
        weight = edge.weight
        table_key = src, dst, edge.bits, weight, edge.consumer.variable.in_warp
        table = self._tables.get(table_key)
        if table is None:
            keys = [[self.relayout_key(a, b, edge) for b in dst] for a in src]
            rows = [
                [0 if k is None else self.times(k, weight) for k in r] for r in keys
            ]
            for key in itertools.chain.from_iterable(keys):
                if key is not None and key not in self._known:
                    self._tables_of.setdefault(key, []).append(table_key)
            table = np.array(rows, dtype=np.int64).reshape(len(src), len(dst))
            self._tables[table_key] = table
        return table

    def gmem_key(self, variable: Variable, number: int) -> Key | None:
        """The access of a variable to GMEM, if it is one."""
        use = variable.access
        if use is None or use.part.space is not types.GMEM:
            return None
        window, bits = use.part.window, variable.bits
        if use.part.bits < 8:
            # Packed in memory, a byte each in registers.
            bits = use.part.bits
        divisor = window.start_multiple
        return "gmem", window.shape, window.strides, number, bits, divisor

    def smem_key(self, use: Use, storage: SmemLayout, number: int, bits: int) -> Key:
        """The load or store of a part of an array in SMEM."""
        part, store = use.part, use.kind == "store"
        aligned = self._alignments.get((use, storage))
        if aligned is None:
            aligned = alignment_bytes(storage, part.window)
            aligned = min(aligned, MAX_WIDTH_BYTES)
            self._alignments[use, storage] = aligned
        cut = not consists_of_tiles(storage, part.window)
        window, how = part.window, (store, use.optimized, aligned, cut)
        return "smem", storage, window.sizes, window.order, number, bits, how

    def operation(self, variable: Variable, number: int) -> int:
        """Cost of an operation on an operand in a layout, without accesses to SMEM."""
        layout = self._book.layouts[number]
        relation, weight = variable.relation, variable.weight
        if relation is not None:
            needed = relation.scratch_bytes(layout, variable.bits)
            if needed is None or needed > self.room_bytes(variable.in_warp):
                return INFEASIBLE
            return scaled(relation.cost(layout, variable.bits), weight)
        if variable.moved_bits:
            if not self._can_move(variable):
                return INFEASIBLE
            cycles = moves.scratch_access_cost(layout, variable.moved_bits)
            return scaled(cycles + moves.EXCHANGE_CYCLES / 2, weight)
        if variable.cycles_per_element:
            elements = layout.num_registers * layout.vector_length
            return scaled(elements * variable.cycles_per_element, weight)
        key = self.gmem_key(variable, number)
        return 0 if key is None else self.times(key, weight)

    def moves(self, move: Move, src: Sequence[int], dst: Sequence[int]) -> np.ndarray:
        """Costs [src, dst] of an operation that renames registers or moves data."""
        layouts = self._book.layouts
        loads = [moves.scratch_access_cost(layouts[b], move.operand.bits) for b in dst]
        can_move, rows = self._can_move(move.operand), []
        for a in src:
            renamed = move.relation.forward(layouts[a])
            fixed = moves.scratch_access_cost(layouts[a], move.operand.bits)
            fixed += moves.EXCHANGE_CYCLES
            rows.append(
                [
                    scaled(
                        rates.RENAME
                        if layouts[b] == renamed
                        else fixed + load
                        if can_move
                        else None,
                        move.operand.weight,
                    )
                    for b, load in zip(dst, loads, strict=True)
                ]
            )
        return np.array(rows, dtype=np.int64).reshape(len(src), len(dst))

    def copy(self, use: Use, storage: SmemLayout) -> int:
        """Cost of a feasible TMA copy."""
        plan = arrays.copy_plan(use, arrays.as_used(use, storage))
        if plan is None:
            return scaled(_TENSOR_COPY, use.weight)
        row = min(plan.dims[-1].box * plan.element_bits // 8, rates.WAVEFRONT_BYTES)
        count = len(plan.instructions)
        rows = count * plan.box_bytes / row
        return scaled(count * _TENSOR_COPY + rows * _TENSOR_ROW, use.weight)

    # --- bounds and exact costs -------------------------------------------------------

    def _bound(self, key: Key) -> float | None:
        layouts = self._book.layouts
        match key:
            case ("relayout", a, b, bits, room_bytes):
                return _relayout_bound(layouts[a], layouts[b], bits, room_bytes)
            case ("gmem", shape, _, _, bits, _):
                size = math.prod(shape) * max(bits, 8) // 8
                return size / rates.GMEM_BYTES_PER_CYCLE
            case ("smem", storage, sizes, *_):
                size = math.prod(sizes) * storage.itemsize_bits // 8
                return size / rates.WAVEFRONT_BYTES
        raise AssertionError(key)

    def _exact(self, key: Key) -> int:
        layouts = self._book.layouts
        match key:
            case ("relayout", a, b, bits, room_bytes):
                cost = moves.relayout_cost(
                    layouts[a], layouts[b], bits, room_bytes, self._in_rounds
                )
                return scaled(cost, 1)
            case ("gmem", shape, strides, number, bits, divisor):
                layout = layouts[number]
                cost = moves.gmem_access_cost(shape, strides, layout, bits, divisor)
                return scaled(cost, 1)
            case ("smem", storage, sizes, order, number, bits, how):
                store, optimized, aligned, cut = how
                each = moves.element_access_cost(layouts[number], bits)
                by_element = scaled(each + _UNWANTED_CONFLICT, 1)
                ordered = arrays.in_memory_order(order, layouts[number])
                if cut or ordered is None:
                    return by_element
                given = store, aligned, self._byte_matrices
                cost = moves.smem_access_cost(storage, sizes, ordered, bits, *given)
                if cost is None:
                    return by_element
                best = (storage, sizes, ordered, bits, *given, True)
                free = moves.smem_access_cost(*best) is not None
                return scaled(cost + (optimized and not free) * _UNWANTED_CONFLICT, 1)
        raise AssertionError(key)


def _relayout_bound(
    src: Placement, dst: Placement, bits: int, scratch_bytes: int
) -> float | None:
    """A lower bound: half the bytes through SMEM if warps exchange elements.

    None without scratch for them.
    """
    if not isinstance(src, LinearLayout) or not isinstance(dst, LinearLayout):
        return 0.0
    before, after = _warp_bits(src), _warp_bits(dst)
    if before is None or after is None or before == after:
        return 0.0
    if scratch_bytes < IMAGE_BYTES:
        return None
    moved = math.prod(src.shape) * max(bits, 8) / 16
    rounds = math.ceil(moved / scratch_bytes)
    return 2 * moved / rates.WAVEFRONT_BYTES + rounds * rates.SMEM_LATENCY


def _warp_bits(layout: LinearLayout) -> frozenset[tuple[int, ...]] | None:
    """The coordinate bits that select the warp; None if it depends on others."""
    columns = layout.thread_columns[LANE_BITS:]
    single = all(
        sum(x != 0 for x in column) == 1 and max(column).bit_count() == 1
        for column in columns
    )
    return frozenset(columns) if single else None
