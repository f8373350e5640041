# SPDX-License-Identifier: Apache-2.0
"""Whether layouts of TMEM are those of instructions, by models of the PTX ISA."""

from __future__ import annotations

import numpy as np

from pallas_gpu.layouts import TmemLayout
from pallas_gpu.lockstep.tensor_cores import tensor_copies

# Of each number of rows the copy of their scales.
_COPIES = {128: "32x128b.warpx4", 256: "64x128b.warpx2::01_23"}


def is_as_copied(layout: TmemLayout) -> bool:
    """Whether scales are where tcgen05.cp puts them.

    A row of 16 bytes in SMEM has 4 scales of each of 4 rows, 32 apart.
    """
    rows, _ = layout.base_tile_shape
    lanes, columns, positions = layout.places((rows, 4))
    row, scale = np.indices((rows, 4))
    copied = tensor_copies.lanes_of(_COPIES[rows])
    expected = np.sort(copied[:, 32 * (row // 128) + row % 32], axis=0)
    return (
        np.array_equal(np.sort(lanes, axis=-1), np.moveaxis(expected, 0, -1))
        and np.array_equal(columns, row // 32 % 4)
        and np.array_equal(positions, scale)
    )
