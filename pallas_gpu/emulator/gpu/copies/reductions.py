# SPDX-License-Identifier: Apache-2.0
"""What reductions of copies compute. PTX ISA, cp.reduce.async.bulk.tensor.

A copy combines its elements one by one with those in memory; the emulator does so for a
whole copy at once, in the order in which the seed lets copies complete.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pallas_gpu import types

_SMALLEST = np.finfo(np.float32).tiny


def combine(reduction: str, old: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Returns the elements after a reduction.

    Args:
      reduction: its name, of `types.REDUCTIONS`.
      old: the elements in memory.
      value: those that the copy brings, of the same shape and dtype.
    """
    row = types.REDUCTIONS[reduction]
    stated = row.element(old.dtype)
    pair = (np.ascontiguousarray(x).view(stated) for x in (old, value))
    with np.errstate(all="ignore"):
        result = _OPERATIONS[row.operation](*pair).astype(stated)
    return result.view(old.dtype).reshape(old.shape)


def _add(old: np.ndarray, value: np.ndarray) -> np.ndarray:
    if old.dtype != np.float32:
        return old + value
    return flushed(flushed(old) + flushed(value))


def flushed(x: np.ndarray) -> np.ndarray:
    """Returns float32 numbers with zeros for subnormals.

    PTX ISA, red and atom: add.f32 flushes them in global memory.
    """
    return np.where(np.abs(x) < _SMALLEST, np.copysign(np.float32(0), x), x)


def _minimum(old: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Of a number and a NaN the number; -0 is less than 0 (PTX ISA, min)."""
    if old.dtype.kind in "iu":
        return np.minimum(old, value)
    first = (old < value) | np.isnan(value) | ((old == value) & np.signbit(old))
    return np.where(first, old, value)


def _maximum(old: np.ndarray, value: np.ndarray) -> np.ndarray:
    if old.dtype.kind in "iu":
        return np.maximum(old, value)
    first = (old > value) | np.isnan(value) | ((old == value) & ~np.signbit(old))
    return np.where(first, old, value)


def _increment(old: np.ndarray, value: np.ndarray) -> np.ndarray:
    return np.where(old >= value, 0, old + 1)


def _decrement(old: np.ndarray, value: np.ndarray) -> np.ndarray:
    return np.where((old == 0) | (old > value), value, old - 1)


_OPERATIONS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": _add,
    "min": _minimum,
    "max": _maximum,
    "inc": _increment,
    "dec": _decrement,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
