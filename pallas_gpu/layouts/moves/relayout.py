# SPDX-License-Identifier: Apache-2.0
"""Plans the conversion of an array from one register layout to another.

The plan with the lowest cost is selected among three strategies: the registers of a
thread are renamed, lanes of a warp exchange words (`shuffle.py`), or the array is
stored to scratch in SMEM and loaded again (`exchange.py`; row-major for layouts that
are not linear over GF(2), and in rounds where the scratch is too small for others).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence

from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts.moves import rates
from pallas_gpu.layouts.moves.binary import BinaryLayout, Slot, binary_layout
from pallas_gpu.layouts.moves.exchange import Exchange, plan_exchanges
from pallas_gpu.layouts.moves.least_scratch import IMAGE_BYTES, MOST_ROUNDS
from pallas_gpu.layouts.moves.shuffle import Shuffle, plan_shuffles
from pallas_gpu.layouts.registers.descriptions import WGStridedLayout
from pallas_gpu.layouts.registers.linear import LANE_BITS, WARPS, LinearLayout
from pallas_gpu.layouts.registers.placement import Placement
from pallas_gpu.layouts.smem.access import plan_access
from pallas_gpu.layouts.smem.access_plan import Kind
from pallas_gpu.layouts.smem.layout import SmemLayout

# Large enough for the pieces of most pairs of layouts; see `plan_relayout`.
_AMPLE_SCRATCH_BYTES = 8192
_WORD_BITS = 32
# The cost of many rounds: more, in loops, would exceed the integers that are added up.
_MOST_CYCLES = 1e6

# For each register of the destination the sources of its elements.
Sources = tuple[tuple[Slot, ...], ...]


@dataclasses.dataclass(frozen=True)
class Rename:
    """Every thread holds its elements already, in the same slots: registers regroup."""

    sources: Sources


@dataclasses.dataclass(frozen=True)
class RowMajor:
    """The whole array is stored in SMEM, row-major: for layouts without binary form."""

    smem: SmemLayout


@dataclasses.dataclass(frozen=True)
class RelayoutPlan:
    """The conversion of one layout to another.

    Attributes:
      method: the strategy and its plan.
      cost: issue cycles of the warpgroup; see `rates.py`.
      scratch_bytes: SMEM that it uses; more than available if that does not suffice:
        then it is a rearrangement, row-major and in rounds.
    """

    method: Rename | Shuffle | Exchange | RowMajor
    cost: float
    scratch_bytes: int = 0


# Widths of elements that relayouts convert; a bool has 1.
RELAYOUT_BITS = (1, 8, 16, 32, 64)


def plan_relayout(
    src: Placement, dst: Placement, bits: int, scratch_bytes: int | None = None
) -> RelayoutPlan:
    """Plans a relayout.

    Args:
      src: the current layout. Any copy of a replicated element may be read.
      dst: the new layout; replicated elements are copied.
      bits: width of an element, 8, 16, 32 or 64; a bool's, 1, counts as a byte.
      scratch_bytes: SMEM that may be used; None for 8 KiB, or more if that does not
        suffice.

    Raises:
      LayoutError: the shapes differ, or the width is not one of these.
    """
    if src.shape != dst.shape or bits not in RELAYOUT_BITS:
        raise LayoutError(
            "a relayout must keep the shape, and elements must be whole bytes",
            expected=f"shape {src.shape}, elements of 1, 8, 16, 32 or 64 bits",
            got=f"shape {dst.shape}, elements of {bits} bits",
        )
    available = _AMPLE_SCRATCH_BYTES if scratch_bytes is None else scratch_bytes
    plan = _plan(src, dst, bits, available, scratch_bytes is None, False)
    assert plan is not None
    return plan


def plan_within(
    src: Placement, dst: Placement, bits: int, scratch_bytes: int, in_rounds: bool
) -> RelayoutPlan | None:
    """Plans a relayout of one shape; None, and early, if there is no scratch for it."""
    plan = _plan(src, dst, bits, scratch_bytes, False, True)
    if plan is not None and plan.scratch_bytes <= scratch_bytes:
        return plan
    return _in_rounds(src, dst, bits, scratch_bytes) if in_rounds else None


@functools.lru_cache(maxsize=512)
def _plan(
    src: Placement,
    dst: Placement,
    bits: int,
    available: int,
    may_ask: bool,
    must_fit: bool,
) -> RelayoutPlan | None:
    if not (isinstance(src, LinearLayout) and isinstance(dst, LinearLayout)):
        src, dst = _in_one_row(src, dst)
    sources = _rename_sources(src, dst)
    if sources is not None:
        return RelayoutPlan(Rename(sources), _regrouping(sources, bits))
    # Shuffles and memory have no single-bit elements.
    bools = bits == 1
    bits = max(bits, 8)
    conversions = 0.0
    if bools:
        elements = _elements(src) + _elements(dst)
        conversions = elements * rates.CONVERT
    plans = [
        RelayoutPlan(shuffle, conversions + _shuffle_cost(shuffle, src, dst, bits))
        for shuffle in _shuffles(src, dst, bits)
    ]
    through = [
        dataclasses.replace(plan, cost=plan.cost + conversions)
        for plan in _through_smem(src, dst, bits, available, must_fit)
        if may_ask or plan.scratch_bytes <= available or not plans
    ]
    return min([*plans, *through], key=lambda plan: plan.cost, default=None)


def _elements(layout: Placement) -> int:
    return layout.num_registers * layout.vector_length


def _in_one_row(src: Placement, dst: Placement) -> tuple[Placement, Placement]:
    """The two layouts reshaped to a single row, if they have binary forms there."""
    size = (math.prod(src.shape),)
    try:
        rows = [
            layout.reshape(size)
            if isinstance(layout, LinearLayout)
            else WGStridedLayout(size, layout.vec_size).linear()
            for layout in (src, dst)
        ]
    except LayoutError:
        return src, dst
    return (src, dst) if _binary_forms(*rows) is None else (rows[0], rows[1])


def _rename_sources(src: Placement, dst: Placement) -> Sources | None:
    if not (isinstance(src, LinearLayout) and isinstance(dst, LinearLayout)):
        return None
    elements = dst.broadcast_elements(src, range(dst.rank))
    if elements is None:
        return None
    return tuple(tuple((r, v) for r, v in row) for row in elements.tolist())


# --- within a warp --------------------------------------------------------------------


def _shuffles(src: Placement, dst: Placement, bits: int) -> list[Shuffle]:
    pair = _binary_forms(src, dst)
    return [] if pair is None else plan_shuffles(*pair, bits)


def _binary_forms(
    src: Placement, dst: Placement
) -> tuple[BinaryLayout, BinaryLayout] | None:
    if not (isinstance(src, LinearLayout) and isinstance(dst, LinearLayout)):
        return None
    before, after = binary_layout(src), binary_layout(dst)
    return None if before is None or after is None else (before, after)


def _shuffle_cost(plan: Shuffle, src: Placement, dst: Placement, bits: int) -> float:
    # Elements of 64 bits are exchanged as two words.
    each = max(bits // _WORD_BITS, 1)
    cost = each * (plan.moves * rates.SHUFFLE + plan.selects * rates.SELECT)
    cost += _regrouping(plan.packs, bits)
    return cost + _regrouping(filled(plan.places, dst), bits)


# --- through SMEM ---------------------------------------------------------------------


def _through_smem(
    src: Placement, dst: Placement, bits: int, available: int, must_fit: bool
) -> list[RelayoutPlan]:
    if must_fit and math.prod(src.shape) * bits // 8 > MOST_ROUNDS * available:
        return []
    pair = _binary_forms(src, dst)
    exchanges = [] if pair is None else plan_exchanges(*pair, bits, available)
    plans = [
        RelayoutPlan(plan, _exchange_cost(plan, dst, bits), plan.scratch_bytes)
        for plan in exchanges
    ]
    return plans or [_row_major(src, dst, bits)]


def _exchange_cost(exchange: Exchange, dst: Placement, bits: int) -> float:
    store, load = exchange.store, exchange.load
    cost = 0.0
    for units, conditions in zip(store.units, store.conditions, strict=True):
        # Warps whose threads all have nothing to store issue no stores.
        masks = [*(1 << b for b in exchange.idle_bits), *(m for m, _ in conditions)]
        storing = WARPS >> sum(mask % (1 << LANE_BITS) == 0 for mask in masks)
        cost += len(units) * storing * store.wavefronts * rates.SMEM_WAVEFRONT
    # Every thread loads from every part, and selects its own elements.
    loads = sum(map(len, load.units))
    cost += loads * WARPS * load.wavefronts * rates.SMEM_WAVEFRONT
    kept = sum(
        len(units) * max(len(units[0]) * bits // _WORD_BITS, 1)
        for units, conditions in zip(load.units, load.conditions, strict=True)
        if conditions
    )
    cost += kept * rates.SELECT
    cost += _barrier_cost(len(exchange.rounds), exchange.within_warps)
    for units in store.units:
        cost += _regrouping(units, bits)
    places = [unit for units in load.units for unit in units]
    cost += _regrouping(filled(places, dst), bits)
    return cost


def _barrier_cost(rounds: int, within_warps: bool = False) -> float:
    """Barriers: all earlier reads precede the stores, all stores precede the loads."""
    if within_warps:
        # Any warp may still be reading the earlier contents.
        meetings = rates.BARRIER + (2 * rounds - 1) * rates.WARP_BARRIER
    else:
        meetings = 2 * rounds * rates.BARRIER
    return meetings + rounds * rates.SMEM_LATENCY


def _row_major(src: Placement, dst: Placement, bits: int) -> RelayoutPlan:
    smem = SmemLayout(src.shape, bits)
    cost = _barrier_cost(1)
    accesses: tuple[tuple[Placement, Kind], ...] = ((src, "store"), (dst, "load"))
    for layout, kind in accesses:
        plan = plan_access(layout, smem, kind=kind, optimized=False)
        count = len(plan.instructions) * plan.wavefronts_per_access * WARPS
        cost += count * rates.SMEM_WAVEFRONT
    return RelayoutPlan(RowMajor(smem), cost, smem.size_bytes)


def _in_rounds(
    src: Placement, dst: Placement, bits: int, available: int
) -> RelayoutPlan | None:
    """Row-major through less scratch than the array takes: each round tests all."""
    if available < IMAGE_BYTES:
        return None
    smem = SmemLayout(src.shape, max(bits, 8))
    rounds = -(-smem.size_bytes // available)
    accesses = _elements(src) + _elements(dst)
    each = rates.SELECT + WARPS * rates.SMEM_WAVEFRONT
    cost = _barrier_cost(rounds) + rounds * accesses * each
    return RelayoutPlan(RowMajor(smem), min(cost, _MOST_CYCLES), available)


# --- registers ------------------------------------------------------------------------


def filled(places: Iterable[Sequence[Slot]], dst: Placement) -> Sources:
    """The sources of the elements of each register.

    Args:
      places: for each word or unit, in order, the slots of `dst` that it holds.
      dst: the layout.

    Returns:
      For each register its elements as (index of the word, position in it).
    """
    table: list[list[Slot]] = [
        [(0, 0)] * dst.vector_length for _ in range(dst.num_registers)
    ]
    for number, slots in enumerate(places):
        for place, (register, element) in enumerate(slots):
            table[register][element] = (number, place)
    return tuple(map(tuple, table))


def _regrouping(groups: Iterable[Sequence[Slot]], bits: int) -> float:
    """Cycles to assemble vectors from elements of other vectors."""
    per_word = max(_WORD_BITS // max(bits, 8), 1)
    if per_word == 1:
        return rates.RENAME
    count = 0
    for group in groups:
        for start in range(0, len(group), per_word):
            part = group[start : start + per_word]
            register, first = part[0]
            run = [(register, first + i) for i in range(len(part))]
            if first % per_word == 0 and list(part) == run:
                continue
            words = {(r, v // per_word) for r, v in part}
            # prmt selects from the bytes of two words.
            count += max(len(words) - 1, 1)
    return count * rates.PERMUTE


def scratch_bytes(
    src: Placement, dst: Placement, bits: int, available_bytes: int
) -> int:
    """Returns the scratch of a relayout; more than is available where less cannot do.

    Args:
      bits: width of an element; 1 for a bool.
    """
    if src == dst:
        return 0
    return plan_relayout(src, dst, bits, available_bytes).scratch_bytes
