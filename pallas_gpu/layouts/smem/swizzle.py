# SPDX-License-Identifier: Apache-2.0
"""The shared-memory swizzles of TMA, wgmma and tcgen05, as functions on byte offsets.

PTX ISA, "Tensor Copies: Swizzling modes": a row of `swizzle` bytes is cut into 16-byte
chunks, and the chunk's index is XORed with the index of the 128-byte line. So the same
column of adjacent rows is in different banks.
"""

from __future__ import annotations

import numpy as np

from pallas_gpu.errors import LayoutError

# 16 means no swizzle: every mode keeps 16-byte chunks whole.
NO_SWIZZLE = 16
SWIZZLES = (16, 32, 64, 128)

# Bits 7 and above of the offset select the 128-byte line, bits 4 and above the chunk.
_LINE_SHIFT = 7
_CHUNK_SHIFT = 4


def check_swizzle(swizzle: int) -> None:
    """Raises LayoutError unless `swizzle` is a mode of the hardware."""
    if swizzle not in SWIZZLES:
        raise LayoutError(
            "invalid swizzle",
            expected="32, 64 or 128 bytes, or 16 for none",
            got=swizzle,
        )


def swizzle_bytes[T: (int, np.ndarray)](offset: T, swizzle: int) -> T:
    """The storage offset of the byte at `offset` of an atom-aligned region.

    Linear over XOR: the swizzle of `a ^ b` is the XOR of both swizzles.

    Args:
      offset: byte offset, or an integer array of them.
      swizzle: 32, 64 or 128 bytes; 16 leaves the offset unchanged.
    """
    check_swizzle(swizzle)
    chunk_mask = swizzle // 16 - 1
    return offset ^ (((offset >> _LINE_SHIFT) & chunk_mask) << _CHUNK_SHIFT)


def atom_bytes(swizzle: int) -> int:
    """The period of the pattern, the required alignment; 16 without a swizzle."""
    check_swizzle(swizzle)
    return 16 if swizzle == NO_SWIZZLE else 8 * swizzle
