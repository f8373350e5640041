# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of block-scaled products: exact elements, sums that are rounded once.

PTX ISA, tcgen05 "Block scaling": (a * scale of a) * (b * scale of b), added to the
accumulator in float32.
"""

from __future__ import annotations

import numpy as np


def accumulate(
    acc: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    a_scale: np.ndarray,
    b_scale: np.ndarray,
) -> None:
    """Adds the product to acc.

    Args:
      acc: (M, N) in float32.
      a: (M, K) elements.
      b: (K, N) elements.
      a_scale: (at least M, K / block) scales.
      b_scale: (at least N, K / block) scales.
    """
    columns = b.shape[1]
    left = _scaled(a, a_scale[: len(a)])
    right = _scaled(b.T, b_scale[:columns])
    with np.errstate(over="ignore", invalid="ignore"):
        acc[...] = (acc.astype(np.float64) + left @ right.T).astype(np.float32)


def joined(b_scale: np.ndarray, columns: int) -> np.ndarray:
    """Scales of b in halves, 128 rows for each, as (N, K / block)."""
    half = columns // 2
    upper = len(b_scale) // 2
    return np.concatenate([b_scale[:half], b_scale[upper : upper + half]])


def _scaled(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Returns rows of elements times the scales of their blocks: exact in float64."""
    block = x.shape[1] // scale.shape[1]
    return x.astype(np.float64) * np.repeat(scale.astype(np.float64), block, axis=1)
