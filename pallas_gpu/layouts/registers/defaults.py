# SPDX-License-Identifier: Apache-2.0
"""The default layout of arrays of any shape."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts.registers.descriptions import WGStridedLayout
from pallas_gpu.layouts.registers.linear import THREAD_BITS, LinearLayout

_THREADS = 1 << THREAD_BITS
# A thread has at most 255 registers (CUDA programming guide, compute capability 9.0 and
# 10.0); an array of more elements per thread would leave none for anything else.
_MAX_REGISTERS = 128


def default_layout(shape: Sequence[int], bits: int) -> WGStridedLayout | LinearLayout:
    """Returns the default layout of an array.

    It is strided if all threads have the same number of elements. Any other shape is
    spread over as many threads as its powers of two allow, minor dimension first, and
    replicated over the rest: (4, 3) is held by four threads with three registers each,
    and has 32 copies.

    Args:
      shape: the array's shape.
      bits: width of an element.

    Raises:
      LayoutError: a thread does not have enough registers.
    """
    shape = tuple(shape)
    if math.prod(shape) % _THREADS == 0:
        return WGStridedLayout.default(shape, bits)
    return spread_layout(shape)


@functools.lru_cache(maxsize=256)
def spread_layout(shape: tuple[int, ...]) -> LinearLayout:
    """Returns a linear layout of any shape: threads along its powers of two.

    Raises:
      LayoutError: a thread does not have enough registers.
    """
    columns: list[tuple[int, ...]] = []
    blocks = list(shape)
    for axis in reversed(range(len(shape))):
        step = 1
        while blocks[axis] % 2 == 0 and len(columns) < THREAD_BITS:
            columns.append(tuple(step * (a == axis) for a in range(len(shape))))
            blocks[axis] //= 2
            step *= 2
    owned = math.prod(blocks)
    if owned > _MAX_REGISTERS:
        raise LayoutError(
            "an array of this shape has no register layout",
            expected=f"a multiple of {_THREADS} elements, or at most {_MAX_REGISTERS} "
            "for each thread",
            got=f"shape {shape}: {1 << len(columns)} threads would hold {owned} each",
            hint="pad the array, or process it in parts",
        )
    columns += [(0,) * len(shape)] * (THREAD_BITS - len(columns))
    tile = [n // count for n, count in zip(shape, blocks, strict=True)]
    ranges = [range(0, n, t) for n, t in zip(shape, tile, strict=True)]
    return LinearLayout.create(shape, columns, list(itertools.product(*ranges)))
