# SPDX-License-Identifier: Apache-2.0
"""Bodies of the Mosaic level, which get memrefs: in lockstep, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.emitters import module
from pallas_gpu.lockstep.machine import run_module
from pallas_gpu.mosaic.memory import memrefs
from tests.support import card
from tests.support.everywhere import has_gpu
from tests.support.finished import emitted, smem_view


def build(
    body: Callable[..., None], operands: Sequence[Any], results: Sequence[Any], **spec
) -> ir.Module:
    """The module of a body, which gets a memref for each operand and result."""

    def emit(kb: Any, *views: Any) -> None:
        body(*map(memrefs.memref_of, views))

    return emitted(emit, operands, results, **spec)


def run(
    body: Callable[..., None], operands: Sequence[Any], results: Sequence[Any], **spec
) -> list[np.ndarray]:
    """Runs a body in lockstep."""
    return run_module(build(body, operands, results, **spec), operands, results)


def check(
    body: Callable[..., None],
    operands: Sequence[np.ndarray],
    *expected: np.ndarray,
    rtol: float = 0.0,
    arch: tuple[int, int] = (9, 0),
    **spec: Any,
) -> None:
    """Compares what a body stores with what it should, also on a GPU of its kind."""
    made = build(body, operands, expected, arch=arch, **spec)
    machines = [run_module]
    if has_gpu() and card.capability()[0] == arch[0]:
        machines.append(card.run_module)
    for machine in machines:
        found = machine(made, operands, expected)
        for x, y in zip(found, expected, strict=True):
            if y.dtype.kind not in "biu":
                x, y = x.astype(np.float64), y.astype(np.float64)
            np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol)


def smem(
    offset: int,
    shape: Sequence[int],
    dtype: Any,
    tiling: tuple[int, ...] | None = None,
    swizzle: int | None = None,
) -> ir.Value:
    """The memref of an array in SMEM; of a tiled one it has the shape in memory."""
    view = smem_view(module.current(), offset, shape, dtype, tiling, swizzle)
    return memrefs.memref_of(view)
