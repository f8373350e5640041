# SPDX-License-Identifier: Apache-2.0
"""Drawings of layouts."""

from __future__ import annotations

import pytest

from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts import Layout, WGStridedLayout, draw


def test_a_drawing_names_warp_lane_register_and_place():
    lines = draw(Layout.WGMMA, (64, 8)).splitlines()
    assert lines[1].startswith(" 0 | 0:0 r0.0   0:0 r0.1   0:1 r0.0")
    assert lines[1].endswith("0:3 r0.1")
    assert lines[1 + 25].startswith("25 | 1:4 r1.0")
    assert len(lines) == 65


def test_copies_are_marked():
    assert "0:0 r0.0+" in draw(Layout.WGMMA_COL, (8,))


def test_strided_layouts_are_drawn_even_if_not_linear():
    text = draw(WGStridedLayout((6, 64), 1), (6, 64))
    assert text.splitlines()[-1].endswith("3:31 r2.0")


def test_a_splat_has_no_table():
    assert (
        draw(Layout.WG_SPLAT((8,)), (8,)) == "every element: register 0 of every thread"
    )


def test_a_large_array_is_refused():
    with pytest.raises(LayoutError, match="too large to draw"):
        draw(Layout.WGMMA, (64, 128))
