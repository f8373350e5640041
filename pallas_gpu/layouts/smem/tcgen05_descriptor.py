# SPDX-License-Identifier: Apache-2.0
"""The shared memory descriptor of tcgen05 for an operand of an MMA, as integers.

PTX ISA, tcgen05 "Shared memory descriptor", "Canonical layouts". tcgen05.mma reads the
same layouts as wgmma, with the same leading and stride offsets; the descriptor has a
version field more, and a swizzle field of one bit more, whose lowest bit selects atoms
of 32 bytes. Operands of 8 bits may also lie along M or N; tf32 may not, except in those
atoms, which no transform produces.
"""

from __future__ import annotations

from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts.smem.layout import SmemLayout
from pallas_gpu.layouts.smem.wgmma_descriptor import Side, WgmmaOperand, plan_operand
from pallas_gpu.layouts.window import Window

# Bits 46-48 are 0b001 (PTX ISA, table "Shared memory descriptor layout").
_VERSION = 1 << 46
_TRANSPOSABLE_BITS = (8, 16)
# Contiguous rows of 16 bytes, as tcgen05.cp reads them: no swizzle, and 128 bytes from
# each 8 rows to the next (bits 32-45, in units of 16 bytes).
ROWS_OF_16_BYTES = _VERSION | 128 >> 4 << 32


def plan(layout: SmemLayout, window: Window, side: Side) -> WgmmaOperand:
    """Describes a slice of a shared-memory array as an operand of tcgen05.mma.

    Args:
      layout: placement of the whole array, tiled (8, elements of the swizzle).
      window: the slice, possibly transposed; starts that are ints are checked.
      side: "a" for the left operand (M, K), "b" for the right one (K, N).

    Raises:
      LayoutError: tcgen05.mma cannot read the slice.
    """
    return plan_operand(
        layout,
        window,
        side,
        who="tcgen05.mma",
        transposable_bits=_TRANSPOSABLE_BITS,
    )


def plan_copy(layout: SmemLayout, window: Window) -> WgmmaOperand:
    """Describes a slice as the source of tcgen05.cp: a left operand along K.

    Raises:
      LayoutError: tcgen05.cp cannot read the slice.
    """
    operand = plan_operand(layout, window, "a", who="tcgen05.cp", transposable_bits=())
    if operand.transposed:
        raise LayoutError(
            "tcgen05.cp reads rows",
            expected="a source whose minor axis is K",
            got="a transposed array",
            hint="store the source as (128, K)",
        )
    return operand


def fields(operand: WgmmaOperand) -> int:
    """The 64-bit descriptor without its start address.

    Bits 0-13 start address, 16-29 leading dimension byte offset, 32-45 stride dimension
    byte offset, 46-48 version, 49-51 base offset (0: arrays are aligned to the pattern
    of the swizzle), 61-63 swizzle: 0 none, 2 128 bytes, 4 64 bytes, 6 32 bytes. The
    codes of wgmma in bits 62-63 are the same bits.
    """
    return operand.fields | _VERSION
