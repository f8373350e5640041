# SPDX-License-Identifier: Apache-2.0
"""Plans how the threads of a warpgroup access a slice of an array in global memory."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from pallas_gpu.layouts.registers.linear import THREAD_BITS, THREADS, LinearLayout
from pallas_gpu.layouts.registers.placement import Placement, uniform_length

# The widest ld.global and st.global of sm_90 (PTX ISA, ld: .v4 of 32 bits).
_MAX_ACCESS_BYTES = 16


@dataclasses.dataclass(frozen=True)
class GmemAccess:
    """Element offsets of a thread's accesses, relative to the slice.

    Access i of thread t starts at `SUM_b bit_b(t)*columns[b] + starts[i]`. All accesses
    together are the thread's registers, in order.

    Attributes:
      columns: seven constants.
      starts: one per access.
      elements_per_access: contiguous elements in memory per access.
    """

    columns: tuple[int, ...]
    starts: tuple[int, ...]
    elements_per_access: int

    def offsets(self) -> np.ndarray:
        """The start of each access: int64 [128, accesses], in elements."""
        bits = (np.arange(THREADS)[:, None] >> np.arange(THREAD_BITS)) & 1
        threads = bits @ np.array(self.columns, dtype=np.int64)
        return threads[:, None] + np.array(self.starts, dtype=np.int64)


def plan_gmem(
    layout: Placement,
    strides: Sequence[int],
    bits: int,
    base_divisor_elems: int = 0,
    *,
    single: bool = False,
) -> GmemAccess:
    """Plans the widest accesses whose alignment is known.

    An access to elements of a padded layout is inside or outside as a whole.

    Args:
      layout: the layout in registers; its shape is that of the slice.
      strides: the slice's stride along each axis, in elements.
      bits: width of an element in memory.
      base_divisor_elems: a known divisor of the slice's start; 0 for the start of the
        array, which is aligned to 16 bytes.
      single: access each element separately.

    Raises:
      LayoutError: the layout has no linear form and the slice is not contiguous.
    """
    return _plan(layout, tuple(strides), bits, base_divisor_elems, single)


@functools.lru_cache(maxsize=1024)
def _plan(
    layout: Placement,
    strides: tuple[int, ...],
    bits: int,
    base_divisor_elems: int,
    single: bool,
) -> GmemAccess:
    step = 1
    if isinstance(layout, LinearLayout):
        columns = [_dot(c, strides) for c in layout.thread_columns]
        starts = [_dot(o, strides) for o in layout.origins]
        if layout.rank:
            step = strides[layout.vector_axis]
    else:
        if not _is_contiguous(layout.shape, strides):
            layout.linear()  # raises an error that states the reason
        columns = [layout.vec_size << b for b in range(THREAD_BITS)]
        starts = [layout.flat_offset(0, r) for r in range(layout.num_registers)]
    length = layout.vector_length
    limit = math.gcd(base_divisor_elems, *columns, *starts, uniform_length(layout))
    elements = 1
    while (
        step == 1
        and not single
        and limit % (2 * elements) == 0
        and 2 * elements * bits <= 8 * _MAX_ACCESS_BYTES
    ):
        elements *= 2
    within = range(0, length, elements)
    return GmemAccess(
        tuple(columns), tuple(s + v * step for s in starts for v in within), elements
    )


def _is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _dot(coordinate: Sequence[int], strides: Sequence[int]) -> int:
    return sum(c * s for c, s in zip(coordinate, strides, strict=True))
