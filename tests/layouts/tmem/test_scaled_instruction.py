# SPDX-License-Identifier: Apache-2.0
"""Descriptors of block-scaled tcgen05.mma, bit by bit and beside upstream's."""

from __future__ import annotations

import pytest

from pallas_gpu.layouts.tmem.scaled_instruction import ScaledInstruction

MXF8 = ScaledInstruction(256, "e4m3", "e4m3", "ue8m0", 32)
MXF4 = ScaledInstruction(128, "e2m1", "e2m1", "ue8m0", 32)
NVF4 = ScaledInstruction(256, "e2m1", "e2m1", "ue4m3", 16)


@pytest.mark.parametrize(
    ("instruction", "words"),
    [
        (MXF8, [0x08C00000, 0x28C00010, 0x48C00020, 0x68C00030, 0x08C00000]),
        (MXF4, [0x08A00480, 0x48A004A0, 0x08A00480]),
        (NVF4, [0x08400480, 0x08400480]),
    ],
    ids=["mxf8", "mxf4", "nvf4"],
)
def test_the_descriptors_of_steps_of_k_are_upstreams(instruction, words):
    """Constants of the PTX that upstream's tcgen05_mma compiles to."""
    found = [
        instruction.descriptor | instruction.scales_of(i)[1] for i in range(len(words))
    ]
    assert list(map(hex, found)) == list(map(hex, words))


@pytest.mark.parametrize(
    ("change", "bits"),
    [
        ({"a": "e5m2"}, 1 << 7),
        ({"b": "e5m2"}, 1 << 10),
        ({"a_transposed": True}, 1 << 15),
        ({"b_transposed": True}, 1 << 16),
        ({"n": 264 - 8 * 32}, (32 ^ 1) << 17),
    ],
)
def test_each_field_has_its_bits(change, bits):
    fields = {"n": 256, "a": "e4m3", "b": "e4m3", "scale": "ue8m0", "block": 32}
    changed = ScaledInstruction(**{**fields, **change})
    assert changed.descriptor ^ MXF8.descriptor == bits


def test_four_scales_of_a_row_share_a_column():
    assert [MXF8.scales_of(i)[0] for i in range(6)] == [0, 0, 0, 0, 1, 1]
    assert [MXF4.scales_of(i)[0] for i in range(4)] == [0, 0, 1, 1]
    assert [NVF4.scales_of(i)[0] for i in range(3)] == [0, 1, 2]
