# SPDX-License-Identifier: Apache-2.0
"""Reductions of bulk copies to GMEM (PTX ISA, cp.reduce.async.bulk.tensor)."""

from __future__ import annotations

import numpy as np

from tests.support.lockstep.engine import KernelError

_EXTREMA = frozenset(["uint32", "int32", "uint64", "int64", "float16", "bfloat16"])
_BITS = frozenset(["uint32", "int32", "uint64", "int64"])

# The element types of a tensor map that each operation takes.
TYPES: dict[str, frozenset[str]] = {
    "add": frozenset(["uint32", "int32", "uint64", "float32", "float16", "bfloat16"]),
    "min": _EXTREMA,
    "max": _EXTREMA,
    "inc": frozenset(["uint32"]),
    "dec": frozenset(["uint32"]),
    "and": _BITS,
    "or": _BITS,
    "xor": _BITS,
}


def check(operation: str, dtype: np.dtype) -> None:
    """Raises for elements that the operation is not defined for."""
    if dtype.name not in TYPES[operation]:
        raise KernelError(f"cp.reduce.async.bulk.tensor.{operation} of {dtype.name}")


def apply(operation: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """The elements in memory after a reduction."""
    with np.errstate(all="ignore"):
        match operation:
            case "add":
                result = old + new
            case "min":
                result = np.fmin(old, new)
            case "max":
                result = np.fmax(old, new)
            case "inc":
                result = np.where(old < new, old + 1, 0)
            case "dec":
                result = np.where((old > 0) & (old <= new), old - 1, new)
            case "and":
                result = old & new
            case "or":
                result = old | new
            case "xor":
                result = old ^ new
    return result.astype(old.dtype)
