# SPDX-License-Identifier: Apache-2.0
"""Exchange of words between the lanes of a warp. PTX: `shfl.sync`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import nvvm

from pallas_gpu.emitters import module
from pallas_gpu.emitters.elements import arith, dtypes

_FULL_MASK = -1
# The segment is the whole warp (PTX ISA, shfl: operand c).
_LAST_LANE = 31


def from_distance(word: ir.Value, lane_mask: int) -> ir.Value:
    """The word of the lane whose index differs in the bits of `lane_mask`.

    PTX: `shfl.sync.bfly.b32`. All threads of the warp issue it.
    """
    return from_other(word, module.current().i32(lane_mask))


def from_lane(word: ir.Value, lane: ir.Value) -> ir.Value:
    """The word of the given lane, an i32 that may differ between threads.

    PTX: `shfl.sync.idx.b32`. All threads of the warp issue it.
    """
    return _shuffle(word, lane, nvvm.ShflKind.idx)


def from_other(word: ir.Value, lane_mask: ir.Value) -> ir.Value:
    """As `from_distance`, of bits in a register.

    PTX: `shfl.sync.bfly.b32`. All threads of the warp issue it.
    """
    return _shuffle(word, lane_mask, nvvm.ShflKind.bfly)


def from_below(word: ir.Value, distance: ir.Value) -> ir.Value:
    """The word of the lane so far below; the thread's own if there is none.

    PTX: `shfl.sync.up.b32`. All threads of the warp issue it.
    """
    return _shuffle(word, distance, nvvm.ShflKind.up, last=0)


def from_above(word: ir.Value, distance: ir.Value) -> ir.Value:
    """The word of the lane so far above; the thread's own if there is none.

    PTX: `shfl.sync.down.b32`. All threads of the warp issue it.
    """
    return _shuffle(word, distance, nvvm.ShflKind.down)


def exchange(value: ir.Value, dtype: np.dtype, lane_mask: int) -> ir.Value:
    """The vector, of any dtype, of the lane whose index differs in `lane_mask`.

    PTX: `shfl.sync.bfly.b32` for each word. All threads of the warp issue it.
    """
    return by_words(value, dtype, lambda word: from_distance(word, lane_mask))


def by_words(
    value: ir.Value, dtype: np.dtype, emit: Callable[[ir.Value], ir.Value]
) -> ir.Value:
    """A vector, of any dtype, from what is emitted for each of its 32-bit words.

    Elements that do not fill a word have one each, whose other bits are zero and
    afterwards ignored.
    """
    lanes = dtypes.length(value) or 1
    total_bits = lanes * dtypes.bits(dtype)
    if total_bits % 32 == 0:
        words = dtypes.bitcast(value, dtypes.I32)
        count = dtypes.length(words) or 1
        moved = [emit(dtypes.extract(words, i)) for i in range(count)]
        return dtypes.bitcast(dtypes.pack(moved), dtype)
    if lanes > 1:
        parts = [dtypes.splat(dtypes.extract(value, i), 1) for i in range(lanes)]
        moved = [by_words(part, dtype, emit) for part in parts]
        return dtypes.pack([dtypes.extract(part, 0) for part in moved])
    narrow = np.dtype(f"int{dtypes.bits(dtype)}")
    bits = dtypes.extract(dtypes.bitcast(value, narrow), 0)
    word = emit(arith.extui(ir.IntegerType.get_signless(32), bits))
    back = arith.trunci(dtypes.mlir_type(narrow), word)
    return dtypes.bitcast(dtypes.splat(back, 1), dtype)


def full_mask() -> ir.Value:
    """The mask of all lanes of a warp."""
    return module.current().i32(_FULL_MASK)


def _shuffle(
    word: ir.Value, lane: ir.Value, kind: nvvm.ShflKind, last: int = _LAST_LANE
) -> ir.Value:
    clamp = module.current().i32(last)
    return nvvm.shfl_sync(full_mask(), word, lane, clamp, kind, results=[word.type])
