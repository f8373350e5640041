# SPDX-License-Identifier: Apache-2.0
"""The cost model of data movement: between layouts, from and to SMEM and GMEM.

Costs are issue cycles of one warpgroup; `moves/rates.py` has the rates. All functions
are cached: inference calls them thousands of times.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts.gmem.access import GmemAccess, plan_gmem
from pallas_gpu.layouts.moves import rates
from pallas_gpu.layouts.moves.relayout import RELAYOUT_BITS, plan_relayout, plan_within
from pallas_gpu.layouts.registers.linear import WARP_LANES, WARPS
from pallas_gpu.layouts.registers.placement import Placement
from pallas_gpu.layouts.smem.access import plan_access
from pallas_gpu.layouts.smem.access_plan import MAX_WIDTH_BYTES
from pallas_gpu.layouts.smem.layout import SmemLayout
from pallas_gpu.layouts.smem.vector_access import PartialBytesError

# Estimates, of accesses that compute an address for each element: divisions into tiles,
# products with strides, swizzle; and conflicts of two lanes.
_ADDRESS_INSTRUCTIONS = 10
_ELEMENT_WAVEFRONTS = 2


@functools.lru_cache(maxsize=8192)
def relayout_cost(
    src: Placement,
    dst: Placement,
    bits: int,
    scratch_bytes: int | None = None,
    in_rounds: bool = True,
) -> float | None:
    """Cycles to convert an array from one layout to another.

    Args:
      src: the current layout.
      dst: the new layout, of the same shape.
      bits: width of an element; 1 for a bool.
      scratch_bytes: SMEM that may be used; None for the default.
      in_rounds: whether less than it wants will do.

    Returns:
      0 if registers are only renamed; None if the shapes differ or the scratch is too
      small.
    """
    if src == dst:
        return rates.RENAME
    if scratch_bytes is not None and src.shape == dst.shape and bits in RELAYOUT_BITS:
        fitting = plan_within(src, dst, bits, scratch_bytes, in_rounds)
        return None if fitting is None else fitting.cost
    try:
        plan = plan_relayout(src, dst, bits, scratch_bytes)
    except LayoutError:
        return None
    return plan.cost


# Wavefronts of an access to an element that shares its byte with others: a guess, which
# makes any layout of whole bytes cheaper.
_SINGLE_ELEMENT = 8


@functools.lru_cache(maxsize=8192)
def smem_access_cost(
    smem: SmemLayout,
    window: tuple[int, ...],
    placement: Placement,
    bits: int,
    store: bool,
    base_alignment_bytes: int = MAX_WIDTH_BYTES,
    byte_matrices: bool = False,
    optimized: bool = False,
) -> float | None:
    """Cycles to load or store a slice of an array in SMEM.

    Args:
      smem: the whole array. For a transposed view transpose the placement instead.
      window: shape of the slice in the array's rank.
      placement: the layout in registers.
      bits: width of an element in registers; 1 for a bool, a byte in memory.
      store: registers to SMEM.
      base_alignment_bytes: a known divisor of the slice's address.
      byte_matrices: as of `plan_access`.
      optimized: whether it is to have no bank conflicts, which cost their replays.

    Returns:
      None if no instructions can access the slice so.
    """
    try:
        plan = plan_access(
            placement,
            smem,
            kind="store" if store else "load",
            window=window,
            optimized=optimized,
            base_alignment_bytes=base_alignment_bytes,
            byte_matrices=byte_matrices,
        )
    except PartialBytesError:
        # Each element is read alone, or updated by two atomic operations.
        elements = placement.num_registers * placement.vector_length
        return WARPS * elements * _SINGLE_ELEMENT * rates.SMEM_WAVEFRONT
    except LayoutError:
        return None
    wavefronts = WARPS * len(plan.instructions) * plan.wavefronts_per_access
    words = max(1, plan.elements_per_access * smem.itemsize_bits // 32)
    selects = sum(2 * len(stagger.pairs) for stagger in plan.staggers) * words
    result = wavefronts * rates.SMEM_WAVEFRONT + selects * rates.SELECT
    return result + _bool_conversions(placement, bits)


def element_access_cost(placement: Placement, bits: int) -> float:
    """Cycles of an access to SMEM that computes the address of each element.

    Args:
      placement: the layout in registers.
      bits: width of an element in registers; 1 for a bool, a byte in memory.
    """
    elements = placement.num_registers * placement.vector_length
    wavefronts = _ELEMENT_WAVEFRONTS * WARPS * rates.SMEM_WAVEFRONT
    each = wavefronts + _ADDRESS_INSTRUCTIONS * rates.SELECT
    return elements * each + _bool_conversions(placement, bits)


@functools.lru_cache(maxsize=8192)
def gmem_access_cost(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    placement: Placement,
    bits: int,
    base_divisor_elems: int = 0,
) -> float | None:
    """Cycles to load or store a slice of an array in GMEM.

    Args:
      shape: of the slice, as the registers have it.
      strides: the slice's stride along each axis, in elements.
      placement: the layout in registers.
      bits: width of an element in memory; 1 for a bool, which takes a byte.
      base_divisor_elems: a known divisor of the slice's start, in elements; 0 for the
        start of the array.

    Returns:
      None if the shapes differ or no instructions can access the slice.
    """
    if placement.shape != shape:
        return None
    memory_bits = 8 if bits == 1 else bits
    try:
        plan = plan_gmem(placement, strides, memory_bits, base_divisor_elems)
    except LayoutError:
        return None
    if plan.elements_per_access * memory_bits < 8:
        elements = placement.num_registers * placement.vector_length
        return WARPS * elements * _SINGLE_ELEMENT * rates.SMEM_WAVEFRONT
    requests = gmem_requests(plan, memory_bits)
    cycles = requests.sectors * rates.SECTOR_BYTES / rates.GMEM_BYTES_PER_CYCLE
    cycles += requests.number * rates.GMEM_INSTRUCTION
    return cycles + _bool_conversions(placement, bits)


class Requests(NamedTuple):
    """The instructions of the warps for an access to GMEM.

    Attributes:
      number: of instructions.
      sectors: that they transfer, all together.
      ideal_sectors: the fewest that hold the elements.
      wasted: the sectors of all requests together for one that the elements take: the
        L1 cache has what several requests need.
    """

    number: int
    sectors: int
    ideal_sectors: float
    wasted: float


@functools.lru_cache(maxsize=1024)
def gmem_requests(plan: GmemAccess, bits: int) -> Requests:
    """Returns the requests of an access to elements of a byte or more."""
    starts = np.sort(plan.offsets().T.reshape(-1, WARP_LANES), axis=1)
    sectors = starts * bits // (8 * rates.SECTOR_BYTES)
    moved = len(starts) + int((sectors[:, 1:] != sectors[:, :-1]).sum())
    different = len(starts) + int((starts[:, 1:] != starts[:, :-1]).sum())
    needed = different * plan.elements_per_access * bits / (8 * rates.SECTOR_BYTES)
    elements = len(np.unique(starts)) * plan.elements_per_access * bits
    wasted = len(np.unique(sectors)) * 8 * rates.SECTOR_BYTES / elements
    return Requests(len(starts), moved, max(needed, len(starts)), wasted)


@functools.lru_cache(maxsize=8192)
def scratch_access_cost(placement: Placement, bits: int) -> float:
    """Cycles to store an array to scratch, or to load one: row-major, no conflicts.

    Args:
      placement: the layout in registers.
      bits: width of an element in registers; 1 for a bool, a byte in memory.
    """
    itemsize = max(bits, 8) // 8
    width = min(placement.vector_length, max(MAX_WIDTH_BYTES // itemsize, 1))
    accesses = placement.num_registers * placement.vector_length / width
    words = max(width * itemsize / 4, 1)
    cycles = WARPS * accesses * words * rates.SMEM_WAVEFRONT
    return cycles + _bool_conversions(placement, bits)


# Two barriers: before the stores, as threads may still be reading what was there, and
# before the loads.
EXCHANGE_CYCLES = 2 * rates.BARRIER + rates.SMEM_LATENCY


def _bool_conversions(placement: Placement, bits: int) -> float:
    """A bool is a byte in memory and a predicate in a register."""
    if bits != 1:
        return 0.0
    return placement.num_registers * placement.vector_length * rates.CONVERT
