# SPDX-License-Identifier: Apache-2.0
"""Matrices of wgmma: descriptors and fragments, as the PTX ISA draws them."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_gpu.errors import PtxError
from pallas_gpu.lockstep import accesses
from pallas_gpu.lockstep.copies.tensor_map import TensorMap
from pallas_gpu.lockstep.tensor_cores import matrices
from pallas_gpu.lockstep.tensor_cores.wgmma import Instruction

CODES = {16: 0, 128: 1, 64: 2, 32: 3}
START = 2048


def word(span: int, leading: int = 0, stride: int = 0) -> int:
    return CODES[span] << 62 | stride // 16 << 32 | leading // 16 << 16 | START // 16


def at(places: np.ndarray, *index: int) -> int:
    """The window's address of an element's first byte."""
    return int(places[index][0]) + accesses.SMEM_BASE


@pytest.mark.parametrize("span", [32, 64, 128])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_box_that_tma_brings_is_the_matrix_of_the_descriptor(span, transposed):
    inner = span // 2  # f16 elements in a row of the span
    tensor_map = TensorMap.encode(1 << 40, 5, (16, inner), (64, 1), span, (16, inner))
    brought = tensor_map.in_smem(START).reshape(16, inner, 2)
    # Rows of the box are M or N when K is innermost, and K otherwise.
    rows = (0, inner if transposed else 16)
    found, _ = matrices.smem_places(
        rows, 16, 2, word(span, stride=8 * span), transposed
    )
    found = found + accesses.SMEM_BASE
    expected = brought.swapaxes(0, 1) if transposed else brought[:, :16]
    np.testing.assert_array_equal(found, expected)


def test_without_a_swizzle_a_matrix_consists_of_8_rows_of_16_bytes():
    d = word(16, leading=256, stride=512)
    k_major, _ = matrices.smem_places((0, 16), 16, 2, d, False)
    assert at(k_major, 9, 10) == START + 512 + 256 + 1 * 16 + 2 * 2
    mn_major, _ = matrices.smem_places((0, 16), 16, 2, d, True)
    assert at(mn_major, 9, 10) == START + 512 + 256 + 2 * 16 + 1 * 2


def test_wide_matrices_step_by_the_leading_offset():
    d = word(64, leading=4096, stride=512)
    places, _ = matrices.smem_places((0, 64), 16, 2, d, True)
    assert at(places, 32, 0) == START + 4096
    assert at(places, 0, 8) == START + 512


def test_a_thread_has_pairs_of_neighbours_of_the_accumulator():
    rows, columns = matrices.d_places(4, 16)
    lane = 2 * 32 + 13  # g = 3, t = 1 of warp 2
    assert list(zip(rows[lane], columns[lane], strict=True)) == [
        (35, 2), (35, 3), (43, 2), (43, 3), (35, 10), (35, 11), (43, 10), (43, 11),
    ]  # fmt: skip


@pytest.mark.parametrize("k", [16, 32])
def test_fragments_cover_the_matrix_once(k):
    for rows, columns, width in (
        (*matrices.a_places(4, k), k),
        (*matrices.d_places(4, 24), 24),
    ):
        flat = (rows * width + columns).reshape(-1)
        assert sorted(flat) == list(range(64 * width))


def test_a_thread_has_two_elements_of_a_in_a_register():
    rows, columns = matrices.a_places(1, 16)
    lane = 6  # g = 1, t = 2
    assert rows[lane].tolist() == [1, 1, 9, 9, 1, 1, 9, 9]
    assert columns[lane].tolist() == [4, 5, 4, 5, 12, 13, 12, 13]


@pytest.mark.parametrize(
    "fields",
    [
        (12, 16, "f32", "f16", "f16"),
        (264, 16, "f32", "f16", "f16"),
        (64, 8, "f32", "f16", "f16"),
        (64, 16, "f16", "bf16", "bf16"),
        (40, 32, "s32", "s8", "s8"),
        (64, 32, "f32", "e4m3", "s8"),
        (64, 32, "f32", "e4m3", "e4m3", (1, 1), (False, True)),
    ],
    ids=str,
)
def test_shapes_and_types_that_do_not_exist_are_refused(fields):
    Instruction(64, 16, "f32", "f16", "f16", (1, -1), (True, True))
    with pytest.raises(PtxError, match="no wgmma instruction"):
        Instruction(*fields)
