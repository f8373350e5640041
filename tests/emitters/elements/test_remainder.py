# SPDX-License-Identifier: Apache-2.0
"""The remainder of floats is exact, however large the quotient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.support import everywhere

SIZE = 1024


def operands(dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of all exponents; subnormal ones, infinities, NaNs and zeros."""
    random = np.random.default_rng(0)
    info = jnp.finfo(dtype)

    def numbers() -> np.ndarray:
        exponents = random.uniform(info.minexp - info.nmant, info.maxexp, SIZE)
        return (random.choice([-1.0, 1.0], SIZE) * np.exp2(exponents)).astype(dtype)

    x, y = numbers(), numbers()
    x[:8] = np.array([1e8, -1e8, 7, np.inf, np.nan, -0.0, 5, 1]).astype(dtype)
    y[:8] = np.array([3, 7, -3, 2, 1, 3, np.inf, 0]).astype(dtype)
    x[8:24] = x[8:24] * info.smallest_normal  # the quotient is small
    y[8:24] = info.smallest_subnormal * np.arange(1, 17).astype(dtype)
    return x, y


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_a_remainder_is_exact(dtype: str):
    with jax.enable_x64(True):
        x, y = operands(jnp.dtype(dtype))
        # Exact, as a remainder is a number of the type, and of any wider type.
        with np.errstate(invalid="ignore"):
            expected = np.fmod(x.astype(np.float64), y.astype(np.float64))

        def body(x_ref, y_ref, o_ref):
            o_ref[...] = lax.rem(x_ref[...], y_ref[...])

        everywhere.run(body, [x, y], expected.astype(x.dtype))
