# SPDX-License-Identifier: Apache-2.0
"""Bodies of the Mosaic level, which get memrefs, run in lockstep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pallas_gpu.mosaic import memrefs
from tests.support.finished import smem_view
from tests.support.lockstep import bodies


def run(
    body: Callable[..., None],
    operands: Sequence[Any],
    results: Sequence[Any],
    **spec: Any,
) -> list[np.ndarray]:
    """Runs a body, which gets a memref for each operand and result."""

    def emit(kb, *views):
        body(*map(memrefs.memref_of, views))

    return bodies.run(emit, operands, results, **spec)


def check(
    body: Callable[..., None],
    operands: Sequence[np.ndarray],
    *expected: np.ndarray,
    rtol: float = 0.0,
    **spec: Any,
) -> None:
    """Compares what a body stores with what it should."""
    found = run(body, operands, expected, **spec)
    for x, y in zip(found, expected, strict=True):
        if y.dtype.kind not in "biu":
            x, y = x.astype(np.float64), y.astype(np.float64)
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol)


def smem(offset: int, shape, dtype, tiling=None, swizzle=None):
    """The memref of an array in SMEM; of a tiled one it has the shape in memory."""
    from pallas_gpu.emitters import module

    view = smem_view(module.current(), offset, shape, dtype, tiling, swizzle)
    return memrefs.memref_of(view)
