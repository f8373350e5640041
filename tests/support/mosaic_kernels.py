# SPDX-License-Identifier: Apache-2.0
"""Kernels of the Mosaic level, called with arrays: in lockstep, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pallas_gpu import mosaic as mgpu
from tests.support import card
from tests.support.everywhere import has_gpu


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
    """Runs a body, also on a GPU; results are arrays, or their types."""
    function = kernel(body, operands, results, scratch, **options)
    found = [np.asarray(x) for x in function(*operands)]
    if not needs_blackwell(scratch):
        for x, y in zip(on_card(function, operands), found, strict=False):
            np.testing.assert_array_equal(x, y)
    return found


def needs_blackwell(scratch: Any) -> bool:
    """Whether a kernel has tensor memory."""
    return any(isinstance(x, mgpu.TMEM) for x in jax.tree.leaves(scratch))


def on_card(
    function: Callable[..., Any], operands: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """The results of a function on Hopper's GPU; none without one."""
    if not has_gpu() or card.capability()[0] != 9:
        return []
    device = jax.devices("cuda")[0]
    with jax.default_device(device):
        arrays = [jax.device_put(x, device) for x in operands]
        return [np.asarray(x) for x in jax.tree.leaves(function(*arrays))]


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
