# SPDX-License-Identifier: Apache-2.0
"""Kernels that multiply values, compared with products in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from tests.support import everywhere, host
from tests.support.semantics import BOTH

F32 = jnp.float32
# Of the magnitudes: float32 is read as tf32, 10 bits of mantissa; sums
# of 8-bit floats have 13 bits.
TOLERANCE = {
    "float16": 1e-5,
    "bfloat16": 1e-5,
    "float32": 2e-3,
    "int8": 0.0,
    "uint8": 0.0,
    "float8_e4m3fn": 5e-4,
    "float8_e5m2": 5e-4,
}


def numbers(rng, dtype, *shape):
    if jnp.issubdtype(dtype, jnp.integer):
        low = 0 if jnp.issubdtype(dtype, jnp.unsignedinteger) else -8
        return host.array(rng.integers(low, low + 16, shape), dtype)
    return host.array(rng.standard_normal(shape), dtype)


def float64(x):
    return np.asarray(x).astype(np.float64)


def kernel(body, shape, dtype=F32, **options):
    return everywhere.kernel(body, jax.ShapeDtypeStruct(shape, dtype), **options)


def check_product(body, a, b, expression, out=F32, tolerance=None, semantics=BOTH):
    """Compares `body` with an einsum in float64, relative to the terms' magnitudes."""
    tolerance = TOLERANCE[a.dtype.name] if tolerance is None else tolerance
    exact = np.einsum(expression, float64(a), float64(b))
    scale = np.einsum(expression, abs(float64(a)), abs(float64(b)))
    everywhere.check(
        kernel(body, exact.shape, out),
        [a, b],
        exact,
        atol=tolerance * scale.max(),
        semantics=semantics,
        executed=semantics,
    )


def sum_type(dtype):
    return jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else F32
