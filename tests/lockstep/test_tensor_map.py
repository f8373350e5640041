# SPDX-License-Identifier: Apache-2.0
"""Tensor maps: swizzles by the PTX ISA's tables, edges, what the driver refuses."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_gpu.errors import PtxError
from pallas_gpu.lockstep.copies.tensor_map import TensorMap, swizzled

F16 = 5  # the launcher's number


def encode(
    base=1 << 40, code=F16, sizes=(8, 64), strides=(64, 1), swizzle=128, box=None
):
    return TensorMap.encode(base, code, sizes, strides, swizzle, box or sizes)


@pytest.mark.parametrize(
    ("span", "address", "place"),
    [
        (16, 0x3F0, 0x3F0),
        (32, 0x080, 0x090),
        (32, 0x100, 0x100),
        (64, 0x080, 0x090),
        (64, 0x180, 0x1B0),
        (64, 0x200, 0x200),
        (128, 0x080, 0x090),
        (128, 0x3F5, 0x385),
        (128, 0x400, 0x400),
    ],
)
def test_a_swizzle_exchanges_bits_of_the_address(span, address, place):
    assert swizzled(np.array([address]), span) == [place]


@pytest.mark.parametrize("span", [16, 32, 64, 128])
def test_a_swizzle_is_a_permutation(span):
    places = swizzled(np.arange(2048), span)
    assert sorted(places) == list(range(2048))


def test_a_box_over_the_edge_knows_what_lies_inside():
    tensor_map = encode(sizes=(3, 10), strides=(16, 1), swizzle=16, box=(2, 8))
    offset, inside = tensor_map.in_gmem((6, 2))
    assert inside.reshape(2, 8).tolist() == [[True] * 4 + [False] * 4, [False] * 8]
    assert offset[:4].tolist() == [2 * (2 * 16 + 6 + i) for i in range(4)]
    _, inside = tensor_map.in_gmem((-2, 0))
    assert inside.reshape(2, 8)[0].tolist() == [False] * 2 + [True] * 6


@pytest.mark.parametrize(
    "wrong",
    [
        {"base": (1 << 40) + 8},
        {"strides": (60, 1)},
        {"strides": (64, 2)},
        {"sizes": (300, 64), "box": (257, 64)},
        {"sizes": (8, 4), "swizzle": 16},
        {"sizes": (8, 128), "strides": (128, 1)},
        {"sizes": (8, 64), "swizzle": 64},
        {"code": 12},
        {"swizzle": 48},
    ],
    ids=str,
)
def test_what_the_driver_refuses_is_refused(wrong):
    encode()
    with pytest.raises(PtxError):
        encode(**wrong)


def test_a_box_lies_at_a_multiple_of_128_bytes():
    assert encode().in_smem(1024)[64].tolist() == [1024 + 0x90, 1024 + 0x91]
    with pytest.raises(PtxError, match="128 bytes"):
        encode().in_smem(1040)
