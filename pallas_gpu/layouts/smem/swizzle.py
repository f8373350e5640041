# SPDX-License-Identifier: Apache-2.0
"""The shared-memory swizzles of TMA, wgmma and tcgen05, as functions on byte offsets.

PTX ISA, "Tensor Copies: Swizzling modes": a row of `swizzle` bytes is cut into 16-byte
chunks, and the chunk's number is XORed with the number of the 128-byte line. So the
same column of neighbouring rows lies in different banks.
"""

from __future__ import annotations

import numpy as np

from pallas_gpu.errors import LayoutError

# 16 means no swizzle: a 16-byte chunk stays whole in every mode.
NO_SWIZZLE = 16
SWIZZLES = (16, 32, 64, 128)

# The offset's bits from 7 up select the line of 128 bytes, those from 4 up the chunk.
_LINE_SHIFT = 7
_CHUNK_SHIFT = 4


def check_swizzle(swizzle: int) -> None:
    """Raises LayoutError unless `swizzle` is a mode of the hardware."""
    if swizzle not in SWIZZLES:
        raise LayoutError(
            "there is no such swizzle",
            expected="32, 64 or 128 bytes, or 16 for none",
            got=swizzle,
        )


def swizzle_bytes[T: (int, np.ndarray)](offset: T, swizzle: int) -> T:
    """Where the byte at `offset` of an atom-aligned region is stored.

    Linear over XOR: the swizzle of `a ^ b` is the XOR of both swizzles.

    Args:
      offset: byte offset, or an integer array of them.
      swizzle: 32, 64 or 128 bytes; 16 leaves the offset as it is.
    """
    check_swizzle(swizzle)
    chunk_mask = swizzle // 16 - 1
    return offset ^ (((offset >> _LINE_SHIFT) & chunk_mask) << _CHUNK_SHIFT)


def atom_bytes(swizzle: int) -> int:
    """The period of the pattern: bases must be aligned to it. 16 without a swizzle."""
    check_swizzle(swizzle)
    return 16 if swizzle == NO_SWIZZLE else 8 * swizzle
