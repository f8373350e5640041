# SPDX-License-Identifier: Apache-2.0
"""max, min, sum and prod by upstream's names."""

from __future__ import annotations

import numpy as np
import pytest

import pallas_gpu as plgpu
from tests.support import everywhere

X = np.random.default_rng(0).integers(-4, 5, (64, 128)).astype(np.int8)


@pytest.mark.parametrize("name", ["max", "min", "sum", "prod"])
def test_a_reduction_keeps_the_element_type(name):
    reduce = getattr(plgpu, name)

    def body(x, o, o_all):
        o[...] = reduce(x[...], axis=-1, keepdims=True, accumulator_ilp=2)
        o_all[...] = reduce(reduce(x[...], 1))

    rows = getattr(np, name)(X, axis=1, keepdims=True, **dtype_of(name))
    total = getattr(np, name)(X, **dtype_of(name))
    make = everywhere.kernel(body, (rows, total))
    everywhere.check(make, [X], (rows, total))


def dtype_of(name):
    return {"dtype": np.int8} if name in ("sum", "prod") else {}
