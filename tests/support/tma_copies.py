# SPDX-License-Identifier: Apache-2.0
"""What the instructions of a plan for TMA copy, as the hardware executes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pallas_gpu.layouts.gmem.tma_plan import TmaPlan
from pallas_gpu.layouts.smem.swizzle import swizzle_bytes


def _transfers(
    plan: TmaPlan, starts: Sequence[int]
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """For each instruction: SMEM byte offsets, GMEM elements, whether in bounds."""
    boxes = [np.arange(d.box) for d in plan.dims]
    grid = np.stack(np.meshgrid(*boxes, indexing="ij"), axis=-1)
    grid = grid.reshape(-1, len(plan.dims))
    item = plan.element_bits // 8
    for instruction in plan.instructions:
        at = grid + np.array(plan.coordinates(instruction, starts))
        sizes = np.array([d.size for d in plan.dims])
        inside = ((at >= 0) & (at < sizes)).all(axis=1)
        element = at @ np.array([d.stride_elems for d in plan.dims])
        offset = instruction.smem_offset_bytes + np.arange(len(grid)) * item
        yield swizzle_bytes(offset, plan.swizzle), element, inside


def load(plan: TmaPlan, gmem: np.ndarray, starts: Sequence[int]) -> np.ndarray:
    """The bytes of SMEM after a load from an array of elements of 8 or more bits."""
    item = plan.element_bits // 8
    source = np.ascontiguousarray(gmem).reshape(-1).view(np.uint8).reshape(-1, item)
    smem = np.full(plan.smem_bytes, 0xEE, dtype=np.uint8)
    for offset, element, inside in _transfers(plan, starts):
        values = np.where(inside[:, None], source[np.where(inside, element, 0)], 0)
        smem[offset[:, None] + np.arange(item)] = values
    return smem


def store(
    plan: TmaPlan, smem: np.ndarray, gmem: np.ndarray, starts: Sequence[int]
) -> np.ndarray:
    """The array after a store of the bytes `smem` into `gmem`."""
    item = plan.element_bits // 8
    flat = np.ascontiguousarray(gmem).reshape(-1).copy()
    target = flat.view(np.uint8).reshape(-1, item)
    for offset, element, inside in _transfers(plan, starts):
        target[element[inside]] = smem[offset[:, None] + np.arange(item)][inside]
    return flat.reshape(gmem.shape)
