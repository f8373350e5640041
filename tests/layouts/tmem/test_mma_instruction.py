# SPDX-License-Identifier: Apache-2.0
"""Instruction descriptors of tcgen05.mma, bit by bit, and what has none."""

from __future__ import annotations

import pytest

from pallas_gpu.layouts.tmem.mma_instruction import Instruction, Kind, is_n


def field(word: int, low: int, high: int) -> int:
    return word >> low & (1 << high - low + 1) - 1


# PTX ISA, "Instruction descriptor": the codes of D, and of A and B.
TYPES = [
    ("f16", "f16", "f16", 0, 0, 0),
    ("f32", "f16", "f16", 1, 0, 0),
    ("f32", "bf16", "bf16", 1, 1, 1),
    ("f32", "tf32", "tf32", 1, 2, 2),
    ("f32", "e4m3", "e5m2", 1, 0, 1),
    ("f16", "e5m2", "e4m3", 0, 1, 0),
    ("s32", "u8", "s8", 2, 0, 1),
]


@pytest.mark.parametrize(("d", "a", "b", *"xyz"), TYPES)
def test_types_have_their_codes(d, a, b, x, y, z):
    word = Instruction(128, 64, d, a, b).descriptor
    assert (field(word, 4, 5), field(word, 7, 9), field(word, 10, 12)) == (x, y, z)


@pytest.mark.parametrize(("m", "n"), [(64, 8), (128, 8), (128, 256), (64, 136)])
@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True)])
def test_shape_and_transpositions_have_their_bits(m, n, transposed):
    word = Instruction(m, n, "f32", "f16", "f16", *transposed).descriptor
    assert field(word, 17, 22) == n // 8
    assert field(word, 24, 28) == m // 16
    assert (field(word, 15, 15), field(word, 16, 16)) == transposed
    # Sparsity, saturation, negation, and the bits that are reserved or other kinds'.
    assert field(word, 0, 3) == field(word, 6, 6) == field(word, 13, 14) == 0
    assert field(word, 23, 23) == field(word, 29, 31) == 0


def test_the_descriptor_that_upstream_emits():
    # Upstream's PTX for (128, 64) @ (64, 64) of float16, b along N: 135331856.
    assert (
        Instruction(128, 64, "f32", "f16", "f16", False, True).descriptor == 135331856
    )


@pytest.mark.parametrize(("m", "n"), [(128, 16), (256, 48), (256, 256)])
def test_an_instruction_of_a_pair_has_the_shape_of_both(m, n):
    one = Instruction(128, n, "f32", "f16", "f16")
    both = Instruction(m, n, "f32", "f16", "f16", ctas=2)
    assert both.descriptor == one.descriptor & ~(31 << 24) | m // 16 << 24
    assert both.mnemonic == "tcgen05.mma.cta_group::2.kind::f16"


def test_n_of_integers_has_coarser_steps():
    assert [n for n in range(8, 72, 8) if is_n(n, Kind.I8)] == [8, 16, 24, 32, 48, 64]
    assert all(is_n(n, Kind.F16) for n in range(8, 257, 8))
