# SPDX-License-Identifier: Apache-2.0
"""Reductions of copies to GMEM: their operations and element types."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

_FLOATS = ("float16", "bfloat16")
_INTEGERS = ("int32", "uint32", "int64", "uint64")
_UNSIGNED = {name: f"uint{name[-2:]}" for name in _INTEGERS}
_SIGNED = {name: f"int{name[-2:]}" for name in _INTEGERS}


@dataclasses.dataclass(frozen=True)
class CopyReduction:
    """How a copy combines its elements with those of GMEM.

    Attributes:
      operation: as PTX names it.
      elements: by the name of an array's dtype the element type that the tensor map
        states: it decides whether integers are compared as signed.
    """

    operation: str
    elements: Mapping[str, str]

    def element(self, dtype: Any) -> np.dtype:
        """Returns the element type that the tensor map states for an array."""
        return np.dtype(self.elements[np.dtype(dtype).name])


def lacks_tensor_map(dtype: Any) -> bool:
    """Returns whether copies combine such elements without a tensor map alone.

    PTX ISA: `.f64` is a type of cp.reduce.async.bulk, not of its tensor form.
    """
    return np.dtype(dtype) == np.float64


def signed_reduction(name: str, dtype: Any) -> str:
    """Returns a reduction by the name that says whether integers are signed.

    Stages that do not know the sign of an array's elements take that name.
    """
    kind = np.dtype(dtype).kind
    signed = name in ("min", "max") and kind in "iu"
    return {"i": "s", "u": "u"}[kind] + name if signed else name


def _as_they_are(*names: str) -> dict[str, str]:
    return {name: name for name in names}


# PTX ISA, cp.reduce.async.bulk: the types of each operation. Sums of int64 are stated
# as those of uint64, which have the same bits.
REDUCTIONS: dict[str, CopyReduction] = {
    "add": CopyReduction(
        "add",
        {
            **_as_they_are("int32", "uint32", "uint64", "float32", "float64", *_FLOATS),
            "int64": "uint64",
        },
    ),
    "min": CopyReduction("min", _as_they_are(*_INTEGERS, *_FLOATS)),
    "max": CopyReduction("max", _as_they_are(*_INTEGERS, *_FLOATS)),
    "umin": CopyReduction("min", _UNSIGNED),
    "umax": CopyReduction("max", _UNSIGNED),
    "smin": CopyReduction("min", _SIGNED),
    "smax": CopyReduction("max", _SIGNED),
    "inc": CopyReduction("inc", {"int32": "uint32", "uint32": "uint32"}),
    "dec": CopyReduction("dec", {"int32": "uint32", "uint32": "uint32"}),
    "and": CopyReduction("and", _UNSIGNED),
    "or": CopyReduction("or", _UNSIGNED),
    "xor": CopyReduction("xor", _UNSIGNED),
}
