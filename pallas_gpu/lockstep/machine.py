# SPDX-License-Identifier: Apache-2.0
"""Runs a kernel's whole module on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.lockstep.launch import Host

# Bits of the types of which several elements share a byte of a buffer.
_SUB_BYTE = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}


def run_module(
    module: ir.Module,
    operands: Sequence[np.ndarray],
    results: Sequence[Any],
    initial: Mapping[int, np.ndarray] | None = None,
    seed: int = 0,
) -> list[np.ndarray]:
    """Runs a whole kernel's module.

    Args:
      module: as `pallas_gpu.lowering` gives it.
      operands: the arrays of the kernel.
      results: shapes and dtypes of what it returns.
      initial: contents of the results that are operands, too.
      seed: decides the order in which copies complete.

    Raises:
      NotModelled: it has an operation that the machine does not execute.
      PtxError: it breaks a rule of the PTX ISA.
    """
    outputs = [np.zeros(t.shape, t.dtype) for t in results]
    for i, contents in (initial or {}).items():
        outputs[i][...] = contents
    arrays = [*(np.array(x) for x in operands), *outputs]
    buffers = [_bytes(x) for x in arrays]
    with module.context:
        Host(buffers, len(operands), seed).run(module)
    for array, data in zip(arrays, buffers, strict=True):
        if _element_bits(array.dtype) < 8:
            array[...] = _elements(data, array.dtype, array.size).reshape(array.shape)
    return outputs


def _element_bits(dtype: np.dtype) -> int:
    return _SUB_BYTE.get(dtype.name, 8 * dtype.itemsize)


def _bytes(x: np.ndarray) -> np.ndarray:
    """The buffer of an array: XLA packs elements of 2 and 4 bits, the first lowest."""
    bits = _element_bits(x.dtype)
    raw = x.reshape(-1).view(np.uint8)
    if bits >= 8:
        return raw
    # Whole words, of which the kernel's atomic operations change the last one, too;
    # bits after the last element are anything.
    padded = np.full(-(-raw.size * bits // 32) * 32 // bits, 0xFF, np.uint8)
    padded[: raw.size] = raw
    parts = (padded & (1 << bits) - 1).reshape(-1, 8 // bits)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return np.bitwise_or.reduce(parts << shifts, axis=1, dtype=np.uint8)


def _elements(data: np.ndarray, dtype: np.dtype, count: int) -> np.ndarray:
    bits = _element_bits(dtype)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = (data[:, None] >> shifts & (1 << bits) - 1).astype(np.uint8)
    return codes.reshape(-1)[:count].view(dtype)
