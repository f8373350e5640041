# SPDX-License-Identifier: Apache-2.0
"""Cumulative operations over any layout, in a thread, a warp and a warpgroup."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_gpu import errors
from pallas_gpu.layouts import Layout
from pallas_gpu.layouts.registers.placement import place
from pallas_gpu.mosaic import gmem
from pallas_gpu.mosaic.moves import scans
from pallas_gpu.mosaic.moves.scratch import SmemScratch
from tests.support.lockstep import machine as lockstep

ACCUMULATE = {
    "add": np.add,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
}
LAYOUTS = {
    "WGMMA": (Layout.WGMMA, (128, 24)),
    "WGMMA_TRANSPOSED": (Layout.WGMMA_TRANSPOSED, (64, 64)),
    "WGMMA_8BIT": (Layout.WGMMA_8BIT, (64, 32)),
    "strided": (None, (64, 128)),
    "narrow": (None, (512, 8)),
    "vector": (None, (1024,)),
}


def scan_body(kind, layout, axis, reverse=False, scratch=2048):
    def body(kb, view, out):
        x = gmem.load(view, place(layout, view.shape) if layout else None)
        room = SmemScratch(kb.smem_pointer(0), scratch)
        gmem.store(out, scans.scan(kind, x, axis, reverse=reverse, scratch=room))

    return body


def run(kind, x, layout, axis, reverse=False, scratch=2048):
    body = scan_body(kind, layout, axis, reverse, scratch)
    (result,) = lockstep.run(body, [x], [x], smem_bytes=scratch)
    return result


def expected(kind, x, axis, reverse):
    flipped = np.flip(x, axis) if reverse else x
    wide = ACCUMULATE[kind].accumulate(flipped, axis=axis, dtype=x.dtype)
    return np.flip(wide, axis) if reverse else wide


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("name", "axis"),
    [(name, a) for name, (_, shape) in LAYOUTS.items() for a in range(len(shape))],
)
def test_sums_agree_with_numpy_in_every_layout(name, axis, reverse, rng):
    layout, shape = LAYOUTS[name]
    x = rng.integers(-9, 10, shape).astype(np.int32)
    actual = run("add", x, layout, axis, reverse)
    np.testing.assert_array_equal(actual, expected("add", x, axis, reverse))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "int64", "uint32"])
@pytest.mark.parametrize("kind", ACCUMULATE)
def test_every_kind_and_width(kind, dtype, rng):
    x = rng.integers(1, 4, (64, 16)).astype(dtype)
    x[:, 3:] = 1
    actual = run(kind, x, Layout.WGMMA, 1)
    np.testing.assert_array_equal(actual, expected(kind, x, 1, False))


def test_small_scratch_is_used_in_rounds(rng):
    x = rng.integers(-9, 9, (64, 128)).astype(np.float32)
    actual = run("add", x, Layout.WGMMA, 0, scratch=3 * 512)
    np.testing.assert_array_equal(actual, np.cumsum(x, 0))


def test_missing_scratch_says_how_much_is_needed(build, typed):
    x = typed((64, 8), np.float32)
    with pytest.raises(errors.OutOfResources, match="at least 512 bytes"):
        build(scan_body("add", Layout.WGMMA, 0, scratch=256), [x], [x])


def test_threads_that_move_along_two_axes_are_refused(build, typed):
    x = typed((64, 24), np.float32)
    with pytest.raises(errors.LayoutError):
        build(scan_body("add", None, 0), [x], [x])
