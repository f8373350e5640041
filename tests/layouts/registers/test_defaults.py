# SPDX-License-Identifier: Apache-2.0
"""Arrays of any shape have a default layout."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts import LinearLayout, WGStridedLayout, default_layout


def test_a_multiple_of_128_elements_is_strided():
    assert default_layout((64, 6), 32) == WGStridedLayout.default((64, 6), 32)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=2))
def test_every_element_of_an_odd_shape_has_a_place(shape):
    layout = default_layout(shape, 32)
    if isinstance(layout, LinearLayout):
        found = layout.all_coordinates().reshape(-1, len(shape))
        assert len(np.unique(found, axis=0)) == np.prod(shape)


def test_powers_of_two_are_spread_over_threads():
    layout = default_layout((4, 3), 32)
    assert layout.num_registers == 3
    assert layout.replication_bits == (2, 3, 4, 5, 6)


def test_an_odd_shape_that_no_thread_can_hold_is_refused():
    with pytest.raises(LayoutError, match="no register layout"):
        default_layout((999,), 32)
