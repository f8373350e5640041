# SPDX-License-Identifier: Apache-2.0
"""Kernels made by chance give what NumPy gives, lowered and run in lockstep.

More of them: `PALLAS_GPU_RANDOM_KERNELS=1000:2000 pytest tests/lowering/...`.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

import pallas_gpu as plgpu
from tests.support import random_kernels
from tests.support.lockstep import kernels as in_lockstep
from tests.support.semantics import Lane, Warpgroup

FIRST, LAST = map(int, os.environ.get("PALLAS_GPU_RANDOM_KERNELS", "0:24").split(":"))
# Under Lane semantics, layouts are the author's: most random kernels are refused.
REFUSED = plgpu.errors.LayoutError, plgpu.errors.OutOfResources


def check(got, expected) -> None:
    for a, b in zip(got, expected, strict=True):
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_a_random_kernel_gives_what_numpy_gives(seed):
    kernel = random_kernels.make(seed)
    expected = kernel.expected()
    function, arguments = kernel.function(), kernel.arguments()
    check(in_lockstep.run(function, arguments, Warpgroup), expected)
    try:
        got = in_lockstep.run(function, arguments, Lane)
    except REFUSED:
        return
    check(got, expected)


@pytest.mark.parametrize("seed", range(FIRST, LAST, 20))
def test_the_emulator_gives_it_too(seed):
    kernel = random_kernels.make(seed)
    function = kernel.function(plgpu.InterpretParams(seed=seed))
    check(function(*kernel.arguments()), kernel.expected())
