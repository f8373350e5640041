# SPDX-License-Identifier: Apache-2.0
"""Kernels that were written from the documentation alone, with what they compute.

Each file has the kernel as `function`, the `CONFIGS` that `benchmarks/authors.py` tries
as Triton's tuner would, a `reference` in float32, and `arrays(*size)` of the sizes
`SMALL` and `FULL`; where several results are right, `comparable(args, *results)` gives
what they have in common. The rivals in Triton are in `benchmarks/triton_authors.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def normal(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Returns random normal numbers."""
    return jax.random.normal(jax.random.key(seed), shape, dtype)
