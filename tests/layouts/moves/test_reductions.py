# SPDX-License-Identifier: Apache-2.0
"""Plans of reductions, carried out on numbers: every thread ends with the sums."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_gpu.layouts import Layout
from pallas_gpu.layouts.moves.reductions import plan_reduction
from pallas_gpu.layouts.registers.placement import place

CASES = {
    "rows of WGMMA": (Layout.WGMMA, (64, 32), (1,)),
    "columns of WGMMA": (Layout.WGMMA, (64, 32), (0,)),
    "all of WGMMA": (Layout.WGMMA, (64, 32), (0, 1)),
    "columns of a strided array": (
        Layout.WG_STRIDED((16, 128), vec_size=2),
        (16, 128),
        (0,),
    ),
    "all of a strided array without a linear form": (
        Layout.WG_STRIDED((384, 3), vec_size=1),
        (384, 3),
        (0, 1),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_folds_and_exchanges_of_the_plan_sum_up_the_reduced_axes(case):
    layout, shape, axes = CASES[case]
    placement = place(layout, shape)
    plan = plan_reduction(placement, axes)
    x = np.random.default_rng(0).integers(0, 9, shape)
    held = x[tuple(np.moveaxis(placement.all_coordinates(), -1, 0))]
    partial = np.stack([held[:, list(group)].sum(1) for group in plan.groups], 1)
    if plan.vector_reduced:
        partial = partial.sum(2, keepdims=True)
    threads = np.arange(128)
    for bit in (*plan.lanes, *plan.warps):
        partial = partial + partial[threads ^ (1 << bit)]
    expected = x.sum(axes)
    if plan.result is None:
        assert (partial == expected).all()
        return
    coordinates = plan.result.all_coordinates()
    np.testing.assert_array_equal(
        partial, expected[tuple(np.moveaxis(coordinates, -1, 0))]
    )


def test_rows_of_wgmma_are_reduced_without_scratch():
    assert plan_reduction(place(Layout.WGMMA, (64, 32)), (1,)).scratch_bytes(32) == 0


def test_one_round_has_room_for_all_registers_of_the_result():
    linear = place(Layout.WGMMA, (64, 128))
    plan = plan_reduction(linear, (0,))
    assert plan.scratch_bytes(32) == len(plan.groups) * plan.round_bytes(32)
    assert len(plan.groups) == 16


def test_a_bool_takes_a_byte_of_scratch():
    linear = place(Layout.WGMMA, (64, 32))
    plan = plan_reduction(linear, (0,))
    assert plan.scratch_bytes(1) == plan.scratch_bytes(8) > 0


def test_a_strided_array_without_a_linear_form_reduces_to_a_scalar_only():
    strided = place(Layout.WG_STRIDED((384, 3), vec_size=1), (384, 3))
    assert plan_reduction(strided, (0, 1)).result is None
