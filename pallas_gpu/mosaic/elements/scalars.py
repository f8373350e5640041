# SPDX-License-Identifier: Apache-2.0
"""Typed operations on single values: loop counters, indices, conditions.

The sign of an integer comes from the numpy dtype; MLIR's integers have none.
"""

from __future__ import annotations

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_gpu.mosaic.elements import arithmetic, dtypes
from pallas_gpu.mosaic.elements.convert import convert_value


def constant(value: object, dtype: np.dtype) -> ir.Value:
    """A constant of a dtype, emitted once per kernel."""
    return dtypes.constant(value, np.dtype(dtype))


def compare(name: str, dtype: np.dtype, a: ir.Value, b: ir.Value) -> ir.Value:
    """Compares (`eq`, `ne`, `lt`, `le`, `gt`, `ge`); the result is i1."""
    return arithmetic.emit(name, np.dtype(dtype), a, b)


def select(condition: ir.Value, if_true: ir.Value, if_false: ir.Value) -> ir.Value:
    """Chooses by an i1."""
    return arith.select(condition, if_true, if_false)


def convert(value: ir.Value, src: np.dtype, dst: np.dtype) -> ir.Value:
    """Converts one value as lax's `convert_element_type` does."""
    return convert_value(value, np.dtype(src), np.dtype(dst))
