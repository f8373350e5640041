# SPDX-License-Identifier: Apache-2.0
"""Instructions that transfer an array between registers and TMEM."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_gpu.layouts import Layout, TmemLayout
from pallas_gpu.layouts.registers.placement import place_registers
from pallas_gpu.layouts.tmem.access import register_layouts
from pallas_gpu.layouts.tmem.transfer import plan_transfer
from pallas_gpu.lockstep.tensor_cores.tmem import Form

CASES = [
    (TmemLayout.default(), (128, 24), 32),
    (TmemLayout.default(), (128, 256), 32),
    (TmemLayout.default(), (128, 48), 16),
    (TmemLayout.default(2), (128, 48), 16),
    (TmemLayout.default(4), (128, 96), 8),
    (TmemLayout.half_lane(64), (64, 64), 32),
    (TmemLayout.half_lane(32), (64, 96), 32),
    (TmemLayout.half_lane(64, 2), (64, 64), 16),
    (TmemLayout.m64_collective(64), (64, 64), 32),
]


@pytest.mark.parametrize(("tmem", "shape", "bits"), CASES)
def test_each_register_transfers_the_cells_of_its_elements(tmem, shape, bits):
    layouts = list(register_layouts(tmem, shape, bits))
    assert layouts
    lanes, columns, positions = tmem.places(shape)
    for layout in layouts:
        plan = plan_transfer(layout, tmem, bits)
        per_word = 32 // bits
        words = layout.all_coordinates().reshape(128, -1, per_word, 2)
        seen = []
        for part in plan.instructions:
            form = Form(plan.access.shape, part.repetitions, plan.access.paired)
            assert len(part.words) == form.registers <= 32
            seen += part.words
            lane, column = form.places()
            for thread in range(128):
                quarter, within = 32 * (thread // 32), thread % 32
                for i, word in enumerate(part.words):
                    first = column[within, i] * (1 + plan.access.paired)
                    for j, (row, col) in enumerate(words[thread, word]):
                        cell = quarter + part.lane + lane[within, i]
                        assert cell in lanes[row, col]
                        offset = j if plan.access.paired else 0
                        assert columns[row, col] == part.column + first + offset
                        assert positions[row, col] == (0 if plan.access.paired else j)
        assert sorted(seen) == list(range(words.shape[1]))


def test_repetitions_are_powers_of_two():
    layout = place_registers(Layout.TCGEN05_TMEM_NATIVE(2), (128, 56))
    plan = plan_transfer(layout, TmemLayout.default(), 32)
    parts = [(x.column, x.repetitions) for x in plan.instructions]
    assert parts == [(0, 32), (32, 16), (48, 8)]
    assert np.prod([x.lane == 0 for x in plan.instructions])
