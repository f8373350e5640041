# SPDX-License-Identifier: Apache-2.0
"""Kernels made by chance give what NumPy gives, lowered and run in lockstep.

More of them: `PALLAS_GPU_RANDOM_KERNELS=1000:2000 pytest tests/lowering/...`.
"""

from __future__ import annotations

import dataclasses
import os
import re

import jax
import numpy as np
import pytest

import pallas_gpu as plgpu
from tests.support import random_functions, random_kernels
from tests.support.lockstep import kernels as in_lockstep
from tests.support.random_bodies import LIMIT
from tests.support.semantics import Lane, Warpgroup

FIRST, LAST = map(int, os.environ.get("PALLAS_GPU_RANDOM_KERNELS", "0:24").split(":"))
# Under Lane semantics layouts are the author's: most random kernels are refused for one
# of these reasons, which have no meaning in the emulator. Warpgroup refuses none.
LANE_REFUSES = {
    "Operands of an elementwise operation have different layouts",
    "Indices, mask and value of an access have different layouts",
    "The operand of a broadcast is in other threads than the result",
    "the slice would move data between threads",
    "This array cannot be sliced in registers",
    "A reshape of this array can only insert or remove axes of size 1",
    "a loop or a branch changes the layout of an array",
    "this strided layout has no linear form",
    "the placement is not linear in the bits of the thread index",
}


def under_warpgroup(kernel):
    """What the module of a kernel computes; a limit of scratch may be too small.

    Then the message says how much is needed, and with that much the kernel compiles.
    """
    try:
        return in_lockstep.run(kernel.function(), kernel.arguments(), Warpgroup)
    except (plgpu.errors.LayoutError, plgpu.errors.OutOfResources) as error:
        asked = re.search(r"reduction_scratch_bytes=(\d+)", str(error.hint))
        if kernel.room is None or asked is None:
            raise
        assert int(asked[1]) > kernel.room
    enough = dataclasses.replace(kernel, room=int(asked[1]))
    return in_lockstep.run(enough.function(), kernel.arguments(), Warpgroup)


def check(got, expected) -> None:
    for a, b in zip(got, expected, strict=True):
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_a_random_kernel_gives_what_numpy_gives(seed):
    kernel = random_kernels.make(seed)
    with jax.enable_x64(kernel.wide):
        _check_in_lockstep(kernel)


def _check_in_lockstep(kernel):
    expected = kernel.expected()
    function, arguments = kernel.function(), kernel.arguments()
    check(under_warpgroup(kernel), expected)
    try:
        got = in_lockstep.run(function, arguments, Lane)
    except plgpu.errors.LayoutError as error:
        assert error.what in LANE_REFUSES
        return
    except plgpu.errors.OutOfResources as error:
        assert error.what.startswith("converting")  # a layout_cast needs scratch
        return
    check(got, expected)


@pytest.mark.parametrize("seed", range(FIRST, LAST, 5))
def test_the_emulator_gives_it_too(seed):
    kernel = random_kernels.make(seed)
    function = kernel.function(plgpu.InterpretParams(seed=seed))
    with jax.enable_x64(kernel.wide):
        check(function(*kernel.arguments()), kernel.expected())


@pytest.mark.parametrize("name", [*random_functions.FUNCTIONS, *random_functions.LONG])
def test_no_value_of_a_function_is_near_where_rounding_changes(name):
    function = (random_functions.FUNCTIONS | random_functions.LONG)[name]
    x = np.arange(-LIMIT, LIMIT + 1, dtype=np.float32)
    values = 4 * np.asarray(jax.jit(function)(x)).astype(np.float64)
    assert np.isfinite(values).all()
    assert np.abs(values - np.floor(values) - 0.5).min() > random_functions.MARGIN
