# SPDX-License-Identifier: Apache-2.0
"""Placements: layouts of arrays of a given shape, their names and reshapes."""

from __future__ import annotations

import pytest

from pallas_gpu.layouts import Layout, WGSplatLayout
from pallas_gpu.layouts.registers.placement import (
    default_placement,
    describe,
    place,
    reshape_placement,
)


def test_a_placement_is_its_own_placement():
    linear = place(Layout.WGMMA, (64, 64))
    assert place(linear, (64, 64)) is linear


def test_a_strided_layout_stays_strided_only_where_it_is_not_linear():
    assert place(Layout.WG_STRIDED((384, 3), vec_size=1), (384, 3)).shape == (384, 3)


def test_only_a_splat_has_a_splat_layout():
    assert isinstance(place(Layout.WG_SPLAT, (64, 64)), WGSplatLayout)


def test_by_default_a_bool_is_spread_as_the_byte_that_it_is_in_memory():
    assert default_placement((64, 64), 1) == default_placement((64, 64), 8)


@pytest.mark.parametrize(
    ("layout", "shape", "name"),
    [
        (Layout.WGMMA, (64, 8), "Layout.WGMMA"),
        (Layout.WG_STRIDED((256,), vec_size=2), (256,), "WG_STRIDED((256,), vec_size"),
        (Layout.WG_STRIDED((384, 3), vec_size=1), (384, 3), "WG_STRIDED(shape=(384"),
    ],
)
def test_messages_name_layouts_as_users_do(layout, shape, name):
    assert name in describe(place(layout, shape))


@pytest.mark.parametrize("shape", [(6, 1024), (3, 2048), (48, 128), (6144,)])
def test_a_strided_array_has_every_shape_of_its_size(shape):
    layout = default_placement((96, 64), 32)
    reshaped = reshape_placement(layout, shape)
    assert reshaped == default_placement(shape, 32)
