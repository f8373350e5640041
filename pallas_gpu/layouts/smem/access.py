# SPDX-License-Identifier: Apache-2.0
"""Plans how a warpgroup transfers an array between registers and shared memory.

Two methods are tried: plain loads and stores of up to 16 bytes per lane, and ldmatrix /
stmatrix if the registers match their fragments. Both should be free of bank conflicts,
if necessary by staggering (see `stagger.py`); the one with fewer instructions is
selected. Where threads skip accesses, to padding or under a mask, only plain ones in
order are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts.registers.descriptions import WGStridedLayout
from pallas_gpu.layouts.registers.linear import LANE_BITS, LinearLayout
from pallas_gpu.layouts.registers.placement import uniform_length
from pallas_gpu.layouts.smem.access_plan import (
    MAX_WIDTH_BYTES,
    AccessPlan,
    Kind,
    Method,
)
from pallas_gpu.layouts.smem.layout import SmemLayout
from pallas_gpu.layouts.smem.matrix_access import plan_matrix
from pallas_gpu.layouts.smem.vector_access import plan_vector
from pallas_gpu.layouts.smem.window import check_window, match_axes


def plan_access(
    layout: LinearLayout | WGStridedLayout,
    smem: SmemLayout,
    *,
    kind: Kind,
    window: Sequence[int] | None = None,
    optimized: bool = True,
    base_alignment_bytes: int | None = None,
    methods: tuple[Method, ...] = ("matrix", "vector"),
    single: bool = False,
    byte_matrices: bool = False,
) -> AccessPlan:
    """Plans the accesses for an array in registers and a slice of shared memory.

    Args:
      layout: the layout in registers. Its shape is that of the window, except that
        axes of size 1 may be missing.
      smem: the whole array in shared memory. For a transposed view transpose the
        layout instead.
      kind: "load" or "store".
      window: shape of the slice in the array's rank; the whole array if None. Its
        start is a multiple of the tile, and of the swizzle's atom in bytes.
      optimized: reject plans with bank conflicts.
      base_alignment_bytes: a known divisor of the slice's address; 16 if None.
      methods: the methods that may be used.
      single: access each element separately, in order.
      byte_matrices: the target transposes matrices of 8-bit elements.

    Raises:
      LayoutError: the shapes do not match, elements of different threads share bytes,
        or, if `optimized`, every plan has bank conflicts.
    """
    return _plan(
        layout,
        smem,
        kind,
        smem.shape if window is None else tuple(window),
        optimized,
        MAX_WIDTH_BYTES if base_alignment_bytes is None else base_alignment_bytes,
        tuple(methods),
        single,
        byte_matrices,
    )


@functools.lru_cache(maxsize=1024)
def _plan(
    layout: LinearLayout | WGStridedLayout,
    smem: SmemLayout,
    kind: Kind,
    window: tuple[int, ...],
    optimized: bool,
    alignment: int,
    methods: tuple[Method, ...],
    single: bool,
    byte_matrices: bool,
) -> AccessPlan:
    offsets, replication = bit_offsets(layout, smem, window)
    plans = []
    padded = isinstance(layout, LinearLayout) and layout.is_padded
    in_order = padded or single
    # Warps may load the same matrices: each computes its own addresses.
    alike = kind == "load" and all(bit >= LANE_BITS for bit in replication)
    matrix = "matrix" in methods and (alike or not replication) and not in_order
    if matrix and alignment >= MAX_WIDTH_BYTES:
        plans += plan_matrix(offsets, smem, kind, byte_matrices)
    if "vector" in methods:
        most = 1 if single else uniform_length(layout)
        plans += plan_vector(
            offsets, smem, kind, alignment, replication, most, stagger=not in_order
        )
    if not plans:
        raise LayoutError(
            "the allowed instructions do not support the layout",
            expected="fragments of 8x8 matrices with 16-byte rows",
            got=f"methods {methods}",
        )
    free = [plan for plan in plans if plan.conflict_free]
    if optimized and not free:
        best = min(plans, key=_cost)
        raise LayoutError(
            f"this {kind} of shared memory has bank conflicts",
            expected=f"{best.ideal_wavefronts} wavefronts per instruction",
            got=f"{best.wavefronts_per_access} wavefronts per instruction "
            f"(degree {best.wavefronts_per_access / best.ideal_wavefronts:g}) for "
            f"window {window} of {smem}",
            hint="use a tiled and swizzled reference, another register layout, or "
            "optimized=False to accept the conflicts",
        )
    best = min(free or plans, key=_cost)
    if optimized:
        return best
    # Matrices with conflicts may take less time than single bytes without.
    return min([best, *plans], key=lambda plan: _cost(plan)[0])


def _cost(plan: AccessPlan) -> tuple[int, int]:
    """Time in shared memory, then instructions and selects."""
    count = len(plan.instructions)
    selects = sum(2 * len(s.pairs) for s in plan.staggers)
    return plan.wavefronts_per_access * count, count + selects


def bit_offsets(
    layout: LinearLayout | WGStridedLayout, smem: SmemLayout, window: tuple[int, ...]
) -> tuple[np.ndarray, tuple[int, ...]]:
    """Unswizzled bit offsets [128, registers, vector] and the replication bits."""
    check_window(smem, window)
    if isinstance(layout, WGStridedLayout) and layout.is_linear:
        layout = layout.linear()
    axes = match_axes(layout.shape, window)
    if axes is None:
        raise _wrong_window(layout.shape, window)
    coordinates = layout.all_coordinates()
    full = np.zeros((*coordinates.shape[:3], len(window)), dtype=np.int64)
    full[..., axes] = coordinates
    replication = layout.replication_bits if isinstance(layout, LinearLayout) else ()
    return smem.linear_bit_offset(full), replication


def _wrong_window(shape: tuple[int, ...], window: tuple[int, ...]) -> LayoutError:
    return LayoutError(
        "the shapes of the array in registers and the slice of shared memory differ",
        expected=f"shape {window}, axes of size 1 may be missing",
        got=f"shape {shape}",
    )
