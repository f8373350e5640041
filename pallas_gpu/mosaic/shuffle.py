# SPDX-License-Identifier: Apache-2.0
"""Words that the lanes of a warp exchange. PTX: `shfl.sync`."""

from __future__ import annotations

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import nvvm

from pallas_gpu.mosaic import module

_FULL_MASK = -1
# Segments are the whole warp (PTX ISA, shfl: operand c).
_LAST_LANE = 31


def from_distance(word: ir.Value, lane_mask: int) -> ir.Value:
    """The word of the lane whose number differs in `lane_mask`.

    PTX: `shfl.sync.bfly.b32`. All threads of the warp issue it.
    """
    return _shuffle(word, module.current().i32(lane_mask), nvvm.ShflKind.bfly)


def from_lane(word: ir.Value, lane: ir.Value) -> ir.Value:
    """The word of a lane, an i32 that may differ from thread to thread.

    PTX: `shfl.sync.idx.b32`. All threads of the warp issue it.
    """
    return _shuffle(word, lane, nvvm.ShflKind.idx)


def _shuffle(word: ir.Value, lane: ir.Value, kind: nvvm.ShflKind) -> ir.Value:
    kernel = module.current()
    mask, last = kernel.i32(_FULL_MASK), kernel.i32(_LAST_LANE)
    return nvvm.shfl_sync(mask, word, lane, last, kind, results=[word.type])
