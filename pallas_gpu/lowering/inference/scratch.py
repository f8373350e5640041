# SPDX-License-Identifier: Apache-2.0
"""SMEM that reductions need in addition to the kernel's own."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts.moves.reductions import least_scratch_bytes
from pallas_gpu.layouts.registers.placement import Placement


def for_reduction(layout: Placement, axes: Sequence[int], bits: int) -> int | None:
    """The least that a reduction needs; None where its layout does not allow it."""
    return _for_reduction(layout, tuple(axes), max(bits, 8))


@functools.lru_cache(maxsize=2048)
def _for_reduction(layout: Placement, axes: tuple[int, ...], bits: int) -> int | None:
    try:
        return least_scratch_bytes(layout, axes, bits)
    except LayoutError:
        return None
