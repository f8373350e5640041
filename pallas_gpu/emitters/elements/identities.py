# SPDX-License-Identifier: Apache-2.0
"""The identity of each operation that combines elements: it replaces padding."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.emitters.elements import dtypes

_IDENTITIES: dict[str, Callable[[np.dtype], object]] = {
    "add": lambda dtype: 0,
    "mul": lambda dtype: 1,
    "max": lambda dtype: _limit(dtype, largest=False),
    "min": lambda dtype: _limit(dtype, largest=True),
    "and": lambda dtype: _all_ones(dtype),
    "or": lambda dtype: 0,
    "xor": lambda dtype: 0,
    "logaddexp": lambda dtype: -np.inf,
}


def identity(kind: str, dtype: np.dtype) -> ir.Value:
    """The element e with `combine(e, x) == x` for all x.

    Args:
      kind: the operation.
      dtype: the elements' type.
    """
    return dtypes.constant(_IDENTITIES[kind](dtype), dtype)


def _limit(dtype: np.dtype, *, largest: bool) -> object:
    match dtypes.kind(dtype):
        case "float":
            return np.inf if largest else -np.inf
        case "float8" | "float4" | "exponent":
            limits = ml_dtypes.finfo(dtype)
            return limits.max if largest else limits.min
        case "bool":
            return largest
    integers = ml_dtypes.iinfo(dtype)
    return integers.max if largest else integers.min


def _all_ones(dtype: np.dtype) -> object:
    if dtypes.kind(dtype) == "bool":
        return True
    return np.array(-1, np.int64).astype(dtype)
