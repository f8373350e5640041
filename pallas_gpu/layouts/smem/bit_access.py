# SPDX-License-Identifier: Apache-2.0
"""Where single elements are in SMEM, in bits: those that do not fill whole bytes."""

from __future__ import annotations

import functools

from pallas_gpu.layouts.registers.placement import Placement
from pallas_gpu.layouts.smem.access import bit_offsets
from pallas_gpu.layouts.smem.access_plan import split_threads
from pallas_gpu.layouts.smem.layout import SmemLayout


@functools.lru_cache(maxsize=256)
def plan_bits(
    layout: Placement, smem: SmemLayout, window: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Returns the offsets in bits of a thread's elements, before the swizzle.

    Args:
      layout: the layout in registers.
      smem: the whole array.
      window: shape of the slice, from whose start the offsets count.

    Returns:
      Seven constants, of which those of the set bits of the thread index are added; a
      constant for each element of each register, in order; the replication bits.

    Raises:
      LayoutError: the shapes do not match, or the offsets are not such sums.
    """
    offsets, replication = bit_offsets(layout, smem, window)
    columns, statics = split_threads(offsets.reshape(offsets.shape[0], -1))
    return tuple(columns), tuple(statics), replication
