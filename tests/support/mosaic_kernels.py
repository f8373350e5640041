# SPDX-License-Identifier: Apache-2.0
"""Kernels of the Mosaic level, called with arrays: what they give in lockstep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pallas_gpu import mosaic as mgpu


def typed(array: Any) -> jax.ShapeDtypeStruct:
    """The type of an array."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def smem(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    """An array of scratch."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def kernel(
    body: Callable[..., None],
    operands: Sequence[Any],
    results: Sequence[Any],
    scratch: Any = (),
    *,
    grid: tuple[int, int, int] = (1, 1, 1),
    block: tuple[int, int, int] = (128, 1, 1),
    **options: Any,
) -> Callable[..., Any]:
    """The function of a body for arrays of the types of some."""
    given, made = ([*map(typed, x)] for x in (operands, results))
    return mgpu.as_gpu_kernel(body, grid, block, given, made, scratch, **options)


def run(
    body: Callable[..., None],
    operands: Sequence[Any],
    results: Sequence[Any],
    scratch: Any = (),
    **options: Any,
) -> list[np.ndarray]:
    """Runs a body; results are arrays, or their types."""
    function = kernel(body, operands, results, scratch, **options)
    return [np.asarray(x) for x in function(*operands)]


def check(
    body: Callable[..., None],
    operands: Sequence[Any],
    *expected: np.ndarray,
    scratch: Any = (),
    tolerance: float = 0.0,
    **options: Any,
) -> None:
    """Compares what a body stores with what it should."""
    found = run(body, operands, expected, scratch, **options)
    for x, y in zip(found, expected, strict=True):
        x, y = (z.astype(np.float64) for z in (x, y))
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)
