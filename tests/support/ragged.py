# SPDX-License-Identifier: Apache-2.0
"""Operands and references of ragged products, group by group in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

# float16 and bfloat16 results are rounded to 11 and 8 bits; sums reach 64.
ROUNDING = {"float16": 2**-5, "bfloat16": 2**-2, "float32": 1e-4}


def normal(*shape: int, dtype: Any = jnp.float16, seed: int = 0) -> Any:
    rng = np.random.default_rng((seed, *shape))
    return rng.standard_normal(shape).astype(dtype)


def spans(sizes: Sequence[int], rows: int) -> Iterator[slice]:
    """Yields the rows of each group; there are none beyond `rows`."""
    start = 0
    for size in sizes:
        yield slice(min(start, rows), min(start + size, rows))
        start += size


def product(a: Any, b: Any, sizes: Sequence[int]) -> np.ndarray:
    """Returns each group's rows times its matrix, and zeros."""
    x, w = np.asarray(a, np.float64), np.asarray(b, np.float64)
    out = np.zeros((x.shape[0], w.shape[2]))
    for rows, matrix in zip(spans(sizes, len(x)), w, strict=True):
        out[rows] = x[rows] @ matrix
    return out


def contracted(a: Any, b: Any, sizes: Sequence[int]) -> np.ndarray:
    """Returns `a.T @ b` over each group's rows."""
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.stack([x[rows].T @ y[rows] for rows in spans(sizes, len(x))])
