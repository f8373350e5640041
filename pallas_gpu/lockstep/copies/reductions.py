# SPDX-License-Identifier: Apache-2.0
"""Reductions of bulk copies to GMEM (PTX ISA, cp.reduce.async.bulk[.tensor])."""

from __future__ import annotations

import numpy as np

from pallas_gpu.errors import PtxError
from pallas_gpu.lockstep.assembly import dtype_of

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


def of_bytes(operation: str, exact: bool, kind: str) -> np.dtype:
    """The element type of cp.reduce.async.bulk, which names it: `.add.noftz.f16`."""
    dtype = dtype_of(kind)
    name = dtype.name
    by_bits = operation in ("and", "or", "xor")
    halves = name in ("float16", "bfloat16")
    fine = (kind[0] == "b" and kind != "bf16") == by_bits
    fine &= exact == (halves and operation == "add")
    fine &= name in TYPES[operation] or (operation, name) == ("add", "float64")
    if not fine:
        raise PtxError(f"cp.reduce.async.bulk.{operation} of .{kind}")
    return dtype


def check(operation: str, dtype: np.dtype) -> None:
    """Raises for elements that the operation is not defined for."""
    if dtype.name not in TYPES[operation]:
        raise PtxError(f"cp.reduce.async.bulk.tensor.{operation} of {dtype.name}")


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
