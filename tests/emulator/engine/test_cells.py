# SPDX-License-Identifier: Apache-2.0
"""The numbers that the cells of an array store."""

from __future__ import annotations

from pallas_gpu.emulator.engine.cells import Cells


def test_each_number_of_a_part_is_replaced_by_its_own():
    cells = Cells((8,), 1)
    for number, box in enumerate([(0, 2), (2, 4), (4, 8)], 1):
        cells.replace(0, cells.index((box,)), dict.fromkeys(range(3), number))
    cells.replace(0, cells.index(((0, 4),)), {1: 2, 2: 5})
    assert cells.layers[0].tolist() == [2, 5, 3, 3]
