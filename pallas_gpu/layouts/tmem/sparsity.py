# SPDX-License-Identifier: Apache-2.0
"""The metadata of sparse left operands of tcgen05.mma, as arrays of 2-bit indices.

PTX ISA, tcgen05 "Sparse matrices". Of each four elements along K two are stored; two
2-bit indices, the lower one first, say which. An instruction reads 64 bits of indices
for each row of 8-bit elements, 32 for each row of 16-bit ones: there two rows share
64 bits, in an order of their own, and a pair of columns serves two instructions.
"""

from __future__ import annotations

import numpy as np

ROWS = 128
# Elements of K to four, and those stored of them.
GROUP, STORED = 4, 2
# Elements of K whose indices one tcgen05.cp copies: 128 bits for each row.
TILE_K = 128
# Indices of 2 bits that share a column; columns of a tile.
INDICES_PER_COLUMN, COLUMNS_PER_TILE = 16, 4
# K of an instruction is that of 64 bytes.
K_BYTES = 64
# N is a multiple of it, as CUTLASS's instructions for M = 128 have it.
N_STEP = 16


def metadata_of(step: int, bits: int) -> tuple[int, int]:
    """Where an instruction at a step of K finds its metadata.

    Args:
      step: the number of the instruction along K.
      bits: width of an element, 8 or 16.

    Returns:
      The first column, from that of the first step, and the selector.

      >>> [metadata_of(step, 16) for step in range(3)]
      [(0, 0), (0, 1), (2, 0)]
      >>> [metadata_of(step, 8) for step in range(3)]
      [(0, 0), (2, 0), (4, 0)]
    """
    if bits == 8:
        return 2 * step, 0
    return step // 2 * 2, step % 2


def order_of_tile(bits: int) -> np.ndarray:
    """Where the indices of a tile come from: [128, 64] of (row, index along K), flat.

    Args:
      bits: width of an element, 8 or 16.
    """
    row, index = np.indices((ROWS, TILE_K // STORED))
    if bits == 8:
        return row * index.shape[1] + index
    # A lane holds 8 indices (16 elements of K) of each of two rows, 8 rows apart.
    source_row = row % 8 + 8 * (index // 8 % 2) + 16 * (row // 16)
    source = index % 8 + 8 * (row // 8 % 2) + 16 * (index // 16)
    return source_row * index.shape[1] + source
