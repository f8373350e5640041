# SPDX-License-Identifier: Apache-2.0
"""Operands and reference of `ops.matmul`, for each target's kernel."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_gpu.ops import matmul
from tests.support import emulated, host

# float16 and bfloat16 results are rounded to 11 and 8 bits; sums reach 64.
ROUNDING = {"float16": 2**-5, "bfloat16": 2**-2, "float32": 1e-4}


def operands(m, n, k, dtype=jnp.float16, batch=()):
    rng = np.random.default_rng(0)
    return (
        host.array(rng.standard_normal((*batch, m, k)), dtype),
        host.array(rng.standard_normal((*batch, k, n)), dtype),
    )


def reference(a, b):
    return np.asarray(a, np.float32) @ np.asarray(b, np.float32)


def check(shape, config: Any, dtype=jnp.float16, out_dtype=None, **how: Any) -> None:
    """Compares a product with NumPy's, executed as `emulated.check` does."""
    a, b = operands(*shape, dtype)

    def make(interpret):
        return lambda x, y: matmul(
            x, y, config=config, out_dtype=out_dtype, interpret=interpret
        )

    atol = ROUNDING[jnp.dtype(out_dtype or dtype).name]
    emulated.check(make, [a, b], reference(a, b), atol=atol, **how)
