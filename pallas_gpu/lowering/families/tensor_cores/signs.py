# SPDX-License-Identifier: Apache-2.0
"""The signs of 8-bit integers that a product reads, which MLIR's types do not have."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.mosaic import registers as regs
from pallas_gpu.mosaic.elements import dtypes

# On a product: the numbers of its operands that are unsigned.
_UNSIGNED = "pallas_gpu.unsigned"


def mark(op: Any, operands: Mapping[int, Any]) -> None:
    """Records which operands of an operation are unsigned.

    Args:
      op: the product.
      operands: their dtypes, by their numbers.
    """
    numbers = [i for i, dtype in operands.items() if np.dtype(dtype) == dtypes.U8]
    if numbers:
        op.attributes[_UNSIGNED] = ir.DenseI64ArrayAttr.get(numbers)


def restored(op: Any, i: int, operand: Any) -> Any:
    """An operand, a view or an array, with the dtype that was recorded."""
    attributes = op.operation.attributes
    marked = _UNSIGNED in attributes
    if not marked or i not in ir.DenseI64ArrayAttr(attributes[_UNSIGNED]):
        return operand
    if isinstance(operand, regs.RegisterArray):
        return regs.with_sign(operand, dtypes.U8)
    return dataclasses.replace(operand, dtype=dtypes.U8)
