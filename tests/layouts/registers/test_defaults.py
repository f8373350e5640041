# SPDX-License-Identifier: Apache-2.0
"""Arrays of any shape have a default layout."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_gpu.layouts import LinearLayout, WGStridedLayout, default_layout
from pallas_gpu.layouts.registers.defaults import padded_layout
from pallas_gpu.layouts.registers.linear import LANE_BITS, THREADS, WARP_LANES
from tests.support.odd_shapes import shapes


def test_a_multiple_of_128_elements_is_strided():
    assert default_layout((64, 6), 32) == WGStridedLayout.default((64, 6), 32)


@settings(max_examples=60, deadline=None)
@given(shapes(), st.sampled_from([8, 16, 32, 64]))
def test_every_shape_of_up_to_65536_elements_has_a_default_layout(shape, bits):
    layout = default_layout(shape, bits)
    held = layout.num_registers * layout.vector_length
    # At most half is padding, except along axes that threads cannot divide well.
    assert held <= max(16, 2 * math.prod(shape) / 128 + 2)


@pytest.mark.parametrize(
    "shape, registers, box",
    [
        ((129,), 2, (256,)),
        ((1001,), 8, (1024,)),
        ((127,), 1, (128,)),
        ((100, 77), 65, (104, 80)),
        ((65, 3), 3, (96, 4)),
        ((7, 1001), 56, (7, 1024)),
        ((3, 5, 7, 11), 15, (3, 5, 8, 16)),
    ],
)
def test_odd_shapes_are_padded_to_whole_registers(shape, registers, box):
    layout = default_layout(shape, 32)
    assert isinstance(layout, LinearLayout)
    assert (layout.num_registers, layout.box) == (registers, box)


def test_padded_rows_of_even_length_are_accessed_in_vectors():
    layout = default_layout((5000,), 32)
    assert (layout.num_registers, layout.vector_length) == (10, 4)


@given(shapes(most=4096, rank=3), st.integers(0, 2))
def test_warps_of_a_padded_layout_are_along_the_given_axes(shape, axis):
    axes = (axis % len(shape),)
    layout = padded_layout(shape, axes)
    if layout is not None:
        for column in layout.thread_columns[LANE_BITS:]:
            assert [a for a, x in enumerate(column) if x] == list(axes)


def test_powers_of_two_are_spread_over_threads():
    layout = default_layout((4, 3), 32)
    assert layout.num_registers == 3
    assert layout.replication_bits == (2, 3, 4, 5, 6)


# --- arrays of a single warp ----------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(shapes(), st.sampled_from([8, 16, 32, 64]))
def test_a_warp_holds_every_element_of_its_array_in_its_lanes(shape, bits):
    layout = default_layout(shape, bits, WARP_LANES)
    assert isinstance(layout, LinearLayout) and layout.is_of_warp
    flat = layout.flat_indices()
    for first in range(0, THREADS, WARP_LANES):
        lanes = flat[first : first + WARP_LANES]
        assert set(lanes[lanes >= 0].tolist()) == set(range(math.prod(shape)))
    held = layout.num_registers * layout.vector_length
    # Each dimension is padded to few significant bits: (5, 5, 5, 5) to (8, 6, 6, 5).
    assert held <= max(16, 2.5 * math.prod(shape) / WARP_LANES + 2)


@pytest.mark.parametrize(
    ("shape", "bits", "vector", "registers"),
    [
        ((256,), 32, 4, 2),
        ((64,), 32, 2, 1),
        ((8, 64), 16, 4, 4),
        ((64,), 64, 2, 1),
        ((96,), 32, 1, 3),
    ],
)
def test_whole_vectors_lie_cyclically_over_the_lanes(shape, bits, vector, registers):
    layout = default_layout(shape, bits, WARP_LANES)
    assert isinstance(layout, LinearLayout)
    assert (layout.vector_length, layout.num_registers) == (vector, registers)
    assert layout.flat_indices()[1, 0, 0] == vector
