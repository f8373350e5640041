# SPDX-License-Identifier: Apache-2.0
"""Layouts in which threads that follow each other share the rows of an array."""

from __future__ import annotations

import functools
import itertools

from pallas_gpu.layouts.registers.linear import THREAD_BITS, THREADS, LinearLayout


@functools.lru_cache(maxsize=1024)
def divided_layout(
    shape: tuple[int, ...], axis: int, elements: int, threads: int = THREADS
) -> LinearLayout:
    """Returns the layout in which a thread has consecutive elements of its rows.

    The threads of a row follow each other. Others have other rows, as far as powers of
    two divide them, or the same ones.

    Args:
      shape: the array's shape.
      axis: along which the rows are; its size is a power of two.
      elements: of a row that a thread has: a power of two, and at least as many as
        leave no element without a thread.
      threads: those of a warpgroup, or of a warp.
    """
    rank, bits = len(shape), threads.bit_length() - 1
    columns: list[tuple[int, ...]] = []
    owned = [1] * rank
    owned[axis] = elements
    order = [axis, *(a for a in reversed(range(rank)) if a != axis)]
    for a in order:
        while shape[a] % (2 * owned[a]) == 0 and len(columns) < bits:
            columns.append(tuple(owned[a] * (i == a) for i in range(rank)))
            owned[a] *= 2
    columns += [(0,) * rank] * (THREAD_BITS - len(columns))
    starts = (
        range(elements) if a == axis else range(0, size, owned[a])
        for a, size in enumerate(shape)
    )
    return LinearLayout.create(shape, columns, list(itertools.product(*starts)))
