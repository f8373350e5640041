# SPDX-License-Identifier: Apache-2.0
"""The ready kernels in every order of their waits, signals and barriers."""

from __future__ import annotations

import numpy as np
import pytest

import pallas_gpu as plgpu
from tests.support import tiers
from tests.support.sparsecore.op_cases import CASES


@pytest.mark.parametrize("name", CASES)
def test_all_orders_are_one(name):
    if not tiers.runs_everything() and name != "segment_sum":
        pytest.skip("it waits as the others do")
    args = CASES[name].args(np.random.default_rng(len(name)))
    verdict = plgpu.check(CASES[name].call, orders="all")(*args)
    assert verdict.clean
    assert all(kernel.complete and kernel.orders == 1 for kernel in verdict.coverage)
