# SPDX-License-Identifier: Apache-2.0
"""Which dimension of GMEM each axis in SMEM is, in a copy between transposed views."""

from __future__ import annotations

from pallas_gpu.errors import UnsupportedError
from pallas_gpu.layouts.window import Window


def paired_axes(gmem: Window, smem: Window, pieces: int = 1) -> tuple[int, ...]:
    """Returns the dimension of GMEM of each axis of a slice of SMEM, in memory order.

    Tensor maps list dimensions in any order, but the innermost one is adjacent in both
    memories.

    Args:
      gmem, smem: slices of the same shape.
      pieces: the number of CTAs that share the copy.

    Raises:
      UnsupportedError: the minor dimensions differ.

      >>> whole = Window.whole
      >>> paired_axes(whole((4, 8, 64)).transpose((1, 0, 2)), whole((8, 4, 64)))
      (1, 0, 2)
    """
    axes = tuple(gmem.axes[smem.order.index(i)] for i in range(len(smem.order)))
    alike = list(axes) == sorted(axes)
    long = [axis for axis in axes if gmem.sizes[axis] > 1]
    if alike or (pieces == 1 and long[-1:] == sorted(long)[-1:]):
        return axes
    raise UnsupportedError(
        "a copy by TMA cannot transpose",
        expected="the same minor dimension in GMEM and SMEM"
        if pieces == 1
        else "operands of a multicast with their dimensions in the same order",
        got=f"dimensions in the order {gmem.order} in GMEM, {smem.order} in SMEM",
        hint="copy it untransposed, and transpose when loading from SMEM",
    )
