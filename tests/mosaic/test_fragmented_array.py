# SPDX-License-Identifier: Apache-2.0
"""Arrays in registers at the Mosaic level, in lockstep, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_gpu import mosaic as mgpu
from tests.support import mosaic_bodies as bodies

F32, F16, I32 = np.float32, np.float16, np.int32


def sample(dtype, shape=(64, 128), seed=0):
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind in "iu":
        low = 1 if np.dtype(dtype).kind == "u" else -50
        return rng.integers(low, 50, shape).astype(dtype)
    return (rng.normal(size=shape) * 2).astype(dtype)


# name: (dtype, of two arrays, of NumPy if it is another one)
OPERATORS = {
    "add": (F32, lambda x, y: x + y + 1.5, None),
    "radd": (I32, lambda x, y: 3 + x - (7 - y), None),
    "mul": (F16, lambda x, y: -x * y, None),
    "true division": (F32, lambda x, y: 1.0 / (x / y), None),
    "floor division": (
        I32, lambda x, y: x // (y | 1) + 100 // (y | 1), None
    ),
    "floor division of floats": (F32, lambda x, y: x // y, None),
    "unsigned": (np.uint32, lambda x, y: (x // y) + (x >> 1) + x % y, None),
    "remainder": (
        I32, lambda x, y: x % (y | 1), lambda x, y: np.fmod(x, y | 1)
    ),
    "trunc_div": (
        I32, lambda x, y: x.trunc_div(y | 1), lambda x, y: np.trunc(x / (y | 1))
    ),
    "bits": (I32, lambda x, y: (x & y) | (x ^ 5) | ~y, None),
    "shifts": (I32, lambda x, y: (x << 2) + (y >> 1), None),
    "power": (F32, lambda x, y: x**3, None),
    "max, min": (
        F32, lambda x, y: x.max(y) - x.min(0.5),
        lambda x, y: np.maximum(x, y) - np.minimum(x, F32(0.5)),
    ),
    "select": (
        F32, lambda x, y: ((x < y) & (y >= 0.0)).select(x, y),
        lambda x, y: np.where((x < y) & (y >= 0), x, y),
    ),
    "compare": (
        I32, lambda x, y: (x == y).select(x + 1, (x != 3).select(y, x)),
        lambda x, y: np.where(x == y, x + 1, np.where(x != 3, y, x)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("layout", ["strided", "tiled"])
def test_an_operator_is_numpys(name, layout):
    dtype, function, of_numpy = OPERATORS[name]
    x, y = sample(dtype), sample(dtype, seed=1)

    def body(a, b, out):
        signed = None if x.dtype.kind == "f" else x.dtype.kind == "i"
        if layout == "strided":
            load = mgpu.FragmentedArray.load_strided
            operands = [load(r, is_signed=signed) for r in (a, b)]
        else:
            load = mgpu.FragmentedArray.load_untiled
            how = {"layout": mgpu.WGMMA_LAYOUT, "is_signed": signed}
            operands = [load(r, optimized=False, **how) for r in (a, b)]
        function(*operands).store_untiled(out, optimized=False)

    expected = np.asarray((of_numpy or function)(x, y)).astype(dtype)
    bodies.check(body, [x, y], expected, rtol=2e-3 if dtype is F16 else 1e-5)
