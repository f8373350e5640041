# SPDX-License-Identifier: Apache-2.0
"""Moves through scratch, from any layout to any, in one round and in several."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_gpu.emitters import gmem
from pallas_gpu.emitters import registers as regs
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.moves import rearrange as moves
from pallas_gpu.emitters.moves.scratch import SmemScratch
from pallas_gpu.layouts import Layout
from pallas_gpu.layouts.moves import rearrange as plans
from pallas_gpu.layouts.registers.placement import default_placement, place
from tests.support.finished import emitted, typed
from tests.support.lockstep import bodies as lockstep
from tests.support.refusal import refused_by

SHAPE = (64, 32)
# Strided and not linear: 24 * 16 elements in three registers.
ODD = (24, 16)


def run(plan, x, expected, *, src=None, dst=None, scratch=1 << 15, fill=None):
    def body(kb, view, out):
        held = gmem.load(view, place(src, view.shape) if src else None)
        target = place(dst, plan.shape) if dst else default_placement(plan.shape, 32)
        other = None
        if fill is not None:
            value = dtypes.constant(fill, held.dtype)
            other = regs.splat(value, held.dtype, plan.shape)
        room = SmemScratch(kb.smem_pointer(0), scratch)
        gmem.store(out, moves.rearrange(plan, [held], target, room, other=other))

    result = np.zeros(plan.shape, x.dtype)
    (result,) = lockstep.run(body, [x], [result], smem_bytes=scratch)
    np.testing.assert_array_equal(result, expected)


def numbers(shape, dtype, rng):
    return rng.integers(0, 2 if dtype == "bool" else 100, shape).astype(dtype)


LAYOUTS = [None, Layout.WGMMA, Layout.WGMMA_TRANSPOSED]


@pytest.mark.parametrize("scratch", [1 << 15, 1008])
@pytest.mark.parametrize("dst", LAYOUTS)
@pytest.mark.parametrize("src", LAYOUTS)
def test_a_reversal_between_any_layouts(src, dst, scratch, rng):
    x = numbers(SHAPE, "int32", rng)
    plan = plans.reversal(SHAPE, [0, 1])
    run(plan, x, x[::-1, ::-1], src=src, dst=dst, scratch=scratch)


def test_a_reversal_in_the_least_scratch(rng):
    x = numbers((16, 8), "int32", rng)
    run(plans.reversal(x.shape, [0, 1]), x, x[::-1, ::-1], scratch=16)


@pytest.mark.parametrize("scratch", [1 << 15, 512])
@pytest.mark.parametrize("dtype", ["bool", "int8", "float16", "int32", "float64"])
def test_every_width_of_elements(dtype, scratch, rng):
    x = numbers(SHAPE, dtype, rng)
    plan = plans.part(SHAPE, (3, 1), (32, 12), (1, 2))
    run(plan, x, x[3:35, 1:25:2], src=Layout.WGMMA, scratch=scratch)


@pytest.mark.parametrize("scratch", [1 << 15, 256])
def test_a_layout_that_is_not_linear(scratch, rng):
    x = numbers(ODD, "int32", rng)
    run(plans.transpose(ODD, (1, 0)), x, x.T, scratch=scratch)
    run(plans.reshape(ODD, (48, 8)), x, x.reshape(48, 8), scratch=scratch)


@pytest.mark.parametrize("scratch", [1 << 15, 1024])
@pytest.mark.parametrize("dst", [None, Layout.WGMMA])
def test_elements_that_are_not_loaded_are_those_of_the_other_array(dst, scratch, rng):
    x = numbers((32, 8), "int32", rng)
    config = [(1, 0, 1), (-1, 25, 0)]
    expected = np.full((64, 32), 7, np.int32)
    expected[1::2, :7] = x[:, 1:]
    run(plans.padding(x.shape, config), x, expected, dst=dst, scratch=scratch, fill=7)


def test_the_places_of_a_reversal_are_sums():
    target = place(Layout.WGMMA, SHAPE)
    plan = plans.reversal(SHAPE, [0, 1])
    assert moves.Loads(plan, target, np.dtype(np.int32), (), None).found is not None


@refused_by(emitted, [typed(SHAPE, np.float32)] * 2)
def test_without_scratch_the_error_says_what_needs_it(kb, view, out):
    x = gmem.load(view)
    moves.rearrange(plans.reversal(SHAPE, [0]), [x], x.layout, None)
