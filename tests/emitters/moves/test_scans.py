# SPDX-License-Identifier: Apache-2.0
"""Cumulative operations over any layout, in a thread, a warp and a warpgroup."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_gpu.layouts import Layout
from tests.support.movement_programs import scan
from tests.support.refusal import refused

LAYOUTS = {
    "WGMMA": (Layout.WGMMA, (128, 24)),
    "WGMMA_TRANSPOSED": (Layout.WGMMA_TRANSPOSED, (64, 64)),
    "WGMMA_8BIT": (Layout.WGMMA_8BIT, (64, 32)),
    "strided": (None, (64, 128)),
    "narrow": (None, (512, 8)),
    "vector": (None, (1024,)),
}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("name", "axis"),
    [(name, a) for name, (_, shape) in LAYOUTS.items() for a in range(len(shape))],
)
def test_sums_agree_with_numpy_in_every_layout(name, axis, reverse, computes, rng):
    layout, shape = LAYOUTS[name]
    x = rng.integers(-9, 10, shape).astype(np.int32)
    computes(scan("add", x, layout, axis, reverse))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "int64", "uint32"])
@pytest.mark.parametrize("kind", ["add", "mul", "max", "min"])
def test_every_kind_and_width(kind, dtype, computes, rng):
    x = rng.integers(1, 4, (64, 16)).astype(dtype)
    x[:, 3:] = 1
    computes(scan(kind, x, Layout.WGMMA, 1))


def test_small_scratch_is_used_in_rounds(computes, rng):
    x = rng.integers(-9, 9, (64, 128)).astype(np.float32)
    computes(scan("add", x, Layout.WGMMA, 0, scratch=3 * 512))


@refused
def test_missing_scratch_says_how_much_is_needed():
    x = np.zeros((64, 8), np.float32)
    scan("add", x, Layout.WGMMA, 0, scratch=256).module()


@refused
def test_threads_that_move_along_two_axes_are_refused():
    scan("add", np.zeros((64, 24), np.float32), None, 0).module()
