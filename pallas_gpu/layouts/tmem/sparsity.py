# SPDX-License-Identifier: Apache-2.0
"""The metadata of sparse left operands of tcgen05.mma, as arrays of 2-bit indices.

PTX ISA, tcgen05 "Sparse matrices". Two 2-bit indices, the lower one first, say which
half of a group of elements along K is stored: two of four elements of 8 or 16 bits, two
of four pairs of 4-bit elements, and of two elements of 32 bits one, whose halves are
two of four. An instruction reads 64 bits of indices for each row of 4-bit and of 8-bit
elements, and 32 for each row of wider ones: there two rows share 64 bits, in an order
of their own, and a pair of columns serves two instructions.

Of M = 64 the figure was not to be had. Its metadata is in the lanes of its accumulator,
"Layout F": the ISA requires one lane offset, 0 or 16, of A, D and the metadata. These
are 16 lanes of each warp, which is what 16 rows fill, in the order of M = 128. Both
halves of N need it, so each row is stored twice.
"""

from __future__ import annotations

import numpy as np

ROWS, HALF_ROWS = 128, 64
# Rows whose metadata shares as many lanes.
_BLOCK = 16
# What an index counts in a group along K, and the indices of a group.
UNITS, INDICES = 4, 2
# Indices of a row that one tcgen05.cp copies, 128 bits; those that share a column; and
# the columns of these copies.
TILE_INDICES, INDICES_PER_COLUMN, COLUMNS_PER_TILE = 64, 16, 4
# Width of an element: the elements of a group.
_GROUPS = {4: 8, 8: 4, 16: 4, 32: 2}
# Of these each instruction reads two columns, of wider ones one.
_NARROW = (4, 8)
# K of an instruction is that of 64 bytes.
K_BYTES = 64
# N is a multiple of it, as CUTLASS's instructions for M = 128 have it. Of M = 64 there
# are two instructions, each of half of N, and their step is 8.
N_STEP = 16


def group_of(bits: int) -> int:
    """Elements along K of which two indices say what is stored, which is half of them.

    Raises:
      KeyError: no sparse instruction has elements of this width.
    """
    return _GROUPS[bits]


def tile_k(bits: int) -> int:
    """Elements of K whose indices one tcgen05.cp copies.

    >>> [tile_k(bits) for bits in (4, 8, 16, 32)]
    [256, 128, 128, 64]
    """
    return TILE_INDICES // INDICES * group_of(bits)


def metadata_of(step: int, bits: int) -> tuple[int, int]:
    """Where an instruction at a step of K finds its metadata.

    Args:
      step: the number of the instruction along K.
      bits: width of an element.

    Returns:
      The first column, from that of the first step, and the selector.

      >>> [metadata_of(step, 16) for step in range(3)]
      [(0, 0), (0, 1), (2, 0)]
      >>> [metadata_of(step, 8) for step in range(3)]
      [(0, 0), (2, 0), (4, 0)]
    """
    if bits in _NARROW:
        return 2 * step, 0
    return step // 2 * 2, step % 2


def lanes_of(rows: int, half: int = 0) -> np.ndarray:
    """The lanes whose metadata an instruction reads: [rows], in the order of M = 128.

    Args:
      rows: M, 128 or 64.
      half: of M = 64 the half of N that the instruction multiplies.

      >>> lanes_of(64, half=1)[[0, 15, 16, 63]].tolist()
      [16, 31, 48, 127]
    """
    return np.arange(ROWS).reshape(-1, ROWS // rows, _BLOCK)[:, half].reshape(-1)


def order_of_tile(bits: int, rows: int = ROWS) -> np.ndarray:
    """Where the indices of a tile come from: [128, 64] of (row, index along K), flat.

    Args:
      bits: width of an element.
      rows: M, 128 or 64.
    """
    lane, index = np.indices((ROWS, TILE_INDICES))
    row = np.empty_like(lane)
    for half in range(ROWS // rows):
        row[lanes_of(rows, half)] = lane[:rows]
    if bits in _NARROW:
        return row * index.shape[1] + index
    # A lane holds 8 indices of each of two rows, 8 rows apart.
    source_row = row % 8 + 8 * (index // 8 % 2) + 16 * (row // 16)
    source = index % 8 + 8 * (row // 8 % 2) + 16 * (index // 16)
    return source_row * index.shape[1] + source
