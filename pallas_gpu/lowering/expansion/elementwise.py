# SPDX-License-Identifier: Apache-2.0
"""Elementwise operations: the emitters' table, register by register."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.lowering.expansion.expand import Expansion, expands, is_array
from pallas_gpu.lowering.warpgroup.elementwise import DTYPES, OPERATIONS, PARAMS
from pallas_gpu.mosaic import elementwise, logical
from pallas_gpu.mosaic import registers as regs
from pallas_gpu.mosaic.elements import dtypes


@expands(*(logical.ELEMENTWISE + name for name in OPERATIONS))
def _elementwise(expansion: Expansion, op: Any) -> None:
    name = op.operation.name.removeprefix(logical.ELEMENTWISE)
    *operand_dtypes, dtype = (dtypes.named(a.value) for a in op.attributes[DTYPES])
    shape = tuple(op.result.type.shape)
    operands = [
        _operand(expansion, op, i, operand_dtype, shape)
        for i, operand_dtype in enumerate(operand_dtypes)
    ]
    if name == "convert_element_type":
        result = elementwise.astype(operands[0], dtype)
    else:
        result = elementwise.apply(name, *operands, **_params(op))
    expansion.set(op.result, result)
    expansion.dead.append(op.operation)


def _operand(
    expansion: Expansion, op: Any, i: int, dtype: np.dtype, shape: tuple[int, ...]
) -> regs.Array:
    value = op.operands[i]
    if is_array(value):
        return expansion.operand(op, i, dtype)
    return regs.Splat(value, dtype, shape)


def _params(op: Any) -> dict[str, Any]:
    params = {a.name: a.attr for a in op.attributes[PARAMS]}
    return {k: ir.IntegerAttr(v).value for k, v in params.items()}
