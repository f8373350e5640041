# SPDX-License-Identifier: Apache-2.0
"""Where a TMA copy may start in GMEM.

Measured on an H200: a copy whose innermost coordinate is not a multiple of 16 bytes is
an illegal instruction, and so is a store with a negative coordinate. A load may start
before the array.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pallas_gpu.errors import LayoutError, OutOfBoundsError
from pallas_gpu.layouts.gmem.tma_view import INNER_BOX_BYTES
from pallas_gpu.layouts.window import Window


def require_start(window: Window, element_bits: int, what: str, *, store: bool) -> None:
    """Raises for a slice that starts where no TMA copy can.

    Dynamic starts are the author's promise; the emulator passes their values.

    Args:
      window: the slice of an array in GMEM.
      element_bits: width of an element.
      what: the copy, for the message.
      store: whether the copy writes to the slice.

    Raises:
      OutOfBoundsError: a store that starts before the array.
      LayoutError: the slice does not start at a multiple of 16 bytes.
    """
    known = [start if isinstance(start, int) else 0 for start in window.starts]
    if store and min(known, default=0) < 0:
        raise OutOfBoundsError(
            f"{what} starts before the array",
            expected="starts of 0 or more: TMA clips a store at the array's end only",
            got=f"starts {_text(window)} in shape {window.array_shape}",
            hint="store from the first element inside, a smaller part",
        )
    unit_bits = 8 * INNER_BOX_BYTES
    pairs = zip(known, window.array_strides, strict=True)
    rest_bits = sum([a * stride for a, stride in pairs]) * element_bits % unit_bits
    if rest_bits == 0:
        return
    strides_bits = [stride * element_bits for stride in window.array_strides]
    if any(strides_bits[axis] % unit_bits for axis in window.dynamic):
        return
    raise LayoutError(
        f"{what} does not start where TMA can address GMEM",
        expected=f"a start at a multiple of {INNER_BOX_BYTES} bytes, "
        f"{unit_bits // element_bits} elements, in the minor dimension",
        got=f"starts {_text(window)} in shape {window.array_shape}, {rest_bits / 8:g} "
        "bytes too far",
        hint="start at a multiple, or copy without TMA: load and store",
    )


def starts_aligned(
    window: Window, element_bits: int, divisor: Callable[[Any], int]
) -> bool:
    """Returns whether a slice is known to start at a multiple of 16 bytes.

    Args:
      window: the slice of an array in GMEM.
      element_bits: width of an element.
      divisor: a known divisor of a start.
    """
    unit_bits = 8 * INNER_BOX_BYTES
    strides_bits = [stride * element_bits for stride in window.array_strides]
    return all(
        bits % unit_bits == 0 or divisor(x) * bits % unit_bits == 0
        for x, bits in zip(window.starts, strides_bits, strict=True)
    )


def _text(window: Window) -> str:
    return str(tuple(x if isinstance(x, int) else "dynamic" for x in window.starts))
